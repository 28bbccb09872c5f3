"""Which grouped product a GPU gets."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.gpu import grouped

SIZES = jnp.asarray([3, 0, 5], jnp.int32)


def test_a_dense_product_is_not_silent(caplog):
    """An old GPU. XLA's own product runs on any platform."""
    lhs, rhs = jnp.ones((10, 4)), jnp.ones((3, 4, 2))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            out = grouped.grouped_product(lhs, rhs, SIZES, capability=(7, 5))
            grouped.grouped_product(out, rhs, SIZES, capability=(7, 5), transposed=True)
        grouped.grouped_outer(lhs, out, SIZES, capability=(9, 0), one_device=False)
    np.testing.assert_array_equal(out, np.where(np.arange(10) < 8, 4, 0)[:, None] * np.ones((1, 2)))
    old, divided = [record.getMessage() for record in caplog.records if record.name == grouped.__name__]
    assert "this one has 7.5" in old and "3 times the arithmetic" in old
    assert "cannot divide" in divided and "3 times the arithmetic" in divided


@pytest.mark.parametrize(
    ("rows", "fan_in", "fan_out", "dtype", "capability", "fits"),
    [
        (8192, 4096, 14336, "bfloat16", (9, 0), True),
        (8192, 2048, 768, "float16", (9, 0), True),
        (8192, 4096, 14336, "bfloat16", (8, 0), False),
        (8192, 4096, 14336, "bfloat16", (10, 0), False),
        (8192, 4096, 14336, "bfloat16", None, False),
        (8192, 4096, 14336, "float32", (9, 0), False),
        (8000, 4096, 14336, "bfloat16", (9, 0), False),
        (8192, 4096, 16, "bfloat16", (9, 0), False),
        (8192, 16, 4096, "bfloat16", (9, 0), False),
        (0, 4096, 14336, "bfloat16", (9, 0), False),
    ],
)
def test_what_jaxs_kernel_for_hopper_takes(rows, fan_in, fan_out, dtype, capability, fits):
    lhs = jax.ShapeDtypeStruct((rows, fan_in), dtype)
    for shape, transposed in ((1, fan_in, fan_out), False), ((1, fan_out, fan_in), True):
        kernels = jax.ShapeDtypeStruct(shape, dtype)
        assert grouped.fits(lhs, kernels, capability, transposed=transposed) == fits
