"""The loss of a batch, as `train` computes it, and parameters by what they are for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.training.step import make_step
from moe_jax.training.train_state import init_state
from tests.support.tiers import long

IDS = np.random.default_rng(0).integers(0, 64, (4, 9), np.int32)
BATCH = {"tokens": IDS[:, :-1], "targets": IDS[:, 1:]}
SEGMENTS = np.array([[1] * 3 + [2] * 3 + [0] * 2] * 4, np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 0, 0]] * 4, np.int32)
WEIGHTS = np.where(SEGMENTS > 1, 0.5, 0.0).astype(np.float32)


def model(**bank):
    layer = moe_jax.MoEConfig(
        expert=moe_jax.FFNConfig(dim=32), num_experts=4, top_k=2, balance_coef=0.1, z_coef=0.01,
        bank=moe_jax.BankConfig(**bank),
    )  # fmt: skip
    attention = moe_jax.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
    layers = (moe_jax.LayerConfig(attention=attention, mlp=layer),) * 2
    config = moe_jax.ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=64, layers=layers)
    return moe_jax.Decoder(config, rngs=nnx.Rngs(0))


@long
@pytest.mark.parametrize(
    "more",
    [{}, {"segment_ids": SEGMENTS, "positions": POSITIONS}, {"segment_ids": SEGMENTS, "weights": WEIGHTS}],
    ids=["plain", "packed", "weighted"],
)
def test_the_loss_is_that_of_the_step_that_train_uses(more):
    """To the last bit, where it is compiled as one program; the step reports its two parts."""
    decoder, batch = model(), BATCH | more
    graphdef, state = nnx.split(decoder)
    segments = more.get("segment_ids", np.ones((4, 8), np.int32))
    whole = {"segment_ids": segments, "weights": (segments > 0).astype(np.float32)} | batch
    step = make_step(graphdef, optax.sgd(0.0), lambda count: 0.0)
    optimizer = optax.sgd(0.0)
    after, metrics = jax.jit(step)(init_state(state, optimizer), nnx.State({}), whole)
    loss = jax.jit(lambda state: nnx.merge(graphdef, state).loss(batch))(state)
    np.testing.assert_allclose(loss, metrics.loss + metrics.auxiliary, rtol=1e-6)
    # And what it is, from logits.
    out = decoder(batch["tokens"], **{name: more[name] for name in ("segment_ids", "positions") if name in more})
    losses = optax.softmax_cross_entropy_with_integer_labels(out.logits, batch["targets"])
    expected = np.average(losses, weights=whole["weights"]) + decoder.auxiliary_loss(out)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert float(decoder.auxiliary_loss(out)) > 0.1


def test_a_batch_with_nothing_to_score_has_the_auxiliary_loss_alone():
    decoder = model()
    loss = decoder.loss(BATCH | {"weights": np.zeros((4, 8), np.float32)})
    np.testing.assert_allclose(loss, decoder.auxiliary_loss(decoder(BATCH["tokens"])), rtol=1e-6)
    assert float(moe_jax.tiny_model().decoder.auxiliary_loss(moe_jax.tiny_model().decoder(IDS))) == 0


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": IDS}, "no targets"),
        ({"targets": IDS}, "no tokens"),
        (BATCH | {"weight": WEIGHTS}, "did you mean 'weights'"),
        (BATCH | {"targets": IDS}, "targets has the shape"),
        (BATCH | {"targets": WEIGHTS}, "targets is of float32"),
        (BATCH | {"weights": WEIGHTS[:1]}, "weights has the shape"),
        (BATCH | {"targets": BATCH["targets"] - 64}, "targets has -"),
    ],
)
def test_a_batch_that_is_none_is_said(batch, message):
    with pytest.raises(InputError) as raised:
        model().loss(batch)
    assert message in str(raised.value)


def paths(decoder, wanted):
    return {"/".join(map(str, path[5:])) for path, _ in nnx.to_flat_state(nnx.state(decoder.stack, wanted))}


@long
def test_parameters_are_found_by_what_they_are_for():
    low_rank, adapters = model(kind="low-rank", rank=2), model(kind="adapter", adapter=moe_jax.AdapterConfig(rank=2))
    filters, matrices = moe_jax.filters, ("gate", "up", "down")
    base = {f"experts/base/{name}/kernel" for name in matrices}
    deltas = {f"experts/delta/{name}/{factor}" for name in matrices for factor in "ab"}
    assert paths(low_rank, filters.routers) == {"router/kernel"}
    assert paths(low_rank, filters.shared_base) == base and paths(low_rank, filters.deltas) == deltas
    assert paths(low_rank, filters.experts) == base | deltas and not paths(low_rank, filters.adapters)
    assert paths(adapters, filters.adapters) == {"experts/adapters/down", "experts/adapters/up"}
    grads = nnx.grad(lambda decoder: decoder.loss(BATCH), argnums=nnx.DiffState(0, filters.routers))(low_rank)
    assert [leaf.shape for leaf in jax.tree.leaves(grads)] == [(2, 16, 4)] and float(
        jnp.abs(jax.tree.leaves(grads)[0]).max()
    ) > 0


def test_codes_have_no_gradient():
    quantized = model(kind="quantized", bits=4, group_size=8)
    every = paths(quantized, moe_jax.filters.experts)
    assert every and not any("codes" in path for path in every)
