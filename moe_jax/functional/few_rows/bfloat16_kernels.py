"""Products of few rows with kernels in bfloat16, which are multiplied as they are."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt16

from moe_jax.functional.few_rows.bfloat16_bits import linear_of_bits, product_in_parts

MOST_ROWS = 16
"""Most rows that are split into terms on a CPU: with more, converting the kernel costs no more than the products."""
_MOST_ONE_BY_ONE = 4
"""Most rows for which `row_after_row` takes less time: with eight there is no difference (measured)."""


@jax.custom_vjp
def product_of_few_rows(rows: Float[Array, "M i"], kernel: Float[Array, "i o"]) -> Float[Array, "M o"]:
    """Returns `rows W` in the dtype of the rows, which are few, for W in bfloat16.

    On a CPU the kernel takes most of the time, and XLA would convert it to float32 first, which takes twice as long as
    all else. Instead rows in float32 are split into three terms in bfloat16, whose sum they are: the products of terms
    are exact in float32, in which they are summed. A single row in bfloat16 counts as two: for a vector XLA converts.
    """
    return jax.lax.platform_dependent(rows, kernel, default=_cast_product, cpu=_product_in_bfloat16)


def _cast_product(rows: Array, kernel: Array) -> Array:
    return rows @ kernel.astype(rows.dtype)


def _product_in_bfloat16(rows: Array, kernel: Array) -> Array:
    if rows.dtype == jnp.float32:
        terms, rest = [], rows
        for _ in range(3):
            # `astype` and back would not do: XLA may leave it out.
            terms.append(jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
            rest = rest - terms[-1]
        products = _sums_in_float32(jnp.concatenate(terms).astype(kernel.dtype), kernel)
        # The small ones first.
        large, middle, small = products.reshape(3, *rows.shape[:1], -1)
        return small + middle + large
    if rows.dtype != kernel.dtype:
        return _cast_product(rows, kernel)
    return _sums_in_float32(rows, kernel).astype(rows.dtype)


def sums_in_float32(
    rows: Float[Array, "M i"], kernel: Float[Array, "i o"] | UInt16[Array, "o i"]
) -> Float[Array, "M o"]:
    """Returns `rows W` in float32 for few rows on a CPU, of any dtypes; rows in bfloat16 need no terms.

    W may be given as bits, transposed (`few_rows.bfloat16_bits`).
    """
    if kernel.dtype == jnp.uint16:
        return linear_of_bits(rows.astype(jnp.float32), kernel)
    if rows.dtype == kernel.dtype == jnp.bfloat16:
        return _sums_in_float32(rows, kernel)
    wide = rows.astype(jnp.float32)
    return product_of_few_rows(wide, kernel) if kernel.dtype == jnp.bfloat16 else _cast_product(wide, kernel)


def row_after_row(x: Float[Array, "... i"], kernel: Float[Array, "o i"], product: Callable[..., Array]) -> Array:
    """Returns `product(x, kernel)`, which multiplies with a transposed kernel in bfloat16.

    On a CPU that is done for up to 4 rows one by one: with a vector such a kernel is multiplied where it lies, and with
    more rows it would be converted into memory first (see `few_rows.bfloat16_bits`).
    """
    count = math.prod(x.shape[:-1])
    if not 0 < count <= _MOST_ONE_BY_ONE or kernel.dtype != jnp.bfloat16:
        return product(x, kernel)

    def one_by_one(x: Array, kernel: Array) -> Array:
        # For each row another kernel, as far as the compiler knows: what all have in common it would write into memory.
        apart = (jax.lax.optimization_barrier((row, kernel)) for row in x.reshape(count, 1, x.shape[-1]))
        every = [product_in_parts(row, kernel, product) for row, kernel in apart]
        return jnp.concatenate(every).reshape(*x.shape[:-1], -1)

    return jax.lax.platform_dependent(x, kernel, default=product, cpu=one_by_one)


def _sums_in_float32(rows: Array, kernel: Array) -> Array:
    stacked = jnp.concatenate([rows, rows]) if rows.shape[0] == 1 else rows
    contract = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(stacked, kernel, contract, preferred_element_type=jnp.float32)[: rows.shape[0]]


def _few_rows_forward(rows: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return product_of_few_rows(rows, kernel), (rows, kernel)


def _few_rows_backward(kept: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    return jax.vjp(_cast_product, *kept)[1](cotangent)


product_of_few_rows.defvjp(_few_rows_forward, _few_rows_backward)
