"""Products of few rows with kernels in packed codes, of which no kernel is made (methods.md 4)."""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from moe_jax.functional.codes import Grid, columns_of, repeat_over_rows, select_levels, unpack, word
from moe_jax.functional.grouped import over_columns, tile_width

MOST_ROWS_ONE_BY_ONE = 8
"""With more rows, each of which unpacks the codes again, it is faster to convert codes to floats once (measured)."""
LEAST_BLOCK = 32
"""Rows of the smallest blocks for which it pays: the sums over blocks are made in memory."""
_SUMMED_AT_ONCE = (16, 8)  # rows of the kernel; multiples of the codes of a word
_TILE_BYTES = 1 << 20  # of sums over blocks: they stay in the cache
_MOST_TERMS = 8


def rows_of_blocks(rows: int, group_size: int | None) -> int:
    """Returns the rows of equal blocks of a kernel of which no group has a part: the most that there can be."""
    return rows if group_size is None else math.gcd(rows, group_size)


def product_with_codes(
    rows: Float[Array, "m i"],
    packed: UInt8[Array, "E b o"],
    expert: Int[Array, ""],
    grid: Grid,
    bits: int,
    group_size: int | None,
) -> Float[Array, "m o"]:
    """Returns the product with the kernel in codes of one expert, float32.

    Only codes are unpacked. What the levels of a group have in common, its scale above all, is applied to the sums over
    blocks of rows, which for few rows are much less.

    For a very few rows a sum over a block is written out, term by term. XLA:CPU makes one loop of it, in which codes
    are read, unpacked, multiplied and added in registers. A product (`dot`) it would hand to a library, for which codes
    would have to be unpacked into memory first.

    Args:
      rows: float32.
      packed: codes of all experts, packed along the input axis.
      expert: whose kernel it is.
      grid: of this expert, with scales, and zero points if there are any, of groups.
      bits: of a code.
      group_size: rows that share a scale; None: all.
    """
    (count, size), width = rows.shape, packed.shape[2]
    largest = rows_of_blocks(size, group_size)
    block = next((block for block in _SUMMED_AT_ONCE if largest % block == 0), None)
    one_by_one = block is not None and count <= MOST_ROWS_ONE_BY_ONE
    block = block if block is not None and one_by_one else largest
    blocks = rows.reshape(count, -1, block)

    def of_columns(start: Array, width: int, out: Array) -> Array:
        def own(values: Array) -> Array:
            """Returns the values of the groups, for each of their blocks."""
            if group_size is None:
                return values
            return repeat_over_rows(columns_of(values, start, width), blocks.shape[1], group_size // block)

        scales = own(grid.scales)
        if grid.zeros is not None:
            below = 2 * own(grid.zeros)
        else:
            below = 2**bits - 1 + (scales < 0).astype(rows.dtype)

        def scaled(sums: Float[Array, "g o"], row: Float[Array, "g block"]) -> Float[Array, " o"]:
            if grid.table is None:  # levels are twice the codes less what all levels of a group lie below them
                sums = 2 * sums - below * jnp.sum(row, axis=1, keepdims=True)
            return _sum_of_blocks(scales * sums)

        if one_by_one:
            fields = [_values_of(field, grid, bits) for field in _fields(packed, (expert, start, width), bits, block)]
            sums = (_summed([row[:, k, None] * field for k, field in enumerate(fields)]) for row in blocks)
            products = jnp.stack([scaled(of_row, row) for of_row, row in zip(sums, blocks, strict=True)])
        else:
            codes = columns_of(lax.dynamic_index_in_dim(packed, expert, keepdims=False), start, width)
            values = _values_of(unpack(codes, size, bits, jnp.uint8), grid, bits)
            sums = jnp.einsum("mgi,gio->mgo", blocks, values.reshape(-1, block, width))
            products = jax.vmap(scaled)(sums, blocks)
        return lax.dynamic_update_slice_in_dim(out, products, start, 1)

    tile = min(width, max(1, _TILE_BYTES // (4 * blocks.shape[1]))) if one_by_one else tile_width((size, width), count)
    return over_columns(tile, width, of_columns, jnp.zeros((count, width), rows.dtype))


def _values_of(codes: UInt8[Array, "*s"], grid: Grid, bits: int) -> Float[Array, "*s"]:
    """Returns levels of a table, or else the codes themselves."""
    if grid.table is None:
        return codes.astype(jnp.float32)
    return select_levels(codes, [grid.table[code] for code in range(2**bits)], bits).astype(jnp.float32)


def _fields(
    packed: UInt8[Array, "E b o"], of: tuple[Array, Array, int], bits: int, block: int
) -> Iterator[UInt8[Array, "g w"]]:
    """Yields the codes of the first row of every block, then those of the second, and so on.

    Args:
      packed: codes of all experts.
      of: the expert, the first column and the number of columns.
      bits: of a code.
      block: rows of a block.
    """
    (expert, start, width), (codes, size), zero = of, word(bits), jnp.zeros((), jnp.int32)
    in_blocks = packed.reshape(packed.shape[0], -1, block // codes * size, packed.shape[2])

    def byte(at: int) -> Array:
        # Each taken from all codes: XLA would write those of an expert to memory that several operations take from.
        origin = expert, zero, jnp.full((), at, jnp.int32), start
        return lax.dynamic_slice(in_blocks, origin, (1, in_blocks.shape[1], 1, width))[0, :, 0]

    for first in range(0, in_blocks.shape[2], size):
        of_word = byte(first)
        if size > 1:
            parts = (byte(first + at).astype(jnp.uint32) << jnp.uint32(8 * at) for at in range(size))
            of_word = functools.reduce(jnp.bitwise_or, parts)
        for field in range(codes):
            shifted = of_word >> of_word.dtype.type(bits * field)
            yield (shifted & of_word.dtype.type(2**bits - 1)).astype(jnp.uint8)


def _sum_of_blocks(terms: Float[Array, "g o"]) -> Float[Array, " o"]:
    """Returns the sum, as operations on elements: XLA:CPU has a sum made by a library, which begins too slowly."""
    while (count := terms.shape[0]) > 1:
        # One long sum would take as long as two short ones, and many times as long to compile.
        parts = max(number for number in range(1, _MOST_TERMS + 1) if count % number == 0)
        parts = count if parts == 1 else parts
        terms = _summed(jnp.split(terms, parts))
    return terms[0]


def _summed(terms: list[Array]) -> Array:
    return functools.reduce(jnp.add, terms)
