"""Products with kernels in bfloat16 whose bits are given as uint16 [o, i], transposed, with which a CPU generates.

XLA:CPU has no operations on bfloat16: it converts arrays to float32 first, and of kernels that are stacked over layers
it converts all in front of the loop over these, and keeps the copies. Integers it leaves alone until they are used. The
bits are the upper half of those of a number in float32, so that widening them is one operation.

A vector times a matrix that lies transposed is the one product of which XLA:CPU makes a loop of its own, and into it
goes what the matrix is made by: its bits are read where they lie, of one expert among all, and nothing is written. It
reads as fast as memory gives, twice as fast as the product with untransposed kernels. Any other product is left to a
library, for which the kernel is widened into memory.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped, UInt16

from moe_jax.functional.few_rows.blocks import sum_of_blocks
from moe_jax.functional.group_loops import Groups, by_group_size, looped_product, row_by_row

_MOST_INPUTS = 2048
"""Entries of a vector that XLA multiplies so: less than 16 KiB of them."""
_FEW_ROWS = 8
"""Rows of a kernel that are multiplied one by one: with more it is faster to widen the kernel once (measured)."""
_FEW_ROWS_OF_A_GROUP, _FEW_ROWS_OF_A_LARGE_KERNEL, _LARGE = 16, 2, 1 << 22
"""Likewise of a group, whose rows have turns of a loop. Of a kernel with more entries than the last, which no cache
holds, every row would read all of it from memory."""


def widened(bits: UInt16[Array, "..."]) -> Float[Array, "..."]:
    """Returns the numbers in bfloat16 that have these bits, float32."""
    # A product, as XLA gives a loop the number of bits of a shift from outside: it is asked for every number.
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) * (1 << 16), jnp.float32)


def as_float32(array: Array) -> Float[Array, "..."]:
    """Returns numbers of any dtype, or given as the bits of bfloat16, in float32."""
    return widened(array) if array.dtype == jnp.uint16 else array.astype(jnp.float32)


def linear_of_bits(x: Float[Array, "... i"], bits: UInt16[Array, "o i"]) -> Float[Array, "... o"]:
    """Returns `x W`, summed in float32, in the dtype of `x`, given the bits of W transposed."""
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    if 0 < rows.shape[0] <= _FEW_ROWS:
        y = jnp.concatenate([_product_of_a_row(rows[m : m + 1], bits) for m in range(rows.shape[0])])
    else:
        y = rows @ widened(bits).T
    return y.astype(x.dtype).reshape(*x.shape[:-1], bits.shape[0])


def grouped_product_of_bits(
    lhs: Float[Array, "M i"], bits: UInt16[Array, "E o i"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M o"]:
    """Returns `out[m] = lhs[m] @ kernel[group of row m]`, summed in float32, in the dtype of `lhs`.

    Args:
      lhs: rows sorted by group.
      bits: of one transposed kernel per group.
      group_sizes: rows per group, int32. Rows beyond their sum give zeros.
    """
    rows, (_, width, size) = lhs.astype(jnp.float32), bits.shape
    few = _FEW_ROWS_OF_A_GROUP if width * size <= _LARGE else _FEW_ROWS_OF_A_LARGE_KERNEL

    def kernel_of(e: Array) -> Callable[[Array, int], Array]:
        zero = jnp.zeros((), jnp.int32)
        # One slice: that of the whole kernel would be moved in front of the loop over its tiles, and copied.
        return lambda start, width: widened(lax.dynamic_slice(bits, (e, start, zero), (1, width, size))[0])

    def of_a_row(row: Array, e: Array) -> Array:
        return _product_of_a_row(row, _of_group(bits, e))

    def one_by_one(groups: Groups) -> Array:
        return row_by_row(rows, groups, width, of_a_row)

    def with_kernels(groups: Groups) -> Array:
        return looped_product(rows, groups, width, kernel_of, contract_out=True)

    out = by_group_size(rows, group_sizes, few, one_by_one=one_by_one, with_kernels=with_kernels)
    return out.astype(lhs.dtype)


def _of_group(bits: UInt16[Array, "E o i"], e: Int[Array, ""]) -> UInt16[Array, "o i"]:
    return lax.dynamic_index_in_dim(bits, e, 0, keepdims=False)


def product_in_parts(
    row: Float[Array, "1 i"], kernel: Shaped[Array, "o i"], product: Callable[[Array, Array], Array]
) -> Float[Array, "1 o"]:
    """Returns the sum of `product(row, kernel)` over parts of the inputs that XLA multiplies with a vector."""
    parts = []
    for start in range(0, kernel.shape[1], _MOST_INPUTS):
        own = slice(start, start + _MOST_INPUTS)
        parts.append(product(row[:, own], kernel[:, own]))
    if len(parts) == 1:
        return parts[0]
    # An addition would be made part of a product, for which the kernel would then be widened into memory.
    return sum_of_blocks(jnp.concatenate(parts))[None]


def _product_of_a_row(row: Float[Array, "1 i"], bits: UInt16[Array, "o i"]) -> Float[Array, "1 o"]:
    return product_in_parts(row, bits, lambda row, bits: row @ widened(bits).T)
