"""The balance loss of first choices alone, and biases of routers, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.distributed.sharding import leaf_spec
from moe_jax.functional.routing.route import route
from moe_jax.models import config_from_json, config_to_json
from tests.support.tiers import one_in

T, D, E = 24, 6, 4
EXPERT = moe_jax.FFNConfig(dim=8)


def reference(x, w, b, choices, top_k, valid):
    """The loss of tokens Float64[T, d], and its gradients by the router's kernel and bias."""
    z = (x @ w + b)[valid]
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    counted = np.argsort(-z, axis=-1, kind="stable")[:, : top_k if choices == "all" else 1]
    f = np.bincount(counted.reshape(-1), minlength=E) / counted.size
    loss = E * np.sum(f * p.mean(0))
    # d loss / d z_t = E / n * p_t * (f - <f, p_t>)
    dz = E / len(z) * p * (f - (p @ f)[:, None])
    return loss, x[valid].T @ dz, dz.sum(0)


@pytest.mark.parametrize("choices", ["all", "first"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_balance_loss_and_gradients(choices, top_k, strict_numerics):
    rng = np.random.default_rng(10 + top_k)
    x, w, b = rng.normal(size=(T, D)), rng.normal(size=(D, E)), rng.normal(size=E)
    valid = rng.random(T) > 0.2

    def loss(w, b):
        logits = jnp.asarray(x, jnp.float32) @ w + b[None, :]
        return route(logits, top_k, "softmax_topk", valid=jnp.asarray(valid), balance_choices=choices)[1].balance

    found, gradients = jax.value_and_grad(loss, argnums=(0, 1))(
        jnp.asarray(w, jnp.float32), jnp.asarray(b, jnp.float32)
    )
    expected, *of_parameters = reference(x, w, b, choices, top_k, valid)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for one, other in zip(gradients, of_parameters, strict=True):
        assert np.abs(other).max() > 1e-3
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


def test_the_load_of_all_choices_is_reported_beside_it():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(T, E)), jnp.float32)
    of_all, of_first = (route(logits, 2, "topk_softmax", balance_choices=one)[1] for one in ("all", "first"))
    np.testing.assert_array_equal(of_all.load, of_first.load)
    np.testing.assert_array_equal(of_all.balanced_load, of_all.load)
    assert not np.array_equal(of_first.balanced_load, of_first.load) and float(of_first.balanced_load.sum()) == 1


@one_in(2)
@pytest.mark.parametrize("universal", ["med", "none"])
def test_a_router_with_a_bias(universal, strict_numerics):
    config = moe_jax.MoEConfig(
        expert=EXPERT, num_experts=E, top_k=1, gate="softmax_topk" if universal == "none" else "topk_softmax",
        universal=universal, router_bias=True, balance_choices="first",
    )  # fmt: skip
    moe = moe_jax.MoE(config, D, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    moe.router.bias[...] = jnp.asarray(rng.normal(size=E), jnp.float32)
    x = jnp.asarray(rng.normal(size=(1, T, D)), jnp.float32)
    y, (stats,) = moe(x)
    tokens, w, b = np.float64(x[0]), np.float64(moe.router.kernel[...]), np.float64(moe.router.bias[...])
    z = tokens @ w + b
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    assert np.any(z.argmax(-1) != (tokens @ w).argmax(-1))  # it decides

    def ffn(module, kernel, rows):
        gate, up = (rows @ np.float64(kernel(getattr(module, name))) for name in ("gate", "up"))
        return gate / (1 + np.exp(-gate)) * up @ np.float64(kernel(module.down))

    every = [ffn(moe.experts, lambda linear, e=e: linear.kernel[...][e], tokens) for e in range(E)]
    expected = np.stack([p[t].max() * every[p[t].argmax()][t] for t in range(T)])
    if universal == "med":
        expected += ffn(moe.universal, lambda linear: linear.kernel[...], tokens)
    np.testing.assert_allclose(y[0], expected, atol=1e-5 * np.abs(expected).max())
    loss, by_kernel, by_bias = reference(tokens, w, b, "first", 1, np.ones(T, bool))
    np.testing.assert_allclose(stats.balance, loss, rtol=1e-5)
    gradient = nnx.grad(lambda moe: moe(x)[1][0].balance)(moe).router
    np.testing.assert_allclose(gradient.kernel[...], by_kernel, atol=1e-5 * np.abs(by_kernel).max())
    np.testing.assert_allclose(gradient.bias[...], by_bias, atol=1e-5 * np.abs(by_bias).max())


def test_configs_without_them_are_written_as_before():
    def config(**options):
        moe = moe_jax.MoEConfig(expert=EXPERT, num_experts=E, top_k=2, **options)
        attention = moe_jax.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
        layers = (moe_jax.LayerConfig(attention=attention, mlp=moe),)
        return moe_jax.ModelConfig(family="mixtral", vocab_size=8, d_model=D, max_positions=8, layers=layers)

    keys = config_to_json(config())["segments"][0]["pattern"][0]["moe"].keys()
    assert not {"router_bias", "balance_choices", "router"} & keys
    given = config(router_bias=True, balance_choices="first")
    written = config_to_json(given)
    assert written["segments"][0]["pattern"][0]["moe"].keys() - keys == {"router_bias", "balance_choices"}
    assert config_from_json(written) == given


def test_a_bias_is_on_every_device():
    assert leaf_spec("layers/0/mlp/router/bias") == jax.sharding.PartitionSpec()


@pytest.mark.parametrize("options", [{"balance_choices": "second"}, {"router_bias": True, "universal": "coder"}])
def test_what_does_not_go_together_is_refused(options):
    with pytest.raises(moe_jax.InputError, match=next(iter(options))):
        moe_jax.MoEConfig(expert=EXPERT, num_experts=E, top_k=2, **options)
