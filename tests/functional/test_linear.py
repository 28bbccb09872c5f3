"""Sums of products, which are one product on a TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.functional import dense
from moe_jax.functional.dense import Product, linear, linear_float32, product_of_float32, sum_of_products
from moe_jax.functional.few_rows import bfloat16_kernels
from tests.support.numerics import assert_close, normal
from tests.support.tiers import one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

ONE, OTHER = (Product(normal(0, 2, 5, width), normal(1, width, 7)) for width in (4, 3))


@pytest.mark.parametrize("way", [dense._concatenated, dense._added, sum_of_products])
def test_sum_of_products_and_its_gradients(way):
    def value(way, *products):
        y = way(*products)
        return jnp.sum(jnp.cos(y)), y

    def plain(one, other):
        return one.x @ one.kernel + other.x @ other.kernel

    got, expected = (
        jax.jit(jax.grad(lambda *data, way=way: value(way, *data), argnums=(0, 1), has_aux=True))(ONE, OTHER)
        for way in (way, plain)
    )
    assert_close(got, expected)


def test_one_product_is_computed_for_a_tpu():
    for platform, products in (("tpu", 1), ("cpu", 2), ("cuda", 2)):
        text = jax.jit(sum_of_products).trace(ONE, OTHER).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.dot_general") == products


def test_of_float32_is_rounded_to_16_bits_at_most():
    x, kernel = normal(0, 8, 16), normal(1, 16, 4).astype(jnp.bfloat16)
    got = jax.jit(lambda x, kernel: product_of_float32(x, kernel, jnp.bfloat16))(x, kernel)
    assert got.x.dtype == got.kernel.dtype == jnp.bfloat16
    wide = got.x.astype(jnp.float32) @ got.kernel.astype(jnp.float32)
    np.testing.assert_allclose(wide, x @ kernel.astype(jnp.float32), atol=1e-4)
    assert_close(product_of_float32(x, kernel, jnp.float32).x, x)


@one_in(4)
@pytest.mark.parametrize("rows", range(1, bfloat16_kernels.MOST_ROWS + 2))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_few_rows_times_a_kernel_in_bfloat16(rows, dtype):
    """Rounded as often as any product is: of float32 no more than the sum of as many terms."""
    x, kernel = (1e3 * normal(0, rows, 48)).astype(dtype), normal(1, 48, 20).astype(jnp.bfloat16)
    got, sums = jax.jit(lambda *given: (linear(*given), bfloat16_kernels.sums_in_float32(*given)))(x, kernel)
    wide, weights = (np.asarray(array, np.float64) for array in (x, kernel))
    # Sums of float32 may be rounded in any order; what is narrower is rounded once more.
    allowed = 48 * 2.0**-23 * (np.abs(wide) @ np.abs(weights))
    rounded = 0 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps) * (np.abs(wide) @ np.abs(weights))
    assert (got.dtype, sums.dtype) == (dtype, jnp.float32)
    assert np.all(np.abs(np.asarray(sums, np.float64) - wide @ weights) <= allowed)
    assert np.all(np.abs(np.asarray(got, np.float64) - wide @ weights) <= allowed + rounded)


@pytest.mark.parametrize("width", [1024, 4096])
@pytest.mark.parametrize("rows", [1, 3])
def test_of_few_rows_a_transposed_kernel_in_bfloat16_is_not_written(rows, width):
    """As an embedding that is also the head is."""
    x, kernel = normal(0, rows, width), normal(1, 500, width).astype(jnp.bfloat16)

    def product(x, kernel):
        return linear_float32(x, kernel.T)

    program = jax.jit(lambda x, kernel: bfloat16_kernels.row_after_row(x, kernel, product)).lower(x, kernel).compile()
    assert program.memory_analysis().temp_size_in_bytes < 500 * width / 4
    assert_close(program(x, kernel), product(x, kernel), tolerance=1e-5)


def test_few_rows_are_split_on_a_cpu_alone():
    x, kernel = normal(0, 1, 48), normal(1, 48, 20).astype(jnp.bfloat16)
    for platform, few in (("tpu", False), ("cpu", True), ("cuda", False)):
        text = jax.jit(linear).trace(x, kernel).lower(lowering_platforms=(platform,)).as_text()
        assert ("reduce_precision" in text) == few


def test_gradients_of_few_rows_are_those_of_the_product():
    x, kernel = normal(0, 2, 48), normal(1, 48, 20).astype(jnp.bfloat16)
    got, expected = (
        jax.jit(jax.grad(lambda x, kernel, way=way: jnp.sum(jnp.sin(way(x, kernel))), argnums=(0, 1)))(x, kernel)
        for way in (linear, bfloat16_kernels._cast_product)
    )
    assert_close(got[0], expected[0])
    assert got[1].dtype == jnp.bfloat16
    assert_close(got[1].astype(jnp.float32), expected[1].astype(jnp.float32), tolerance=2.0**-7)
