"""The MoE module with a universal FFN against one FFN per expert, forward and gradient, also over meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import leaf_spec, make_mesh, path_name
from moe_jax.functional.dense import ffn
from moe_jax.models import BankConfig, FFNConfig, MoEConfig, SelectionConfig
from moe_jax.nn.moe import MoE
from tests.support.numerics import assert_close, gradients_and_output, normal, randomised
from tests.support.tiers import one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

D_MODEL = 8
GATED, PLAIN = FFNConfig(dim=16), FFNConfig(dim=16, gated=False, activation="gelu", bias=True)
LOW_RANK, SPARSE = BankConfig(kind="low-rank", rank=3), BankConfig(kind="sparse", rate=0.8)


def config(universal, expert, bank=LOW_RANK, *, top_k=2, extended=False):
    """Three experts and the universal FFN: four in an extended bank."""
    return MoEConfig(expert=expert, num_experts=3, top_k=top_k, bank=bank, universal=universal, extended=extended)


CONFIGS = {
    "coder-full": config("coder", PLAIN, BankConfig()),
    "coder-low-rank-extended": config("coder", PLAIN, extended=True),
    "coder-sparse-extended": config("coder", GATED, SPARSE, extended=True),
    "med-sparse": config("med", PLAIN, SPARSE),
    "med-low-rank-extended": config("med", GATED, extended=True),
    # Shared experts beside gates that are none of theirs.
    "one-beside-sigmoid-scores": dataclasses.replace(config("one", PLAIN), gate="topk_sigmoid", gate_scale=2.5),
    "sigmoid-full": config("sigmoid", GATED, BankConfig()),
    "sigmoid-low-rank-extended": dataclasses.replace(config("sigmoid", PLAIN, extended=True), gate="softmax_topk"),
}


@functools.cache
def random_moe(moe_config):
    """A layer whose every parameter is random."""
    return randomised(lambda: MoE(moe_config, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32))


@nnx.jit
def apply(moe, x, valid=None, key=None):
    return moe(x, valid, key)


def per_ffn_reference(moe, x):
    """methods.md 2.4 word by word: every FFN materialised and applied to every token."""
    tokens, bank = x.reshape(-1, D_MODEL), moe.experts
    if moe.config.universal == "coder":
        logits = jnp.tanh(tokens @ moe.router.hidden.kernel[...]) @ moe.router.out.kernel[...]
    else:
        logits = tokens @ moe.router.kernel[...]
    p = jax.nn.sigmoid(logits) if moe.config.gate == "topk_sigmoid" else jax.nn.softmax(logits, axis=-1)
    best, chosen = jax.lax.top_k(p, moe.config.top_k)
    coder = moe.config.universal == "coder"
    routed = jax.nn.softmax(best, axis=-1) * best[:, :1] if coder else best
    if moe.config.weighting in ("topk_softmax", "topk_sigmoid"):
        routed = moe.config.gate_scale * best / jnp.sum(best, axis=-1, keepdims=True)
    weight = 1.0 - best[:, 0] if coder else jnp.ones(len(tokens))
    if moe.config.universal == "sigmoid":
        weight = jax.nn.sigmoid(tokens @ moe.router.universal.kernel[...])[:, 0]
    outputs = [ffn(tokens, bank.kernels(i), bank.biases(i), bank.expert.activation) for i in range(bank.num_experts)]
    universal = outputs.pop() if moe.config.extended else moe.universal(tokens)
    member = jax.nn.one_hot(chosen, 3, dtype=jnp.float32) * routed[..., None]
    y = jnp.einsum("ted,tke->td", jnp.stack(outputs, axis=1), member) + weight[:, None] * universal
    return y.reshape(x.shape)


@functools.cache
def layer_program(moe_config, reference):
    graphdef, _, rest = random_moe(moe_config)
    return gradients_and_output(graphdef, rest, per_ffn_reference if reference else lambda moe, x: moe(x)[0])


@one_in(10)
@pytest.mark.parametrize(
    ("name", "top_k"),
    [
        ("coder-full", 1),
        ("coder-full", 2),
        ("coder-full", 3),
        ("coder-low-rank-extended", 1),
        ("coder-low-rank-extended", 3),
        ("coder-sparse-extended", 2),
        ("med-sparse", 1),
        ("med-sparse", 2),
        ("med-low-rank-extended", 3),
        ("one-beside-sigmoid-scores", 2),
        ("sigmoid-full", 2),
        ("sigmoid-low-rank-extended", 2),
    ],
)
def test_a_layer_equals_one_ffn_per_expert(name, top_k):
    moe_config = dataclasses.replace(CONFIGS[name], top_k=top_k)

    @settings(max_examples=5)
    @given(st.integers(0, 999))
    def check(seed):
        x, target = normal(seed, 2, 2, 5, D_MODEL)
        params = random_moe(moe_config)[1]
        got, expected = (layer_program(moe_config, ref)(params, x, target) for ref in (False, True))
        assert_close(got, expected)

    check()


@one_in(8)
@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "expert": 2}, {"expert": 4, "tensor": 2}], ids=str)
@pytest.mark.parametrize("name", ["coder-low-rank-extended", "med-sparse", "sigmoid-full"])
def test_a_layer_over_a_mesh_equals_one_device(name, axes):
    """With noise in the router, which must not depend on the mesh."""
    moe_config = CONFIGS[name]
    if not moe_config.extended:  # the bank then has all four
        moe_config = dataclasses.replace(moe_config, num_experts=4)
    graphdef, params, rest = random_moe(moe_config)
    x, target = normal(0, 2, 8, 2, D_MODEL)

    def value(params, rest, x, target):
        y, stats = nnx.merge(graphdef, params, rest)(x, None, jax.random.key(5))
        return jnp.sum(y * target), (y, stats)

    program = jax.grad(value, argnums=(0, 2), has_aux=True)
    expected = jax.jit(program)(params, rest, x, target)
    mesh = make_mesh(axes)

    def put(path, leaf):
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, leaf_spec(f"layers/0/mlp/{path_name(path)}")))

    params, rest = (jax.tree_util.tree_map_with_path(put, state) for state in (params, rest))
    with jax.set_mesh(mesh):
        got = jax.jit(program)(params, rest, x, target)
    assert_close(got, expected)


@one_in(3)
@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("universal", ["coder", "med"])
def test_equal_ffns_add_up_to_one_where_the_weights_do(universal, extended):
    moe_config = config(universal, GATED, extended=extended)
    graphdef, params, rest = random_moe(moe_config)
    zero = jax.tree_util.tree_map_with_path(lambda path, a: a * 0 if "delta" in path_name(path) else a, params)
    moe = nnx.merge(graphdef, zero, rest)
    kernels = nnx.jit(lambda bank: bank.kernels(0))(moe.experts)
    if not extended:
        for name, kernel in kernels.items():
            getattr(moe.universal, name).kernel[...] = kernel
    x = normal(0, 1, 9, D_MODEL)
    dense = jax.jit(lambda x, kernels: ffn(x, kernels, {}, GATED.activation))(x, kernels)
    difference = float(jnp.max(jnp.abs(apply(moe, x)[0] - dense)))
    assert difference < 1e-5 if universal == "coder" else difference > 1e-2


def test_a_key_adds_noise_to_the_coder_router_and_to_nothing_else():
    graphdef, params, rest = random_moe(CONFIGS["coder-full"])
    moe = nnx.merge(graphdef, params, rest)
    x = normal(0, 1, 9, D_MODEL)
    keys = None, None, *map(jax.random.key, (0, 0, 1))
    calm, again, noisy, same, other = (apply(moe, x, None, key)[0] for key in keys)
    np.testing.assert_array_equal(calm, again)
    np.testing.assert_array_equal(noisy, same)
    assert jnp.max(jnp.abs(noisy - calm)) > 1e-3 and jnp.max(jnp.abs(noisy - other)) > 1e-3
    med = nnx.merge(*random_moe(CONFIGS["med-sparse"]))
    np.testing.assert_array_equal(apply(med, x)[0], apply(med, x, None, jax.random.key(0))[0])


def test_a_bias_of_selection_changes_whom_a_token_goes_to_and_is_not_trained():
    biased = SelectionConfig(bias=True)
    moe_config = dataclasses.replace(CONFIGS["sigmoid-full"], selection=biased, top_k=1, gate="top1")
    moe = nnx.merge(*random_moe(moe_config))
    assert "selection_bias" in nnx.state(moe)["router"] and "selection_bias" not in nnx.state(moe, nnx.Param)["router"]
    x = normal(0, 1, 9, D_MODEL)
    assert jnp.max(apply(moe, x)[1][0].load) < 1.0
    moe.router.selection_bias[...] = jnp.array([0.0, 0.0, 2.0])
    y, (stats,) = apply(moe, x)
    np.testing.assert_array_equal(stats.load, [0.0, 0.0, 1.0])
    p = jax.nn.softmax(x @ moe.router.kernel[...], axis=-1)[..., 2:]
    weight = jax.nn.sigmoid(x @ moe.router.universal.kernel[...])
    expected = p * ffn(x, moe.experts.kernels(2), {}, GATED.activation) + weight * moe.universal(x)
    assert_close(y, expected)


def test_bfloat16_is_within_its_rounding():
    moe = nnx.merge(*random_moe(CONFIGS["coder-full"]))
    x = normal(0, 1, 32, D_MODEL).astype(jnp.bfloat16)
    got, exact = apply(moe, x)[0], apply(moe, x.astype(jnp.float32))[0]
    assert got.dtype == jnp.bfloat16
    error = jnp.linalg.norm(got.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert 0 < error < 0.03


def test_capacity_drops_routed_experts_and_not_the_universal_ffn():
    moe_config = dataclasses.replace(config("med", GATED, BankConfig()), capacity_factor=1e-3)
    moe = nnx.merge(*random_moe(moe_config))
    x = normal(0, 1, 9, D_MODEL)
    y, (stats,) = apply(moe, x)
    assert stats.dropped > 0.6
    np.testing.assert_allclose(y[:, -1], moe.universal(x)[:, -1], atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "valid", "complaint"),
    [
        ((5, D_MODEL + 1), None, r"x .* shape \(5, 9\), expected \(\.\.\., any, 8\)"),
        ((D_MODEL,), None, r"x .* shape \(8,\)"),
        ((2, 5, D_MODEL), (5,), r"shape \(5,\), expected \(2, 5\)"),
    ],
)
def test_activations_that_do_not_fit_are_refused(shape, valid, complaint):
    layer = MoE(config("none", GATED), D_MODEL, rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match=complaint):
        layer(jnp.ones(shape), None if valid is None else jnp.ones(valid, bool))
