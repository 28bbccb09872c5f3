"""Layers that differ only in the forms of their kernels are one segment, and give the tokens that they gave apart."""

import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.api.model import Loading
from moe_jax.distributed.sharding import make_mesh, path_name
from moe_jax.experts.arrangements import unlike_layers
from moe_jax.experts.arrangements.unlike_layers import stand_in
from moe_jax.experts.bank_config import BankConfig, BaseCodes
from moe_jax.experts.forms import Quantized
from moe_jax.generation import layer_loop
from moe_jax.generation.alike_layers import alike_segments, join_alike_layers
from moe_jax.generation.arrange import arranged
from moe_jax.generation.layer_loop import for_rows, loops
from moe_jax.generation.spec import GenerateSpec
from moe_jax.generation.texts import stream
from moe_jax.model_io.loading import abstract_model
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, LinearCodes, ModelConfig, MoEConfig
from moe_jax.nn import Decoder, MoE, init_cache, is_stacked
from moe_jax.nn.layer_words import layer_words
from tests.support.numerics import assert_close, logits_of, made_at_once
from tests.support.tiers import long, one_in

TOKENS = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
Q, OTHERS = "attention/q", ("attention/k", "attention/v", "attention/o")
OF_ATTENTION = (
    (LinearCodes(paths=(Q, *OTHERS), bits=4),),
    (LinearCodes(paths=(Q,), bits=3, table=True), LinearCodes(paths=OTHERS, bits=8)),
    (LinearCodes(paths=OTHERS, bits=4, group_size=32),),  # the map of queries stays whole
)
CODES = BaseCodes(code="4")
PARTS = (Quantized(bits=2), Quantized(bits=4))
OVER_BASES = (
    BankConfig(kind="low-rank", rank=2, base_codes=CODES),
    BankConfig(kind="low-rank", rank=3, base_codes=BaseCodes(code="8", gate_bits=4)),
    BankConfig(kind="quantized", bits=2, base_codes=CODES),
)
WITHOUT_BASE = (
    BankConfig(kind="quantized", bits=4, base="none"),
    BankConfig(kind="mixed", parts=PARTS, part_of=(1, 0, 1), base="none"),
    BankConfig(kind="mixed", parts=PARTS, part_of=(0, 1, 1), base="none"),
)
ALIKE = (WITHOUT_BASE[0],) * 3


@functools.cache
def model(banks, *, bias=False, dense_between=False) -> Decoder:
    """A decoder whose every number is drawn, codes too."""
    expert = FFNConfig(dim=128, bias=bias)
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32)
    layers = []
    for codes, bank in zip(OF_ATTENTION, banks):  # noqa: B905  (some tests have fewer layers)
        moe = MoEConfig(expert=expert, num_experts=3, top_k=2, bank=bank)
        layers.append(LayerConfig(attention=attention, mlp=moe, codes=codes))
        if dense_between:
            own = (LinearCodes(paths=("mlp/up", "mlp/down"), bits=codes[0].bits), *codes)
            layers.append(LayerConfig(attention=attention, mlp=FFNConfig(dim=128), codes=own))
    config = ModelConfig(
        family="llama", vocab_size=64, d_model=128, max_positions=64, layers=tuple(layers), dtype="bfloat16"
    )
    graphdef, state = nnx.split(made_at_once(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def drawn(path, leaf):
        if leaf.dtype == jnp.uint8:
            return jnp.asarray(rng.integers(0, 256, leaf.shape), leaf.dtype)
        is_scale = path_name(path).endswith("scales")
        numbers = rng.uniform(0.01, 0.02, leaf.shape) if is_scale else 0.1 * rng.standard_normal(leaf.shape)
        return jnp.asarray(numbers, leaf.dtype)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(drawn, state))


@one_in(2)
@pytest.mark.parametrize(
    ("banks", "options"),
    [(OVER_BASES, {}), (WITHOUT_BASE, {"bias": True, "dense_between": True})],
    ids=["over bases", "without"],
)
def test_joined_layers_give_the_same(banks, options):
    decoder = arranged(model(banks, **options))
    joined = nnx.clone(decoder)
    assert join_alike_layers(joined)
    assert loops(joined) == loops(decoder)
    assert len(joined.stack.segments) == 1 and len(decoder.stack.segments) == len(decoder.config.layers)
    words = layer_words(joined.stack.segments[0].blocks[0])
    assert all(form in words for form in ("quantized, 2 bits", "quantized, 4 bits", "quantized, 8 bits"))
    assert_close(logits_of(joined, TOKENS), logits_of(decoder, TOKENS))


@long
def test_they_generate_the_same_in_a_loop(monkeypatch):
    decoder = model(OVER_BASES[1:])

    def tokens() -> np.ndarray:
        return np.stack(list(stream(decoder, [[3, 4, 5, 6, 7]], GenerateSpec(max_new_tokens=24))))

    assert len(for_rows(arranged(decoder)).stack.segments) == 1
    looped = tokens()
    monkeypatch.setattr(layer_loop, "loops", lambda model: False)
    np.testing.assert_array_equal(looped, tokens())


def with_other_mlp(place: int, **options) -> Decoder:
    """The decoder of unlike layers, of which one has an MoE with other options and the same parameters."""
    decoder = nnx.clone(model(WITHOUT_BASE))
    layer = decoder.stack.layers[place]
    old = layer.mlp.module
    new = MoE(dataclasses.replace(old.config, **options), 128, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    nnx.update(new, nnx.state(old))
    layer.mlp = new
    return decoder


def with_other_router(place: int) -> Decoder:
    decoder = nnx.clone(model(WITHOUT_BASE))
    decoder.stack.layers[place].mlp.router = lambda x: -x[..., :3].astype(jnp.float32)
    return decoder


@one_in(2)
@pytest.mark.parametrize("replaced", [lambda: with_other_mlp(1, top_k=1), lambda: with_other_router(0)])
def test_a_layer_that_was_replaced_stays_what_it_is(replaced):
    decoder = replaced()
    generating = for_rows(arranged(decoder))
    assert len(generating.stack.segments) == 3
    assert_close(logits_of(generating, TOKENS), logits_of(decoder, TOKENS))


def test_stacked_layers_of_which_one_was_replaced_are_not_looped_over():
    config = model(ALIKE).config
    config = dataclasses.replace(config, layers=(config.layers[0],) * 4)
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    assert loops(arranged(decoder))
    decoder.stack.layers[0].mlp.router = lambda x: x[..., :3].astype(jnp.float32)
    assert is_stacked(decoder) and not loops(arranged(decoder)) and not is_stacked(for_rows(arranged(decoder)))


def test_the_model_stays_as_it_is_on_a_mesh_too():
    decoder = arranged(model(WITHOUT_BASE))
    before = jax.tree.map(np.asarray, nnx.state(decoder))
    with jax.set_mesh(make_mesh({"data": 2}, jax.devices()[:2])):
        assert len(for_rows(arranged(decoder)).stack.segments) == 3
    assert len(for_rows(decoder).stack.segments) == 1
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(decoder))


def test_caches_are_those_of_the_joined_layers():
    decoder = arranged(model(ALIKE))
    assert join_alike_layers(decoder)
    caches = init_cache(decoder.config, 2, 16, jnp.dtype(jnp.float32))
    out = jax.eval_shape(lambda: decoder(TOKENS, caches=caches))
    jax.tree.map(lambda before, after: np.testing.assert_equal(before.shape, after.shape), caches, out.caches)


def test_what_is_loaded_to_generate_or_to_score_is_joined(tmp_path):
    source = moe_jax.load(moe_jax.save(moe_jax.Model(model(WITHOUT_BASE)), tmp_path / "model")).source

    def segments(loading: Loading) -> int:
        return len(moe_jax.Model.of_source(source, loading).decoder.stack.segments)

    one, two = (make_mesh({"data": number}, jax.devices()[:number]) for number in (1, 2))
    assert segments(Loading.for_generation(source)) == segments(Loading(joined=True, mesh=one)) == 1
    assert segments(Loading()) == segments(Loading(joined=True, mesh=two)) == 3


def test_nothing_is_kept_twice():
    decoder = arranged(model.__wrapped__(WITHOUT_BASE))
    gc.collect()  # the model that it was made of

    def in_memory() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    before, whole = in_memory(), sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(decoder)))
    assert join_alike_layers(decoder)
    assert in_memory() - before < whole / 100


def test_shapes_are_enough_to_join_them():
    decoder = arranged(model(WITHOUT_BASE))
    abstract = arranged(abstract_model(decoder.config))
    assert join_alike_layers(abstract) and join_alike_layers(decoder)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.state(decoder)) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), nnx.state(abstract)
    )


def test_kernels_of_too_many_forms_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(unlike_layers, "MOST_FORMS", 2)
    decoder = arranged(model(ALIKE))
    before = jax.tree.map(np.asarray, nnx.state(decoder))
    assert not join_alike_layers(decoder)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(decoder))
    assert len(decoder.stack.segments) == 3


def test_layers_that_differ_otherwise_are_not_alike():
    config = model(WITHOUT_BASE).config
    assert alike_segments(config) is not None
    layer = config.layers[0]
    lacks_gate = BankConfig(kind="low-rank", rank=2, base_codes=BaseCodes(code="4", gate_bits=0))
    assert stand_in(OVER_BASES[0]) != stand_in(lacks_gate)
    others = [
        dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, top_k=1)),
        dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, bank=BankConfig())),
        dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, bank=BankConfig(kind="quantized", bits=4))),
        dataclasses.replace(layer, mlp=FFNConfig(dim=128)),
    ]
    for other in others:
        assert alike_segments(dataclasses.replace(config, layers=(layer, other))) is None
