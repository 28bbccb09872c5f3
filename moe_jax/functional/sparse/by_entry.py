"""Grouped product with very sparse kernels, entry by entry: `out[m] += lhs[m, row] * value` at every entry's column.

A matrix unit is faster with a dense kernel than this is with more than some 0.3 % of its entries (see
`experts.strategy`); below that this is the cheapest way on CPU.

On NVIDIA GPUs each turn of these loops, whose number depends on the groups, would ask the host. There the kernels of a
block of experts are made dense, rounded to the dtype of the rows, and multiplied by a grouped kernel
(`functional.synthesis`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, UInt8

from moe_jax.functional.group_loops import Groups, group_by_group, longest_tile, over_numbers, over_tiles
from moe_jax.functional.synthesis import Operands, Tiles, block_gradients, block_product
from moe_jax.kernels.by_platform import PRODUCT, Bound, by_platform
from moe_jax.kernels.plain import zero_rows_beyond

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


Positions = dict[str, Array]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def grouped_sparse_matmul(
    lhs: Float[Array, "M i"], values: Float[Array, "E n"], positions: Positions, group_sizes: Array, width: int
) -> Float[Array, "M o"]:
    """Returns `out[m] = lhs[m] @ kernel[group of row m]`.

    Args:
      lhs: rows sorted by group.
      values: entries of every kernel.
      positions: of the entries, stacked over the groups: CSR or COO (see `functional.sparse.by_entry`).
      group_sizes: rows per group, int32. Rows beyond their sum give zeros.
      width: o.
    """
    out = jax.ShapeDtypeStruct((lhs.shape[0], width), lhs.dtype)
    loops, gpu = Bound(_looped_product, width=width), Bound(_gpu_product, width=width)
    product = by_platform(loops, lhs.dtype, out, gpu=gpu)
    return product(lhs, values, positions, group_sizes)


def _forward(lhs: Array, values: Array, positions: Positions, group_sizes: Array, width: int) -> tuple:
    out = grouped_sparse_matmul(lhs, values, positions, group_sizes, width)
    return checkpoint_name(out, PRODUCT), (lhs, values, positions, group_sizes)


def _backward(width: int, residuals: tuple, dout: Array) -> tuple:
    lhs, values, _, _ = residuals
    out = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (lhs, values))
    loops, gpu = Bound(_looped_gradients, width=width), Bound(_gpu_gradients, width=width)
    gradients = by_platform(loops, lhs.dtype, out, gpu=gpu)
    return *gradients(*residuals, dout), None, None


grouped_sparse_matmul.defvjp(_forward, _backward)


def _looped_product(lhs: Array, values: Array, positions: Positions, group_sizes: Array, *, width: int) -> Array:
    def product_of(e: Array) -> Callable[[Array], Array]:
        coordinates = _coordinates(positions, e)
        return lambda block: _product(block.astype(jnp.float32), values[e].astype(jnp.float32), *coordinates, width)

    return group_by_group(lhs, Groups.of(group_sizes), width, product_of)


def _looped_gradients(
    lhs: Array, values: Array, positions: Positions, group_sizes: Array, dout: Array, *, width: int
) -> tuple[Array, Array]:
    rows, slack = lhs.shape[0], longest_tile(lhs.shape[0])
    starts = jnp.cumsum(group_sizes) - group_sizes
    lhs_padded, dout_padded = (jnp.pad(a, ((0, slack), (0, 0))) for a in (lhs, dout))

    def group(e: Array, sums: tuple) -> tuple:
        coordinates = _coordinates(positions, e)

        def rows_of_group(tile: int, offset: Array, sums: tuple) -> tuple:
            dlhs, dvalues = sums
            left = lax.dynamic_slice_in_dim(lhs_padded, starts[e] + offset, tile, 0)
            right = lax.dynamic_slice_in_dim(dout_padded, starts[e] + offset, tile, 0)
            left, right = (zero_rows_beyond(rows, group_sizes[e] - offset) for rows in (left, right))
            left, right, own = (array.astype(jnp.float32) for array in (left, right, values[e]))
            _, vjp = jax.vjp(lambda block, values: _product(block, values, *coordinates, width), left, own)
            dleft, new = vjp(right)
            dlhs = lax.dynamic_update_slice_in_dim(dlhs, dleft.astype(dlhs.dtype), starts[e] + offset, 0)
            return dlhs, dvalues.at[e].add(new)

        return over_tiles(group_sizes[e], rows, rows_of_group, sums)

    zeros = jnp.zeros_like(lhs_padded), jnp.zeros(values.shape, jnp.float32)
    dlhs, dvalues = over_numbers(group_sizes.shape[0], group, zeros)
    return zero_rows_beyond(dlhs[:rows], jnp.sum(group_sizes)), dvalues.astype(values.dtype)


def _coordinates(positions: Positions, e: Array) -> tuple[Array, Array]:
    own = {name: lax.dynamic_index_in_dim(array, e, 0, keepdims=False) for name, array in positions.items()}
    return entry_coordinates(own)


def _product(
    block: Float[Array, "m i"], values: Float[Array, " n"], rows: Array, columns: Array, width: int
) -> Float[Array, "m o"]:
    """Returns `block @ kernel`, float32. Transposed, so that the values read and added for an entry are contiguous."""
    terms = jnp.take(block.T, rows, axis=0) * values[:, None]
    return jnp.zeros((width, block.shape[0]), jnp.float32).at[columns].add(terms).T


@dataclasses.dataclass(frozen=True)
class EntryTiles(Tiles):
    """Dense kernels made from entries. Their arrays are `values` and those of positions in CSR or COO.

    Attributes:
      shape: [i, o] of a kernel.
    """

    shape: tuple[int, int]

    def tile(self, base: Array | None, arrays: dict[str, Array], start: int, width: int) -> Float[Array, "i w"]:
        """Returns columns start ... start + width of the kernel of one expert, float32; there is no base."""
        positions = {name: array for name, array in arrays.items() if name != "values"}
        values = arrays["values"].astype(jnp.float32)
        delta = scatter_tile(values, *entry_coordinates(positions), start, (self.shape[0], width))
        return delta if base is None else base + delta


def _gpu_product(
    lhs: Array, values: Array, positions: Positions, group_sizes: Array, *, width: int, capability: Any
) -> Array:
    given, tiles = Operands(lhs, None, {"values": values}, positions, group_sizes), EntryTiles((lhs.shape[1], width))
    return block_product(given, tiles=tiles, capability=capability)


def _gpu_gradients(
    lhs: Array, values: Array, positions: Positions, group_sizes: Array, dout: Array, *, width: int, capability: Any
) -> tuple[Array, Array]:
    given, tiles = Operands(lhs, None, {"values": values}, positions, group_sizes), EntryTiles((lhs.shape[1], width))
    dlhs, _, trained = block_gradients(given, dout, tiles=tiles, capability=capability)
    return dlhs, trained["values"]
