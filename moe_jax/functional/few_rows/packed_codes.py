"""Products of few rows with kernels in packed codes, of which no kernel is made (methods.md 4)."""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8, Int32, UInt8

from moe_jax.functional.codes import Grid, columns_of, repeat_over_rows, select_levels, unpack
from moe_jax.functional.grouped import over_columns, tile_width

MOST_ROWS_IN_WHOLE_NUMBERS = 4
"""With more rows products of three terms each take longer than converting codes to floats (measured)."""
LEAST_BLOCK = 32
"""Rows of the smallest blocks for which it pays: the sums over blocks are made in memory."""
_MOST_SUMMED = 1 << 15  # products of two bytes, that int32 holds twice
_MOST_TERMS = 32
_TERM_STEP = 254  # of a term in the next one: half of it is the largest byte
_TILE_BYTES = 1 << 20  # of unpacked codes: they stay in the cache


def rows_of_blocks(rows: int, group_size: int | None) -> int:
    """Returns the rows of equal blocks of a kernel of which no group has a part: the most that there can be."""
    return rows if group_size is None else math.gcd(rows, group_size)


def product_with_codes(
    rows: Float[Array, "m i"], packed: UInt8[Array, "b o"], grid: Grid, bits: int, group_size: int | None
) -> Float[Array, "m o"]:
    """Returns the product with a kernel in codes, float32.

    Only codes are unpacked. What the levels of a group have in common, its scale above all, is applied to the sums over
    blocks of rows, which for few rows are much less.

    The codes of a very few rows are multiplied as bytes: each block of a row is split into three terms of eight bits
    times a unit, which together are as exact as float32, and sums of products of bytes are exact. So unpacked codes
    are a quarter of their size as floats, and the processor has instructions for such products.

    Args:
      rows: float32.
      packed: codes, packed along the input axis.
      grid: with scales, and zero points if there are any, of groups.
      bits: of a code.
      group_size: rows that share a scale; None: all.
    """
    (count, size), width = rows.shape, packed.shape[1]
    group = group_size or size
    in_bytes = grid.table is None and count <= MOST_ROWS_IN_WHOLE_NUMBERS and min(group, size) <= _MOST_SUMMED
    # Few blocks take less time than many; but those that are multiplied together have to be of one size.
    block = min(group, size) if in_bytes else rows_of_blocks(size, group_size)
    blocks = jnp.pad(rows, ((0, 0), (0, -size % block))).reshape(count, -1, block)
    blocks = jnp.swapaxes(blocks, 0, 1)
    whole = jnp.sum(blocks, axis=2, keepdims=True)
    terms = _Terms.of(blocks) if in_bytes else None

    def of_columns(start: Array, width: int, out: Array) -> Array:
        def own(values: Array) -> Array:
            """Returns the values of the groups, for each of their blocks."""
            if group_size is None:
                return values[:, None, :]
            of_groups = columns_of(values, start, width)
            return repeat_over_rows(of_groups, blocks.shape[0], max(1, group_size // block))[:, None, :]

        codes = columns_of(packed, start, width)
        # Twice the codes less what all levels lie below them; those of a table are what they are.
        middle = 0 if grid.table is not None or grid.zeros is not None else 2**bits - 1
        if terms is not None:
            sums = terms.sums_of_levels(unpack(codes, size, bits, jnp.uint8), bits, middle)
        else:
            levels = _levels(codes, grid, size, bits, middle)
            sums = jnp.einsum("gmi,gio->gmo", blocks, levels.reshape(-1, block, width))
        scales = own(grid.scales)
        if grid.zeros is not None:
            sums = sums - 2 * own(grid.zeros) * whole
        elif grid.table is None:
            sums = sums - (scales < 0).astype(rows.dtype) * whole
        return lax.dynamic_update_slice_in_dim(out, _sum_of_few(scales * sums), start, 1)

    tile = tile_width((size, width), count) if terms is None else min(width, max(1, _TILE_BYTES // size))
    return over_columns(tile, width, of_columns, jnp.zeros((count, width), rows.dtype))


def _levels(packed: UInt8[Array, "b o"], grid: Grid, rows: int, bits: int, middle: int) -> Float[Array, "i o"]:
    if grid.table is None:
        return 2 * unpack(packed, rows, bits, jnp.float32) - middle
    codes = unpack(packed, rows, bits, jnp.uint8)
    return select_levels(codes, [grid.table[code] for code in range(2**bits)], bits).astype(jnp.float32)


class _Terms(NamedTuple):
    """Blocks of rows as whole numbers: `unit * (first + second / 254 + third / 254^2)`.

    Attributes:
      terms: first, second and third of all rows, one after another; from -127 to 127. The last block may be shorter,
        with zeros at its end.
      units: of each row in a block.
    """

    terms: Int8[Array, "g 3m i"]
    units: Float[Array, "g m 1"]

    @classmethod
    def of(cls, blocks: Float[Array, "g m i"]) -> "_Terms":
        units = jnp.max(jnp.abs(blocks), axis=2, keepdims=True) / 127
        rest, terms = blocks / jnp.where(units > 0, units, jnp.ones_like(units)), []
        for _ in range(3):
            terms.append(jnp.round(rest))
            rest = (rest - terms[-1]) * _TERM_STEP
        # What is not finite becomes some number here; its unit is not finite either.
        return cls(jnp.concatenate(terms, axis=1).astype(jnp.int8), units)

    def sums_of_levels(self, codes: UInt8[Array, "i o"], bits: int, middle: int) -> Float[Array, "g m o"]:
        """Returns the products of every block with `2 * codes - middle`."""
        below = 128 if bits == 8 else 0
        levels, block = lax.bitcast_convert_type(codes ^ jnp.uint8(below), jnp.int8), self.terms.shape[2]
        products = []
        # One product after another: XLA:CPU converts operands of a batch of products to int32.
        for index, terms in enumerate(self.terms):
            of_block = levels[index * block : (index + 1) * block]
            products.append(_sums(terms[:, : of_block.shape[0]], of_block))
        totals = jnp.sum(self.terms, axis=2, keepdims=True, dtype=jnp.int32)
        sums = (2 * jnp.stack(products) + (2 * below - middle) * totals).astype(jnp.float32)
        first, second, third = jnp.split(sums, 3, axis=1)
        return self.units * (first + second / _TERM_STEP + third / _TERM_STEP**2)


def _sums(terms: Int8[Array, "m i"], levels: Int8[Array, "i o"]) -> Int32[Array, "m o"]:
    return lax.dot_general(terms, levels, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)


def _sum_of_few(terms: Float[Array, "g m o"]) -> Float[Array, "m o"]:
    """Returns the sum, as one operation per element: XLA:CPU has a sum made by a library, which begins too slowly."""
    if terms.shape[0] > _MOST_TERMS:
        return jnp.sum(terms, axis=0)
    return functools.reduce(jnp.add, [terms[index] for index in range(terms.shape[0])])
