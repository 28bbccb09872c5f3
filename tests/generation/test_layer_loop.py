"""Tokens that are generated in a loop over stacked layers of codes, or of the bits of bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.api.model import Loading
from moe_jax.experts.bank_config import BankConfig
from moe_jax.experts.linear import OfAllLayers
from moe_jax.experts.shapes import AdapterConfig, LoRAConfig
from moe_jax.generation import layer_loop
from moe_jax.generation.arrange import arranged
from moe_jax.generation.continued_rows import ask
from moe_jax.generation.engine import Engine
from moe_jax.generation.layer_loop import for_rows, loops
from moe_jax.generation.sizes import Size, shapes_of
from moe_jax.generation.spec import GenerateSpec
from moe_jax.generation.texts import stream
from moe_jax.model_io.loading import abstract_model
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.nn import Caches, Decoder, init_cache, is_stacked, unstacked
from tests.support.numerics import assert_close, logits_of
from tests.support.tiers import long, one_in

PROMPTS = [[3, 4, 5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def whole():
    """A model whose kernels are large beside its norms and routers."""
    moe = MoEConfig(expert=FFNConfig(dim=256), num_experts=4, top_k=2)
    layer = LayerConfig(attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32), mlp=moe)
    config = ModelConfig(family="llama", vocab_size=64, d_model=128, max_positions=512, layers=(layer,) * 2)
    graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    # Larger than at initialisation, so that the choices are not near ties.
    return moe_jax.Model(nnx.merge(graphdef, jax.tree.map(lambda a: a * 8 if a.ndim > 2 else a, state)))


@pytest.fixture(scope="module")
def coded(whole):
    return moe_jax.compress(whole, method="quantize", bits=4, of="model")


@pytest.fixture(scope="module")
def narrow(whole):
    graphdef, state = nnx.split(whole.decoder)
    decoder = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state))
    decoder.config = dataclasses.replace(decoder.config, dtype="bfloat16")
    return moe_jax.Model(decoder)


def test_layers_are_looped_over_if_little_is_copied(whole, coded):
    assert loops(coded.decoder) and loops(abstract_model(coded.config))
    assert not loops(unstacked(coded.decoder))
    assert is_stacked(for_rows(coded.decoder)) and not is_stacked(for_rows(whole.decoder))
    # Kernels of attention would be copied, but not experts, and LoRA is little.
    all_but_attention = moe_jax.compress(whole, method="quantize", bits=4)
    all_but_experts = moe_jax.compress(whole, method="quantize", bits=4, of="rest")
    with_lora = moe_jax.adapt(coded, method="lora", targets="q", adapter="lora:2")
    answers = [loops(model.decoder) for model in (whole, all_but_attention, all_but_experts, with_lora)]
    assert answers == [False, False, True, True]


@pytest.mark.parametrize(("name", "is_looped"), [("coded", True), ("whole", False)])
def test_what_is_loaded_to_generate_is_stacked_where_it_is_looped_over(name, is_looped, request, tmp_path):
    source = moe_jax.load(moe_jax.save(request.getfixturevalue(name), tmp_path / name)).source
    assert Loading.for_generation(source).stacked == is_looped


def test_kernels_in_bfloat16_are_looped_over_as_bits(narrow, tmp_path):
    assert loops(arranged(narrow.decoder)) and not loops(narrow.decoder)
    source = moe_jax.load(moe_jax.save(narrow, tmp_path / "narrow")).source
    assert Loading.for_generation(source).stacked


def in_nf4(adapter_rank: int, lora_rank: int) -> ModelConfig:
    """The config of PESC experts after FFNs in NF4, all of whose kernels have LoRA."""
    bank = BankConfig(kind="adapter", adapter=AdapterConfig(rank=adapter_rank, activation="gelu"))
    ffn = FFNConfig(dim=256, nf4=True, lora=LoRAConfig(rank=lora_rank, targets=("gate", "up", "down")))
    moe = MoEConfig(expert=ffn, num_experts=4, top_k=2, bank=bank)
    attention = AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=32, nf4=True, lora=LoRAConfig(rank=lora_rank, targets=("q", "v"))
    )
    layer = LayerConfig(attention=attention, mlp=moe)
    return ModelConfig(family="llama", vocab_size=64, d_model=128, max_positions=512, layers=(layer,) * 2)


def with_larger_adapters(decoder: Decoder) -> moe_jax.Model:
    def larger(path: tuple, leaf: jax.Array) -> jax.Array:
        return leaf + 0.1 * jnp.sin(jnp.arange(leaf.size).reshape(leaf.shape)) if "adapters" in str(path) else leaf

    graphdef, state = nnx.split(decoder)
    return moe_jax.Model(nnx.merge(graphdef, jax.tree_util.tree_map_with_path(larger, state)))


@pytest.fixture(scope="module")
def grouped():
    """Adapters that are so large that only those which a token chose are multiplied."""
    return with_larger_adapters(Decoder(in_nf4(160, 4), rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def side_by_side():
    return with_larger_adapters(Decoder(in_nf4(8, 4), rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def tuned(coded):
    """PEFT experts without weights, which all tokens go to, beside experts in codes."""
    return with_larger_adapters(moe_jax.adapt(coded, method="perft-d", experts=2, adapter="parallel:8").decoder)


def test_adapters_are_looped_over_and_little_lora():
    assert loops(abstract_model(in_nf4(128, 16))) and not loops(abstract_model(in_nf4(8, 128)))


def test_a_loop_gives_the_tokens_that_single_layers_give(coded, monkeypatch):
    def tokens() -> np.ndarray:
        return np.stack(list(stream(coded.decoder, PROMPTS, GenerateSpec(max_new_tokens=24))))

    looped = tokens()
    monkeypatch.setattr(layer_loop, "_copies_little", lambda model: False)
    np.testing.assert_array_equal(looped, tokens())


@one_in(2)
@pytest.mark.parametrize("name", ["narrow", "grouped", "side_by_side", "tuned"])
def test_experts_and_adapters_of_all_layers_give_what_those_of_each_layer_give(name, request):
    decoder = arranged(request.getfixturevalue(name).decoder)
    joined = for_rows(decoder)
    assert any(isinstance(leaf, OfAllLayers) for _, leaf in nnx.iter_graph(joined))
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    assert_close(logits_of(joined, tokens), logits_of(decoder, tokens))


def test_a_loop_copies_no_more_than_one_layer_of_the_caches(coded):
    decoder = for_rows(coded.decoder)
    graphdef, state = nnx.split(decoder)

    def step(state: nnx.State, caches: Caches, token: jax.Array) -> Caches | None:
        return nnx.merge(graphdef, state)(token, positions=token, caches=caches).caches

    def sizes(slots: int) -> tuple[int, int]:
        caches = jax.eval_shape(lambda: init_cache(decoder.config, 1, slots, jnp.dtype(jnp.float32)))
        token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        memory = jax.jit(step, donate_argnums=1).lower(state, caches, token).compile().memory_analysis()
        return memory.temp_size_in_bytes, sum(leaf.size * 4 for leaf in jax.tree.leaves(caches))

    (little, short), (much, long_) = sizes(64), sizes(512)
    # The model has three layers; scores, and which keys a token sees, take some bytes for every slot too.
    assert much - little < (long_ - short) / 2


@long
def test_rows_of_a_loop_move_as_others_do(coded, monkeypatch):
    """Caches of stacked layers lie in one array, whose rows are at the same place."""
    asked = ask(2, 8, key=jax.random.split(jax.random.key(0), 2), temperature=0.0, top_k=0, top_p=1.0, stop_ids=[])
    given = []
    for is_looped in (True, False):
        monkeypatch.setattr(layer_loop, "_copies_little", lambda model, answer=is_looped: answer)
        engine = Engine(coded.decoder, draws=False)
        rows, first, _ = engine.read(PROMPTS, asked, 16)
        moved = engine.mover.move(rows, [1, -1, 0], Size(3, 32))
        assert shapes_of(moved) == engine.mover.resized(shapes_of(rows), Size(3, 32))
        _, block = engine.advance(moved, 6, stay=np.array([True, False, True]))
        given.append((first.tokens, block.tokens))
    jax.tree.map(np.testing.assert_array_equal, *given)
    assert jnp.all(given[0][1][:, 1] == -1)
