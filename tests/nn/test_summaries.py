"""The `repr` of models, layers and banks: a screen of plain lines from shapes alone, for every kind of model."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moe_jax
from moe_jax.experts.shapes import shapes_of
from moe_jax.models import AttentionConfig, BankConfig, FFNConfig, LayerConfig, LoRAConfig, ModelConfig, MoEConfig
from moe_jax.nn import FFN, Decoder
from tests.support.dense_models import dense_config

ATTENTION = AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128)
CROSS = dataclasses.replace(ATTENTION, mask="bidirectional")
PLAIN = FFNConfig(dim=14_336)
DENSE = LayerConfig(attention=ATTENTION, mlp=PLAIN)


def with_experts(**changes) -> LayerConfig:
    mlp = MoEConfig(expert=PLAIN, num_experts=64, top_k=2, bank=BankConfig(kind="low-rank", rank=4))
    return dataclasses.replace(DENSE, mlp=dataclasses.replace(mlp, **changes))


def model_of(*layers: LayerConfig, **changes) -> ModelConfig:
    given = dict(family="llama", vocab_size=128_256, d_model=4096, max_positions=8192, dtype="bfloat16")
    return ModelConfig(**{**given, **changes}, layers=layers)


ENCODER = LayerConfig(attention=CROSS, mlp=PLAIN)
MODELS = {
    "dense": model_of(*[DENSE] * 80),
    "MoE": model_of(*[DENSE, with_experts()] * 40),
    "encoder-decoder": model_of(
        *[ENCODER] * 24, *[dataclasses.replace(DENSE, cross=CROSS)] * 24, num_encoder_layers=24, decoder_start_id=0
    ),
    "classifier": model_of(*[DENSE] * 4, num_classes=3),
    "no two layers alike": model_of(*(with_experts(bank=BankConfig(kind="low-rank", rank=1 + i)) for i in range(24))),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request) -> Decoder:
    """A model of up to 100 GB, without its arrays."""
    return shapes_of(lambda rngs: Decoder(MODELS[request.param], rngs=rngs))


def check(text: str, *, lines: int = 30) -> None:
    """Fails unless a text fits on a screen."""
    assert text.count("\n") < lines and max(map(len, text.split("\n"))) <= 120, text


def test_a_model_and_its_parts_fit_on_a_screen(model):
    for module in (model, model.stack, model.stack.segments[0], model.stack.segments[-1].blocks[-1], model.config):
        assert str(module) == repr(module)
        # Configs are one line, to be read by Python too.
        check(repr(module)) if isinstance(module, nnx.Module) else check("\n" * (len(repr(module)) // 120))
    banks = [module for _, module in nnx.iter_modules(model) if isinstance(module, moe_jax.MoE | moe_jax.ExpertBank)]
    for module in banks:
        check(repr(module), lines=5)


def test_it_says_what_is_in_which_layers():
    text = repr(shapes_of(lambda rngs: Decoder(MODELS["MoE"], rngs=rngs)))
    lines = [" ".join(line.split()) for line in text.replace("\n    ", " ").split("\n")]
    attention = "attention of 32 heads of 128, 8 of keys and values"
    assert lines[0].startswith("Decoder(llama, 80 layers of width 4,096, ") and "of bfloat16" in lines[0]
    assert lines[2] == f"layers {{0..78..2}}: {attention}; FFN of 14,336, gated silu"
    assert lines[3] == (
        f"layers {{1..79..2}}: {attention}; MoE of 64 experts, top-2, low-rank, rank 4; FFN of 14,336, gated silu"
    )
    both = " ".join(repr(shapes_of(lambda rngs: Decoder(MODELS["encoder-decoder"], rngs=rngs))).split())
    assert "encoder layers {0..23}" in both and "decoder layers {0..23}" in both and f"; cross-{attention}" in both
    assert "head of 3 classes" in repr(shapes_of(lambda rngs: Decoder(MODELS["classifier"], rngs=rngs)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(merged_experts=8), "merged into 8"),
        (dict(universal="one"), "universal FFN (one)"),
        (dict(bank=BankConfig(kind="low-rank", rank=4, base="none")), "low-rank, rank 4 without a base"),
        (dict(router_lora=LoRAConfig(rank=2, targets=("router",))), "router with LoRA of rank 2 on router"),
        (
            dict(
                perft=moe_jax.PerftConfig(
                    variant="routed", adapter=moe_jax.AdapterConfig(rank=8), num_experts=4, top_k=2
                )
            ),
            "4 routed adapters of rank 8, top-2",
        ),
        (dict(expert=FFNConfig(dim=8, gated=False, activation="relu", bias=True, nf4=True)), "8, relu, biases, NF4"),
    ],
)
def test_what_differs_from_a_plain_moe_is_said(changes, words):
    assert words in with_experts(**changes).mlp.describe()


def test_attention_in_words():
    given = dict(sliding_window=4096, mask="bidirectional", lora=LoRAConfig(rank=8, targets=("q", "v")), nf4=True)
    words = dataclasses.replace(ATTENTION, **given).describe().removeprefix("attention of 32 heads of 128, ")
    assert words == "8 of keys and values, bidirectional, NF4, window of 4,096, LoRA of rank 8 on q, v"


def test_traced_half_built_and_foreign_modules_have_one_too():
    model = moe_jax.tiny_model(experts=4).decoder
    graphdef, state = nnx.split(model)
    seen = []

    @jax.jit
    def show(state):
        traced = nnx.merge(graphdef, state)
        seen.extend(map(repr, (traced, traced.stack.segments[0].blocks[0].mlp.experts)))

    show(state)
    assert seen == [repr(model), repr(model.stack.segments[0].blocks[0].mlp.experts)]

    class Whole(nnx.Module):
        def __init__(self):
            self.model, self.scale = model, nnx.Param(jnp.ones(3))

    check(repr(Whole()))

    class Half(Decoder):
        def __init__(self):
            self.shown = repr(self)

    assert Half().shown == "Half(incomplete)"

    class Mine(FFN):
        """An FFN of a user's."""

    model.layers[1].mlp = Mine(FFNConfig(dim=8), 16, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32"))
    assert "Mine: FFN of 8, gated silu" in repr(model)
    assert repr(model.layers[0].mlp.experts[1]).startswith("<expert 1 of 4: down/kernel [32, 16]")


def test_configs_are_the_calls_that_make_them():
    public = {name: getattr(moe_jax.configs, name) for name in dir(moe_jax.configs)}
    for config in (*list(MODELS.values())[:4], moe_jax.tiny_model(experts=4).config, dense_config(num_layers=3)):
        assert eval(repr(config), public) == config
    assert repr(MODELS["dense"]).endswith("head_dim=128), mlp=FFNConfig(dim=14336)),) * 80, dtype='bfloat16')")
    assert repr(MODELS["no two layers alike"]).endswith("+ ... of 24 layers, dtype='bfloat16')")
    long = moe_jax.RopeConfig(scaling="longrope", factor=2.0, short_factor=(1.5,) * 64, long_factor=(2.5,) * 64)
    assert len(repr(long)) < 300
    coded = BankConfig(kind="low-rank", rank=4, train_base=False, base_codes=moe_jax.configs.BaseCodes(code="4"))
    assert (
        repr(coded) == "BankConfig(LowRank(rank=4), train_base=False, base_codes=BaseCodes(code='4', group_size=128))"
    )
    assert eval(repr(coded), public) == coded
