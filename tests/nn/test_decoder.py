"""The decoder: packing, rematerialisation, scanning, meshes, router statistics."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh, state_shardings
from moe_jax.model_io.loading import abstract_model
from moe_jax.models import AttentionConfig, BankConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig, RopeConfig
from moe_jax.nn import Decoder, MoE, auxiliary_loss, load_per_layer, unstacked
from moe_jax.nn.decoder import is_stacked
from tests.support.compilations import counting_compilations
from tests.support.numerics import initialised
from tests.support.tiers import long, one_in

ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
FFN = LayerConfig(attention=ATTENTION, mlp=FFNConfig(dim=32))
MOE = MoEConfig(expert=FFNConfig(dim=32), num_experts=4, top_k=2, balance_coef=0.01, z_coef=0.001)
TOKENS = np.random.default_rng(0).integers(0, 50, (8, 12), np.int32)


def config(layers, **changes):
    return ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=32, layers=layers, **changes)


def moe_layer(**bank):
    return LayerConfig(attention=ATTENTION, mlp=dataclasses.replace(MOE, bank=BankConfig(**bank)))


ALTERNATING = config((FFN, moe_layer()) * 2)


@nnx.jit
def apply(model, tokens, **options):
    return model(tokens, **options)


def decoder(config, seed=0, **options):
    return initialised(lambda: Decoder(config, rngs=nnx.Rngs(0), **options), seed)


@one_in(2, first=1)
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_call_outside_of_a_program_is_compiled_once_for_each_shape(remat):
    model = decoder(ALTERNATING, remat=remat)
    expected = apply(model, TOKENS).logits
    first = model(jnp.asarray(TOKENS)).logits
    with counting_compilations() as compiled:
        second = model(jnp.asarray(TOKENS)).logits
        assert not compiled
        model(jnp.asarray(TOKENS[:, :7]))
        assert compiled
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, expected, atol=1e-5)


def test_a_module_that_is_patched_is_compiled_anew(monkeypatch):
    """As is done to look into a model: the call before would have been found again."""
    model, ids = decoder(ALTERNATING), jnp.asarray(TOKENS)
    before, apply_moe = model(ids).logits, MoE.__call__
    monkeypatch.setattr(MoE, "__call__", lambda self, x, *given: (jnp.zeros_like(x), apply_moe(self, x, *given)[1]))
    after = model(ids).logits
    assert not np.allclose(after, before, atol=1e-3)
    np.testing.assert_allclose(nnx.jit(lambda model: model(ids).logits)(model), after, atol=1e-5)
    monkeypatch.undo()
    np.testing.assert_array_equal(model(ids).logits, before)


def test_packed_documents_do_not_see_each_other(strict_numerics):
    model = decoder(ALTERNATING)
    first, second = TOKENS[:1, :6], TOKENS[1:2, :6]
    packed = jnp.concatenate([first, second], axis=1)
    segments = jnp.array([[1] * 6 + [2] * 6], jnp.int32)
    positions = jnp.concatenate([jnp.arange(6)] * 2)[None]
    together = apply(model, packed, positions=positions, segment_ids=segments).logits
    np.testing.assert_allclose(together[:, :6], apply(model, first).logits, atol=1e-5)
    np.testing.assert_allclose(together[:, 6:], apply(model, second).logits, atol=1e-5)


def test_padding_changes_neither_logits_nor_statistics(strict_numerics):
    model = decoder(ALTERNATING)
    segments = jnp.where(jnp.arange(12)[None] < 9, 1, 0) * jnp.ones((8, 1), jnp.int32)
    padded, cut = apply(model, TOKENS, segment_ids=segments), apply(model, TOKENS[:, :9])
    np.testing.assert_allclose(padded.logits[:, :9], cut.logits, atol=1e-5)
    chex.assert_trees_all_close(padded.router, cut.router, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:tokens are 12 long")
@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_rotation_does_not_depend_on_neighbours_or_padding(scaling):
    factors = {"short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4} if scaling == "longrope" else {}
    rope = RopeConfig(scaling=scaling, factor=2.0, original_max_positions=6, **factors)
    short = dataclasses.replace(config((FFN,), rope=rope), max_positions=6)
    graphdef, state = nnx.split(decoder(short))
    model = nnx.merge(graphdef, jax.tree.map(lambda a: a * 8, state))  # attention is nearly even at initialisation
    alone = apply(model, TOKENS[:1, :5]).logits
    row = jnp.where(jnp.arange(12) < 5, TOKENS[:1], 0)
    valid = jnp.stack([jnp.arange(12) < 5, jnp.ones(12, bool)])
    batch = apply(model, jnp.concatenate([row, TOKENS[1:2]]), valid=valid).logits
    np.testing.assert_allclose(batch[:1, :5], alone, atol=1e-5)
    np.testing.assert_allclose(batch[1:], apply(model, TOKENS[1:2]).logits, atol=1e-5)
    assert not np.allclose(apply(model, row).logits[:, :5], alone, atol=1e-3)  # padding taken for text


@long
def test_rematerialisation_changes_nothing_but_memory():
    long = config((FFN, moe_layer()) * 4)
    state = nnx.state(decoder(long))

    def compiled(remat):
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: Decoder(long, rngs=nnx.Rngs(0), remat=remat)))
        loss = lambda state: jnp.mean(nnx.merge(graphdef, state)(TOKENS).logits ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss)).lower(state).compile()

    plain = compiled("none")
    expected = plain(state)
    for remat in ("full", "dots"):
        program = compiled(remat)
        chex.assert_trees_all_close(program(state), expected, rtol=1e-7, atol=1e-6)
        assert program.memory_analysis().temp_size_in_bytes < plain.memory_analysis().temp_size_in_bytes


def test_a_model_without_weights_is_that_which_is_drawn():
    stacked = config((FFN, moe_layer()) * 2)
    drawn = nnx.eval_shape(lambda: Decoder(stacked, rngs=nnx.Rngs(0), compute_dtype="bfloat16", remat="full"))
    assert nnx.split(abstract_model(stacked, compute_dtype="bfloat16", remat="full")) == nnx.split(drawn)


def test_a_model_that_is_not_stacked_is_not_copied():
    alone, stacked = (abstract_model(config((FFN, moe_layer()) * repeats)) for repeats in (1, 2))
    assert not is_stacked(alone) and unstacked(alone) is alone
    assert is_stacked(stacked) and unstacked(stacked) is not stacked


def test_program_does_not_grow_with_depth():
    def size(repeats):
        abstract = nnx.eval_shape(lambda: Decoder(config((FFN, moe_layer()) * repeats), rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(abstract)
        return len(jax.jit(lambda s: nnx.merge(graphdef, s)(TOKENS).logits).lower(state).as_text())

    assert size(24) < 1.02 * size(2)


def test_auxiliary_loss_and_load():
    layers = (moe_layer(), FFN, moe_layer(kind="low-rank", rank=2))
    model = decoder(config(layers))
    out = apply(model, TOKENS)
    loads = load_per_layer(model.config, out.router)
    assert list(loads) == [0, 2]
    for load in loads.values():
        np.testing.assert_allclose(jnp.sum(load), 1.0, rtol=1e-5)
    balance = sum(float(jnp.sum(stats.balance)) for stats in out.router)
    z = sum(float(jnp.sum(stats.z)) for stats in out.router)
    np.testing.assert_allclose(auxiliary_loss(model.config, out.router), 0.01 * balance + 0.001 * z, rtol=1e-5)


@long
def test_same_seed_same_parameters_on_any_mesh():
    small = config((moe_layer(),))
    state = jax.jit(lambda: nnx.state(Decoder(small, rngs=nnx.Rngs(3))))()
    mesh = make_mesh({"data": 1, "fsdp": 4, "tensor": 2})
    shardings = state_shardings(state, mesh)
    make = jax.jit(lambda: nnx.state(Decoder(small, rngs=nnx.Rngs(3))), out_shardings=shardings)
    chex.assert_trees_all_close(make(), state, rtol=1e-6)


def test_compute_dtype_is_not_the_dtype_of_the_parameters(strict_numerics):
    exact = apply(decoder(ALTERNATING), TOKENS).logits
    model = decoder(ALTERNATING, compute_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}
    logits = apply(model, TOKENS).logits
    assert logits.dtype == jnp.float32
    assert 0 < jnp.linalg.norm(logits - exact) / jnp.linalg.norm(exact) < 0.05


def test_logits_are_not_rounded_to_the_compute_dtype(strict_numerics):
    for tied in (True, False):
        described = config((FFN,), tie_embeddings=tied)
        logits = apply(decoder(described, compute_dtype="bfloat16"), TOKENS).logits
        assert float(jnp.mean(logits == logits.astype(jnp.bfloat16).astype(jnp.float32))) < 0.1


def test_a_tied_embedding_has_the_gradients_of_both_its_uses():
    small = config((FFN,))
    tied, free = decoder(dataclasses.replace(small, tie_embeddings=True)), decoder(small)
    for name in ("embed", "stack"):
        nnx.update(getattr(free, name), nnx.state(getattr(tied, name)))
    free.lm_head.kernel[...] = tied.embed.embedding[...].T
    loss = lambda model: jnp.mean(jnp.square(model(TOKENS).logits - 1.0))  # noqa: E731
    of_tied, of_free = (nnx.jit(nnx.grad(loss))(model) for model in (tied, free))
    looked_up, projected = of_free["embed"]["embedding"][...], of_free["lm_head"]["kernel"][...].T
    assert jnp.max(jnp.abs(projected)) > 1e-3 and jnp.max(jnp.abs(looked_up)) > 1e-5
    np.testing.assert_allclose(of_tied["embed"]["embedding"][...], looked_up + projected, rtol=1e-4, atol=1e-6)


def test_unknown_remat_is_an_input_error():
    with pytest.raises(InputError, match="unknown remat 'ful' .did you mean 'full'"):
        Decoder(ALTERNATING, rngs=nnx.Rngs(0), remat="ful")
