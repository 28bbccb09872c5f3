"""Segments cover the layers exactly once, in order, with the repetition a person would see."""

from hypothesis import given
from hypothesis import strategies as st

from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, MoEConfig, segments_of

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4)
KINDS = {
    "d": LayerConfig(attention=ATTENTION, mlp=FFNConfig(dim=8)),
    "m": LayerConfig(attention=ATTENTION, mlp=MoEConfig(expert=FFNConfig(dim=8), num_experts=4, top_k=2)),
    "w": LayerConfig(attention=ATTENTION, mlp=FFNConfig(dim=16)),
}
NAMES = {layer: name for name, layer in KINDS.items()}


def cut(layers: str) -> list[tuple[str, int]]:
    segments = segments_of(tuple(KINDS[name] for name in layers))
    return [("".join(NAMES[layer] for layer in segment.pattern), segment.repeats) for segment in segments]


def test_the_usual_models():
    assert cut("d" * 32) == [("d", 32)]
    assert cut("dm" * 12) == [("dm", 12)]
    assert cut("d" + "m" * 27) == [("d", 1), ("m", 27)]
    assert cut("d" * 8 + "m" * 24) == [("d", 8), ("m", 24)]
    assert cut("ddm" * 5) == [("ddm", 5)]
    assert cut("dmw") == [("d", 1), ("m", 1), ("w", 1)]


@given(st.text("dmw", min_size=1, max_size=40))
def test_segments_cover_every_layer_once_and_in_order(layers):
    covered = "".join(pattern * repeats for pattern, repeats in cut(layers))
    assert covered == layers
    indices = []
    for segment in segments_of(tuple(KINDS[name] for name in layers)):
        for repeat in range(segment.repeats):
            indices += [segment.layer(repeat, position) for position in range(len(segment.pattern))]
    assert indices == list(range(len(layers)))
