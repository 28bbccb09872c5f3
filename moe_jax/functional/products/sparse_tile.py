"""A sparse kernel, or a tile of its columns, from its entries. Their positions are stored in one of three ways:

- CSR: `columns` [n] and `row_ends` [i], the number of entries in the rows up to and including each.
- COO: `columns` [n] and `rows` [n].
- A bitmap: `mask` [i, ceil(o / 8)]; bit c % 8 of byte c // 8 says whether there is an entry in column c.

Entries lie row by row, columns ascending.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

Offset = Int[Array, ""] | int


def entry_coordinates(positions: Mapping[str, Array], origin: Int[Array, "2"] | None = None) -> tuple[Array, Array]:
    """Returns row and column of every entry, int32[n] each.

    Args:
      positions: CSR or COO.
      origin: row and column to count from; entries before or above it have negative ones. None: (0, 0).
    """
    columns = positions["columns"].astype(jnp.int32)
    if "rows" in positions:
        rows = positions["rows"].astype(jnp.int32)
    else:
        rows = entry_rows(positions["row_ends"], columns.shape[0])
    return (rows, columns) if origin is None else (rows - origin[0], columns - origin[1])


def entry_rows(row_ends: Int[Array, " i"], entries: int) -> Int[Array, " n"]:
    """Returns the row of every entry of a CSR matrix, ascending; int32.

    Args:
      row_ends: entries in the rows up to and including each.
      entries: in all.
    """
    # Where a row begins, all rows before it have ended.
    ended = jnp.zeros(entries, jnp.int32).at[row_ends].add(1, mode="drop")
    return jnp.cumsum(ended)


def scatter_tile(
    values: Float[Array, " n"], rows: Int[Array, " n"], columns: Int[Array, " n"], start: Offset, shape: tuple[int, int]
) -> Float[Array, "i w"]:
    """Returns rows 0 ... i and columns start ... start + w of a kernel with these entries; others are left out.

    Args:
      values: of the entries.
      rows, columns: where they are; distinct pairs.
      start: first column of the tile.
      shape: [i, w] of the tile.
    """
    (height, width), columns = shape, columns - start
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    flat = jnp.where(inside, rows * width + columns, height * width)
    zeros = jnp.zeros(height * width, values.dtype)
    return zeros.at[flat].add(values, mode="drop", unique_indices=True).reshape(shape)


def bitmap_tile(
    values: Float[Array, " n"],
    mask: UInt8[Array, "rows bytes"],
    first_row: Offset,
    first_column: Offset,
    shape: tuple[int, int],
) -> Float[Array, "i w"]:
    """Returns the tile of this shape that begins at a row and column of a kernel given by a bitmap.

    The entry of a set bit is the one whose index is the number of set bits before it.

    Args:
      values: of the entries; there may be more of them than set bits.
      mask: of the whole kernel.
      first_row, first_column: of the tile.
      shape: [i, w] of the tile.
    """
    rows, width = shape
    set_bits = lax.population_count(mask).astype(jnp.int32)
    in_rows = jnp.sum(set_bits, axis=1)
    before = (jnp.cumsum(in_rows) - in_rows)[:, None] + jnp.cumsum(set_bits, axis=1) - set_bits

    # Whole bytes, from the byte in which the tile begins; one more at the end, where the tile may not fill a byte.
    first, count = first_column // 8, width // 8 + 2
    mask, before = (
        lax.dynamic_slice(jnp.pad(a, ((0, 0), (0, count))), (first_row, first), (rows, count)) for a in (mask, before)
    )
    bit = jnp.arange(8, dtype=jnp.uint8)[None, None, :]
    lower = mask[:, :, None] & ((jnp.uint8(1) << bit) - jnp.uint8(1))
    index = before[:, :, None] + lax.population_count(lower).astype(jnp.int32)
    index = jnp.where((mask[:, :, None] >> bit) & jnp.uint8(1) == 1, index, values.shape[0])
    index = lax.dynamic_slice_in_dim(index.reshape(rows, -1), first_column % 8, width, 1)
    return values.at[index].get(mode="fill", fill_value=0)
