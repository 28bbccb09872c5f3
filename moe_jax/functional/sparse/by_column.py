"""Grouped product with sparse kernels whose entries lie side by side, those of a column below each other, on a CPU.

Every column has as many places as the fullest one has entries: `rows` [k, o] says of which row of the kernel the entry
in a place is, `values` [k, o] what it is; an empty place is a zero in row 0. So nothing has to be counted or found: an
output is the sum, down its column, of `values` times the inputs that `rows` looks up, and all outputs are computed
alike. An entry takes a quarter of a nanosecond for one row, a tenth of what one in CSR takes. With many rows an input
is looked up for all of them at once.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt16
from scipy.sparse import csr_array

from moe_jax.functional.few_rows.bfloat16_bits import as_float32
from moe_jax.functional.few_rows.blocks import sum_of_blocks, sum_of_terms
from moe_jax.functional.group_loops import Groups, by_group_size, group_by_group, row_by_row

UNIT = 8
"""The number of places of a column is a multiple of this."""
_OF_A_ROW, _OF_MANY_ROWS = 4, 8  # places whose sum is written out, which divide `UNIT`: measured
MOST_ALONE = 12
"""Rows of a group that are multiplied one by one: measured."""


class Columns(NamedTuple):
    """The entries of stacked kernels; see the module.

    Attributes:
      rows: uint16, or int32 where kernels have more rows.
      values: float32, or the bits of bfloat16 as uint16: XLA:CPU would convert whole arrays of bfloat16 in front of a
        loop, and keep the copies.
    """

    rows: UInt16[Array, "E k o"] | Int[Array, "E k o"]
    values: Float[Array, "E k o"] | UInt16[Array, "E k o"]


def grouped_product_by_column(
    lhs: Float[Array, "M i"], kernels: Columns, group_sizes: Int[Array, " E"]
) -> Float[Array, "M o"]:
    """Returns `out[m] = lhs[m] @ kernel[group of row m]`, summed in float32, in the dtype of `lhs`.

    Args:
      lhs: rows sorted by group.
      kernels: one per group.
      group_sizes: rows per group, int32. Rows beyond their sum give zeros.
    """
    width = kernels.rows.shape[2]

    def of_a_row(row: Float[Array, "1 i"], group: Int[Array, ""]) -> Float[Array, "1 o"]:
        return _product_of_a_row(row[0].astype(jnp.float32), kernels, group)[None]

    def one_by_one(groups: Groups) -> Float[Array, "M o"]:
        return row_by_row(lhs, groups, width, of_a_row).astype(lhs.dtype)

    def with_kernels(groups: Groups) -> Float[Array, "M o"]:
        return group_by_group(lhs, groups, width, lambda group: partial(_product_of_rows, kernels, group))

    if group_sizes.shape[0] == 1:
        return with_kernels(Groups.of(group_sizes))
    return by_group_size(lhs, group_sizes, MOST_ALONE, one_by_one=one_by_one, with_kernels=with_kernels)


def tile_by_column(
    rows: UInt16[Array, "k o"], values: Array, start: Int[Array, ""] | int, shape: tuple[int, int]
) -> Float[Array, "i w"]:
    """Returns columns start ... start + w of a kernel of i rows, float32.

    Args:
      rows, values: of one kernel, as `Columns` has them.
      start: first column of the tile.
      shape: [i, w] of the tile.
    """
    own = lax.dynamic_slice_in_dim(rows, start, shape[1], 1).astype(jnp.int32)
    added = as_float32(lax.dynamic_slice_in_dim(values, start, shape[1], 1))
    columns = jnp.arange(shape[1], dtype=jnp.int32)[None, :]
    return jnp.zeros(shape, jnp.float32).at[own, columns].add(added, mode="promise_in_bounds")


def _product_of_a_row(row: Float[Array, " i"], kernels: Columns, group: Int[Array, ""]) -> Float[Array, " o"]:
    """Writes out the sum over a block of places, as for codes (`few_rows.packed_codes`): XLA:CPU makes one loop."""
    zero = jnp.zeros((), jnp.int32)

    def places(array: Array, place: int) -> Array:
        blocks = array.reshape(array.shape[0], -1, _OF_A_ROW, array.shape[2])
        size = (1, blocks.shape[1], 1, blocks.shape[3])
        return lax.dynamic_slice(blocks, (group, zero, jnp.full((), place, jnp.int32), zero), size)[0, :, 0]

    def terms(place: int) -> Array:
        return _looked_up(row, places(kernels.rows, place)) * as_float32(places(kernels.values, place))

    return sum_of_blocks(sum_of_terms([terms(place) for place in range(_OF_A_ROW)]))


def _product_of_rows(kernels: Columns, group: Int[Array, ""], rows: Float[Array, "m i"]) -> Float[Array, "m o"]:
    _, depth, width = kernels.rows.shape
    # Transposed, so that the inputs of all rows that an entry is multiplied with lie side by side.
    inputs, zero = rows.astype(jnp.float32).T, jnp.zeros((), jnp.int32)

    def turn(number: Array, out: Array) -> Array:
        origin, size = (group, number * _OF_MANY_ROWS, zero), (1, _OF_MANY_ROWS, width)
        of_places, values = (lax.dynamic_slice(array, origin, size)[0] for array in kernels)
        for place in range(_OF_MANY_ROWS):
            out = out + _looked_up(inputs, of_places[place]) * as_float32(values[place])[:, None]
        return out

    return lax.fori_loop(0, depth // _OF_MANY_ROWS, turn, jnp.zeros((width, rows.shape[0]), jnp.float32)).T


def _looked_up(inputs: Float[Array, "i ..."], rows: UInt16[Array, "..."]) -> Float[Array, "..."]:
    """Returns `inputs[rows]`. Indexing would first ask of every row whether it counts from the end."""
    trailing = inputs.ndim - 1
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(rows.ndim, rows.ndim + trailing)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    at, size = rows.astype(jnp.int32)[..., None], (1, *inputs.shape[1:])
    return lax.gather(inputs, at, numbers, size, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def kept_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which `Columns` have values of a dtype."""
    return np.dtype(np.uint16 if dtype == ml_dtypes.bfloat16 else np.float32)


def lay_out_by_column(
    columns: Int[np.ndarray, " n"],
    row_ends: Int[np.ndarray, " i"],
    values: Float[np.ndarray, " n"],
    out: Columns,
    at: int,
) -> None:
    """Writes the entries of a kernel into empty columns.

    Args:
      columns: of the entries, row by row.
      row_ends: entries in the rows up to and including each.
      values: of the entries.
      out: NumPy arrays of zeros, with places enough.
      at: the place of the kernel among those stacked there.
    """
    _, places, width = out.rows.shape
    kept = values.view(np.uint16) if out.values.dtype == np.uint16 else values.astype(np.float32)
    by_row = csr_array((kept, columns.astype(np.int32), np.append(0, row_ends)), shape=(len(row_ends), width))
    by_column = by_row.tocsc()
    is_full = np.arange(places) < np.diff(by_column.indptr)[:, None]
    for stacked, entries in ((out.rows, by_column.indices), (out.values, by_column.data)):
        transposed = np.zeros((width, places), stacked.dtype)
        transposed[is_full] = entries
        stacked[at] = transposed.T
