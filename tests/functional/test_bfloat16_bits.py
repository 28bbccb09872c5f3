"""Products with kernels in bfloat16 that are given as their bits, beside those in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional.few_rows.bfloat16_bits import grouped_product_of_bits, linear_of_bits, widened


def kernels_and_bits(seed, *shape):
    """Kernels [..., i, o] in float64, and the bits of the transposed ones."""
    kernels = np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)
    return kernels.astype(np.float64), jnp.asarray(kernels.view(np.uint16).swapaxes(-1, -2))


def drawn(seed, *shape):
    return np.random.default_rng(seed + 1).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def products():
    return jax.jit(linear_of_bits), jax.jit(grouped_product_of_bits)


def test_every_number_has_its_bits():
    every = np.arange(1 << 16, dtype=np.uint16)
    np.testing.assert_array_equal(widened(jnp.asarray(every)), every.view(ml_dtypes.bfloat16).astype(np.float32))


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    rows=st.sampled_from([(1,), (2, 3), (9,)]),
    shape=st.sampled_from([(5, 3), (4200, 4)]),  # the latter in more than one part
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_a_product_is_that_of_the_kernel(products, seed, rows, shape, dtype):
    kernel, bits = kernels_and_bits(seed, *shape)
    x = jnp.asarray(drawn(seed, *rows, shape[0]), dtype)
    got, expected = products[0](x, bits), np.asarray(x, np.float64) @ kernel
    assert got.dtype == dtype
    rounding = 1e-5 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=rounding, atol=rounding * np.sqrt(shape[0]))


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    experts=st.sampled_from([1, 3]),
    rows=st.sampled_from([1, 7, 30, 520]),
    shape=st.sampled_from([(5, 3), (32, 8)]),
)
def test_a_grouped_product_is_that_of_the_kernels(products, seed, experts, rows, shape):
    kernels, bits = kernels_and_bits(seed, experts, *shape)
    lhs = drawn(seed, rows, shape[0])
    of_rows = np.sort(np.random.default_rng(seed).integers(0, experts + 1, rows))  # the last lie beyond all groups
    sizes = np.bincount(of_rows, minlength=experts + 1)[:experts].astype(np.int32)
    expected = np.einsum("mi,mio->mo", lhs, np.concatenate([kernels, np.zeros((1, *shape))])[of_rows])
    got = products[1](jnp.asarray(lhs), bits, jnp.asarray(sizes))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.sqrt(shape[0]))


@pytest.mark.parametrize("width", [2048, 4096])
def test_of_two_rows_no_kernel_is_written(width):
    """Of more than 2,048 inputs, parts are multiplied: adding these up must not be made a part of their products."""
    bits = jax.ShapeDtypeStruct((3, 1024, width), jnp.uint16)
    rows, sizes = jax.ShapeDtypeStruct((2, width), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)
    program = jax.jit(grouped_product_of_bits).lower(rows, bits, sizes).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1024 * width / 4


def test_of_one_row_no_kernel_is_written():
    """In a loop over layers and with the expert known by its number alone: what the speed comes from."""
    _, bits = kernels_and_bits(0, 6, 2560, 64)

    def through_layers(x, bits):
        def layer(x, number):
            own = jax.lax.dynamic_index_in_dim(bits, (number * 5) % 6, 0, keepdims=False)
            return x + jnp.tile(linear_of_bits(x, own), (1, 40)), None

        return jax.lax.scan(layer, x, jnp.arange(4, dtype=jnp.int32))[0]

    x = jnp.asarray(drawn(0, 1, 2560))
    program = jax.jit(through_layers).lower(x, bits).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2560 * 64
