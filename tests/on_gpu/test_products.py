"""Grouped products on the GPU, each kernel that fits, at sizes of real layers against products in float32."""

import jax
import jax.numpy as jnp
import pytest

from moe_jax.functional.grouped import grouped_matmul
from moe_jax.kernels.gpu.grouped import TritonProducts, fits, hopper_product
from moe_jax.kernels.hardware import compute_capability
from moe_jax.kernels.plain import ragged_outer, ragged_product
from tests.on_gpu.measured import ROUNDING, error, needs_gpu, normal
from tests.support.environment import INTERPRET

pytestmark = needs_gpu

GROUPS = 8
# Rows, fan-in and fan-out. Tiles divide those of Mixtral and OLMoE, and none of the last.
MIXTRAL, OLMOE, ODD = (2048, 4096, 14336), (4096, 2048, 1024), (1000, 300, 130)


def sizes_of(rows):
    """Empty groups, one of a single row, and rows after the last group."""
    return jnp.asarray([0, 1, rows // 2 + 3, 0, rows // 8, 17, 0, 0], jnp.int32)


@jax.jit
def by_xla(lhs, rhs, dout, sizes):
    """The three products in float32, by XLA's own, which multiplies every row with every kernel."""
    lhs, rhs, dout = (a.astype(jnp.float32) for a in (lhs, rhs, dout))
    with jax.default_matmul_precision("highest"):
        y, dlhs = ragged_product(lhs, rhs, sizes), ragged_product(dout, jnp.swapaxes(rhs, 1, 2), sizes)
        return y, dlhs, ragged_outer(lhs, dout, sizes)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (MIXTRAL, "bfloat16"),
        (OLMOE, "bfloat16"),
        (OLMOE, "float16"),
        (OLMOE, "float32"),
        (ODD, "bfloat16"),
        (ODD, "float32"),
    ],
    ids=str,
)
def test_grouped_products(shape, dtype):
    (rows, fan_in, fan_out), given = shape, sizes_of(shape[0])
    lhs = normal(0, (rows, fan_in), dtype)
    rhs = normal(1, (GROUPS, fan_in, fan_out), dtype, fan_in**-0.5)
    dout = normal(2, (rows, fan_out), dtype)
    expected = by_xla(lhs, rhs, dout, given)
    triton = TritonProducts(compute_capability(), INTERPRET)

    def chosen(lhs, rhs, dout, sizes):
        y, pull = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes), lhs, rhs)
        return y, *pull(dout)

    def by_triton(lhs, rhs, dout, sizes):
        product = triton.product
        return product(lhs, rhs, sizes), product(dout, rhs, sizes, transposed=True), triton.outer(lhs, dout, sizes)

    found = {"chosen": chosen, "Triton": by_triton}
    if fits(lhs, rhs, compute_capability()):
        found["Mosaic"] = lambda lhs, rhs, dout, sizes: (
            hopper_product(lhs, rhs, sizes),
            hopper_product(dout, rhs, sizes, transposed=True),
        )
    errors = {}
    with jax.default_matmul_precision("highest"):
        for name, function in found.items():
            got = jax.jit(function)(lhs, rhs, dout, given)
            each = zip(("product", "rows", "kernels"), got, expected, strict=False)
            errors |= {f"{name}, {what}": error(a, b) for what, a, b in each}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= ROUNDING[dtype], errors
