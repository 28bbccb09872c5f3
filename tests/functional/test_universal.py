"""Routing beside a universal FFN (methods.md 2.4)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional.routing.route import route
from moe_jax.functional.routing.token_choices import NO_EXPERT, Routing, add_choice
from moe_jax.functional.routing.universal import GATE_BESIDE, add_noise, coder_logits, universal_weight
from tests.support.numerics import normal

pytestmark = pytest.mark.usefixtures("strict_numerics")

jitted_route = jax.jit(route, static_argnames=("top_k", "gate"))


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x.astype(np.float64))
    return p / p.sum(-1, keepdims=True)


weight_beside = jax.jit(universal_weight, static_argnums=1)


@settings(max_examples=30)
@given(st.sampled_from([(1, 1, 1), (7, 4, 1), (7, 4, 2), (5, 3, 3)]), st.integers(0, 10**6))
def test_coder_weights_are_xfts_and_sum_to_one(shape, seed):
    tokens, num_experts, top_k = shape
    logits = np.random.default_rng(seed).standard_normal((tokens, num_experts)).astype(np.float32)
    routing, _ = jitted_route(jnp.asarray(logits), top_k, GATE_BESIDE["coder"])
    best = -np.sort(-softmax(logits), axis=-1)[:, :top_k]
    np.testing.assert_allclose(routing.weights, softmax(best) * best[:, :1], rtol=1e-5)
    weight = weight_beside(jnp.asarray(logits), "coder")
    np.testing.assert_allclose(weight, 1 - best[:, 0], atol=1e-6)
    np.testing.assert_allclose(np.sum(routing.weights, axis=1) + weight, 1.0, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 2])
def test_med_weights_are_the_full_softmaxs(top_k):
    logits = normal(0, 9, 4)
    routing, _ = jitted_route(logits, top_k, GATE_BESIDE["med"])
    np.testing.assert_allclose(routing.weights, -np.sort(-softmax(np.asarray(logits)))[:, :top_k], rtol=1e-5)
    np.testing.assert_array_equal(universal_weight(logits, "med"), np.ones(9))


def test_the_universal_ffn_is_the_last_choice():
    routing = Routing(jnp.array([[2, 0], [1, 2]], jnp.int32), jnp.array([[0.5, 0.2], [0.6, 0.1]]))
    extended = add_choice(routing, 3, jnp.array([0.3, 0.4]))
    np.testing.assert_array_equal(extended.experts, [[2, 0, 3], [1, 2, 3]])
    np.testing.assert_array_equal(extended.weights, np.float32([[0.5, 0.2, 0.3], [0.6, 0.1, 0.4]]))
    padded = add_choice(routing, 3, jnp.array([0.3, 0.4]), jnp.array([True, False]))
    np.testing.assert_array_equal(padded.experts[:, 2], [3, NO_EXPERT])
    np.testing.assert_array_equal(padded.weights[:, 2], np.float32([0.3, 0.0]))


def test_the_gate_network_is_linear_tanh_linear():
    rng = np.random.default_rng(0)
    x, hidden, out = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 6), (6, 3), (3, 3)))
    got = coder_logits(*map(jnp.asarray, (x, hidden, out)))
    np.testing.assert_allclose(got, np.tanh(x @ hidden) @ out, rtol=1e-5, atol=1e-6)


def test_noise_is_normal_with_a_learned_deviation():
    x = jnp.array([[1.0], [-2.0]])
    kernel = jnp.array([[0.0, 3.0]])
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.vmap(lambda key: add_noise(jnp.ones((2, 2)), x, kernel, key))(keys)
    deviation = np.log1p(np.exp(np.asarray(x @ kernel))) + 0.01
    np.testing.assert_allclose(np.mean(drawn, axis=0), 1.0, atol=0.2)
    np.testing.assert_allclose(np.std(drawn, axis=0), deviation, rtol=0.05)
    correlation = np.corrcoef(np.asarray(drawn).reshape(-1, 4).T)
    assert np.abs(correlation - np.eye(4)).max() < 0.06


def test_the_size_of_the_noise_has_a_gradient_at_zero():
    x, key = normal(0, 6, 4), jax.random.key(1)
    total = lambda kernel: jnp.sum(add_noise(jnp.zeros((6, 3)), x, kernel, key))  # noqa: E731
    gradient = jax.jit(jax.grad(total))(jnp.zeros((4, 3)))
    assert jnp.all(jnp.abs(gradient) > 1e-4)
