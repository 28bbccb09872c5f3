"""The product of few rows with a kernel in packed codes, of which no kernel is made (methods.md 4)."""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from moe_jax.functional.codes import Grid, columns_of, repeat_over_rows, select_levels, word
from moe_jax.functional.few_rows.blocks import product_in_blocks, sum_of_terms

_BLOCKS = (16, 8)  # rows of a kernel whose sum is written out; multiples of the codes of a word


def rows_of_block(rows: int, group_size: int | None) -> int | None:
    """Returns the rows of equal blocks of a kernel of which no group has a part; None: they would be too small."""
    largest = rows if group_size is None else math.gcd(rows, group_size)
    return next((block for block in _BLOCKS if largest % block == 0), None)


def product_with_codes(
    rows: Float[Array, "M i"],
    packed: UInt8[Array, "E b o"],
    expert: Int[Array, ""],
    grid: Grid,
    bits: int,
    group_size: int | None,
) -> Float[Array, "M o"]:
    """Returns the product of few rows with the kernel in codes of one expert, float32.

    Codes are read, unpacked, multiplied and added in registers (`few_rows.blocks`). What the levels of a group have in
    common, its scale above all, is applied to the sums over blocks, which are much less. Codes are unpacked for every
    row anew.

    Args:
      rows: float32.
      packed: codes of all experts, packed along the input axis.
      expert: whose kernel it is.
      grid: of this expert, with scales, and zero points if there are any, of groups.
      bits: of a code.
      group_size: rows of the kernel that share a scale; None: all. There has to be a `rows_of_block`.
    """
    block = rows_of_block(rows.shape[1], group_size)
    assert block is not None, (rows.shape, group_size)

    def of_blocks(blocks: Float[Array, "g b"], start: Array, width: int) -> Float[Array, "g w"]:
        def own(values: Array) -> Array:
            """Returns the values of the groups, for each of their blocks."""
            if group_size is None:
                return values
            return repeat_over_rows(columns_of(values, start, width), len(blocks), group_size // block)

        scales = own(grid.scales)
        if grid.zeros is not None:
            below = 2 * own(grid.zeros)
        else:
            below = 2**bits - 1 + (scales < 0).astype(rows.dtype)
        fields, factors = list(_by_row_of_block(packed, (expert, start, width), bits, block)), blocks
        if grid.table is None:
            # Instead of shifting codes: a power of two is exact.
            factors = blocks * np.array([[2.0**-field.shift for field in fields]], np.float32)
        sums = sum_of_terms([factors[:, k, None] * _values_of(field, grid, bits) for k, field in enumerate(fields)])
        if grid.table is None:  # levels are twice the codes less what all levels of a group lie below them
            sums = 2 * sums - below * (blocks @ jnp.ones((block, 1), blocks.dtype))
        return scales * sums

    return product_in_blocks(rows, block, packed.shape[2], of_blocks)


class _Field(NamedTuple):
    """Codes where they lie in their words.

    Attributes:
      words: that hold the codes, and nothing else.
      shift: bits of a word below its code.
    """

    words: Int[Array, "g w"]
    shift: int


def _values_of(field: _Field, grid: Grid, bits: int) -> Float[Array, "g w"]:
    """Returns levels of a table, or else the words themselves."""
    if grid.table is None:
        return field.words.astype(jnp.float32)
    levels = [grid.table[code].astype(jnp.float32) for code in range(2**bits)]
    return select_levels(field.words, levels, bits, field.shift)


def _by_row_of_block(
    packed: UInt8[Array, "E b o"], of: tuple[Array, Array, int], bits: int, block: int
) -> Iterator[_Field]:
    """Yields the codes of the first row of every block, then those of the second, and so on.

    Words are int32, whatever their size: processors convert these to float32 in one step, and shift them, too.

    Args:
      packed: codes of all experts.
      of: the expert, the first column and the number of columns.
      bits: of a code.
      block: rows of a block.
    """
    (expert, start, width), (codes, size), zero = of, word(bits), jnp.zeros((), jnp.int32)
    in_blocks = packed.reshape(packed.shape[0], -1, block // codes * size, packed.shape[2])

    def byte(at: int) -> Array:
        # Each is sliced out of all: a slice that all of them came from would be copied.
        own, place = (1, in_blocks.shape[1], 1, width), jnp.full((), at, jnp.int32)
        return lax.dynamic_slice(in_blocks, (expert, zero, place, start), own)[0, :, 0].astype(jnp.int32)

    for first in range(0, in_blocks.shape[2], size):
        # Products, as XLA gives a loop the number of bits of a shift from outside: it is asked for every number.
        higher = (byte(first + at) * 256**at for at in range(1, size))
        of_word = functools.reduce(jnp.bitwise_or, higher, byte(first))
        for field in range(codes):
            shift = bits * field
            yield _Field(of_word & ((2**bits - 1) << shift), shift)
