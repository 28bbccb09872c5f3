"""The hidden states of low-rank experts, made in one kernel, in interpret mode against plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional.low_rank_hidden import Hidden, Projection, low_rank_hidden
from moe_jax.kernels.tpu import low_rank_hidden as kernel
from moe_jax.kernels.tpu.chip import ANY_CORE
from tests.numerics import assert_close

pytestmark = pytest.mark.usefixtures("strict_numerics")

FEATURES, SIZE, TOP_K = 256, 24, 2
ONE_ROUNDING = 2.0**-8


def arguments(rng, tokens, dtype=jnp.float32, equal=False):
    def random(*shape):
        return jnp.asarray(rng.standard_normal(shape) * 0.3, dtype)

    def projection():
        inner = random(tokens, TOP_K, SIZE)
        return Projection(random(tokens, FEATURES), jnp.zeros_like(inner) if equal else inner, random(SIZE, FEATURES))

    weights = jax.nn.softmax(random(tokens, TOP_K).astype(jnp.float32), axis=-1)
    return projection(), projection(), random(FEATURES, SIZE), weights


@functools.cache
def together(activation):
    def run(gate, up, a, weights):
        return Hidden(*kernel.low_rank_hidden(gate, up, a, weights, activation, interpret=True))

    return jax.jit(run)


@functools.cache
def apart(activation):
    return jax.jit(lambda *args: low_rank_hidden(*args, activation))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    # Several blocks of tokens and of the hidden layer, and several strips of a block.
    for name, value in {"_TOKEN_BLOCKS": (32,), "_WIDTHS": (128,), "_STRIP": 16}.items():
        monkeypatch.setattr(kernel, name, value)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("tokens", [1, 77])
def test_is_what_the_products_one_after_the_other_give(tokens, activation):
    @settings(max_examples=3)
    @given(st.integers(0, 99))
    def check(seed):
        given_ = arguments(np.random.default_rng(seed), tokens)
        got, expected = together(activation)(*given_), apart(activation)(*given_)
        assert_close(got.summed, expected.summed)
        assert_close(got.inner, expected.inner)

    check()


def test_is_rounded_once():
    exact = arguments(np.random.default_rng(0), 40, jnp.bfloat16)
    got = together("silu")(*exact)
    expected = apart("silu")(*jax.tree.map(lambda leaf: leaf.astype(jnp.float32), exact))
    assert got.summed.dtype == got.inner.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.summed.astype(jnp.float32), expected.summed, rtol=ONE_ROUNDING, atol=1e-6)
    # The hidden states are rounded for the product with `a`.
    assert_close(got.inner.astype(jnp.float32), expected.inner, 4 * ONE_ROUNDING)


def test_equal_hidden_states_are_their_sum_to_the_last_bit():
    """An upcycled model begins as its dense model, whatever the weights of the choices are (methods.md 2.5)."""
    gate, up, a, weights = arguments(np.random.default_rng(1), 40, equal=True)
    weights = jnp.stack([weights[:, 0], jnp.float32(1) - weights[:, 0]], axis=1)
    got = together("silu")(gate, up, a, weights)
    ones = jnp.tile(jnp.asarray([[1.0, 0.0]], jnp.float32), (40, 1))
    np.testing.assert_array_equal(got.summed, together("silu")(gate, up, a, ones).summed)


def test_the_gradient_is_that_of_the_products_one_after_the_other():
    args = arguments(np.random.default_rng(2), 9)

    def plain(gate, up, a, weights):
        h = [
            jax.nn.silu(gate.of_base + gate.inner[:, j] @ gate.b) * (up.of_base + up.inner[:, j] @ up.b)
            for j in range(TOP_K)
        ]
        return sum(weights[:, j, None] * h[j] for j in range(TOP_K)), jnp.stack([one @ a for one in h], axis=1)

    def loss(function, *args):
        summed, inner = function(*args)
        return jnp.sum(jnp.sin(summed)) + jnp.sum(jnp.cos(inner))

    got = jax.grad(lambda *args: loss(apart("silu"), *args), argnums=(0, 1, 2, 3))(*args)
    expected = jax.grad(lambda *args: loss(plain, *args), argnums=(0, 1, 2, 3))(*args)
    jax.tree.map(assert_close, got, expected)


@pytest.mark.parametrize(("features", "size", "fits"), [(11008, 128, True), (14336, 128, True), (100, 128, False)])
def test_which_shapes_have_blocks(features, size, fits, monkeypatch):
    monkeypatch.setattr(kernel, "_WIDTHS", (512, 256, 128))
    assert kernel.fits(features, 2, size, jnp.bfloat16, ANY_CORE) is fits
