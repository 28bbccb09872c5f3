"""Sums of products, which are one product on a TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.functional import dense
from moe_jax.functional.dense import Product, product_of_float32, sum_of_products
from tests.support.numerics import assert_close, normal

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
