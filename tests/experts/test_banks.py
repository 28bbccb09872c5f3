"""Every bank against one FFN per expert, forward and gradient; on one device and over meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.experts import BankConfig, FFNConfig, make_bank
from moe_jax.functional.ffn import ffn
from moe_jax.functional.routing import Routing
from moe_jax.sharding import leaf_spec, make_mesh, path_name

pytestmark = pytest.mark.usefixtures("strict_numerics")

KINDS = {
    "full": BankConfig(),
    "low-rank": BankConfig(kind="low-rank", rank=3),
    "sparse": BankConfig(kind="sparse", rate=0.8),
}
FFNS = {
    "gated": FFNConfig(dim=16),
    "plain-biases": FFNConfig(dim=16, gated=False, activation="gelu", bias=True),
    "gated-biases": FFNConfig(dim=16, bias=True),
}
D_MODEL, EXPERTS = 8, 4


@functools.cache
def random_bank(kind, ffn_kind):
    """A bank whose every parameter is random, deltas and biases included."""
    bank = make_bank(KINDS[kind], FFNS[ffn_kind], EXPERTS, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32)
    graphdef, params, rest = nnx.split(bank, nnx.Param, ...)
    keys = iter(jax.random.split(jax.random.key(1), 64))
    params = jax.tree.map(lambda a: 0.5 * jax.random.normal(next(keys), a.shape), params)
    return graphdef, params, rest


def per_expert_reference(bank, x, routing):
    """Materialises every expert and sums what the chosen ones say, in the plainest way."""
    outputs = jnp.stack(
        [ffn(x, bank.kernels(i), bank.biases(i), bank.expert.activation) for i in range(EXPERTS)], axis=1
    )
    member = jax.nn.one_hot(routing.experts, EXPERTS, dtype=jnp.float32) * routing.weights[..., None]
    return jnp.einsum("ted,tke->td", outputs, member)


@functools.cache
def gradients_and_output(kind, ffn_kind, reference):
    graphdef, _, rest = random_bank(kind, ffn_kind)

    def value(params, x, weights, experts, target):
        bank = nnx.merge(graphdef, params, rest)
        routing = Routing(experts, weights)
        y = per_expert_reference(bank, x, routing) if reference else bank(x, routing)
        return jnp.sum(y * target), y

    # The output itself is compared, and not only the sum, in which large terms cancel.
    gradient = jax.grad(value, argnums=(0, 1, 2), has_aux=True)
    return jax.jit(gradient)


def draw(rng, tokens, top_k, concentration):
    """Random tokens and routing; a small concentration leaves experts empty."""
    shares = rng.dirichlet(np.full(EXPERTS, concentration)) + 1e-9
    experts = np.stack([rng.choice(EXPERTS, top_k, replace=False, p=shares / shares.sum()) for _ in range(tokens)])
    arrays = rng.standard_normal((tokens, D_MODEL)), rng.random((tokens, top_k)), rng.standard_normal((tokens, D_MODEL))
    x, weights, target = (jnp.asarray(a, jnp.float32) for a in arrays)
    return x, weights, jnp.asarray(experts, jnp.int32), target


def assert_close(got, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(np.max(np.abs(b))))
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=tolerance)


@pytest.mark.parametrize("ffn_kind", FFNS)
@pytest.mark.parametrize("kind", KINDS)
def test_bank_equals_one_ffn_per_expert(kind, ffn_kind):
    # The shapes are few, so that programs are compiled once; routing, which is data, is drawn freely.
    @settings(max_examples=15, deadline=None)
    @given(st.sampled_from([(1, 1), (9, 2), (9, EXPERTS)]), st.sampled_from([0.05, 5.0]), st.integers(0, 999))
    def check(shape, concentration, seed):
        data = draw(np.random.default_rng(seed), *shape, concentration)
        params = random_bank(kind, ffn_kind)[1]
        got, expected = (gradients_and_output(kind, ffn_kind, ref)(params, *data) for ref in (False, True))
        assert_close(got, expected)

    check()


@pytest.mark.parametrize("ffn_kind", ["gated", "plain-biases"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "expert": 2}, {"expert": 4, "tensor": 2}], ids=str)
@pytest.mark.parametrize("tokens", [16, 5], ids=["split", "indivisible"])
def test_bank_over_a_mesh_equals_one_device(kind, ffn_kind, axes, tokens):
    graphdef, params, rest = random_bank(kind, ffn_kind)
    data = draw(np.random.default_rng(0), tokens, 2, 1.0)
    expected = gradients_and_output(kind, ffn_kind, False)(params, *data)
    mesh = make_mesh(axes)

    def put(path, leaf):
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, leaf_spec(f"experts/{path_name(path)}")))

    params, rest = (jax.tree_util.tree_map_with_path(put, state) for state in (params, rest))

    def value(params, rest, x, weights, experts, target):
        y = nnx.merge(graphdef, params, rest)(x, Routing(experts, weights))
        return jnp.sum(y * target), y

    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(value, argnums=(0, 2, 3), has_aux=True))(params, rest, *data)
    assert_close(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_within_its_rounding(kind):
    graphdef, params, rest = random_bank(kind, "gated")
    bank = nnx.merge(graphdef, params, rest)
    x, weights, experts, _ = draw(np.random.default_rng(0), 32, 2, 1.0)
    exact = bank(x, Routing(experts, weights))
    got = bank(x.astype(jnp.bfloat16), Routing(experts, weights))
    assert got.dtype == jnp.bfloat16
    error = jnp.linalg.norm(got.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert 0 < error < 0.03


def test_low_rank_never_forms_a_kernel_per_expert():
    bank = make_bank(KINDS["low-rank"], FFNConfig(dim=512), 8, 256, rngs=nnx.Rngs(0), dtype=jnp.float32)
    graphdef, state = nnx.split(bank)
    x, routing = jnp.ones((16, 256)), Routing(jnp.zeros((16, 2), jnp.int32), jnp.ones((16, 2)))

    def loss(state):
        return jnp.sum(nnx.merge(graphdef, state)(x, routing))

    compiled = jax.jit(jax.grad(loss)).lower(state).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 256 * 512 * 4


def test_counts_bytes_and_frozen_leaves():
    sparse = make_bank(
        BankConfig(kind="sparse", rate=0.5, train_base=False), FFNS["gated"], 4, 8, rngs=nnx.Rngs(0), dtype=jnp.bfloat16
    )
    assert sparse.num_parameters() == 3 * 8 * 16 + 4 * 3 * 64  # base and values
    assert sparse.num_bytes() == 2 * sparse.num_parameters() + 4 * (4 * 3 * 64)  # and int32 positions
    assert sparse.frozen_leaves().search("base/gate/kernel")
    assert not sparse.frozen_leaves().search("delta/gate/values")
    full = make_bank(KINDS["full"], FFNS["plain-biases"], 4, 8, rngs=nnx.Rngs(0), dtype=jnp.float32)
    assert full.num_parameters() == 4 * (2 * 8 * 16 + 16 + 8)
    assert not full.frozen_leaves().search("gate/kernel")


def test_sparse_positions_are_distinct_and_differ_between_experts():
    bank = make_bank(KINDS["sparse"], FFNS["gated"], 4, 8, rngs=nnx.Rngs(0), dtype=jnp.float32)
    positions = np.asarray(bank.delta["up"].positions[...])
    assert positions.dtype == np.int32 and positions.shape == (4, round(8 * 16 * 0.2))
    assert np.all(np.diff(positions, axis=1) > 0) and positions.min() >= 0 and positions.max() < 128
    assert len({tuple(row) for row in positions}) == 4
