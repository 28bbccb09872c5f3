"""Grouped products for any NVIDIA GPU that Triton supports, as Pallas kernels: forward, d-rows and d-kernels.

A program of the forward kernel makes one tile of the output: some rows of one group by some columns. Tiles of rows
begin where their group begins, so that no tile has rows of two groups. Masks hide whatever lies beyond the rows of a
group, the columns of a kernel or the axis that is summed over, so every shape fits. Sums are float32.

The plain reference is one `jnp.dot` per group (tests/kernels).
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

# Triton's products need at least 16 rows, columns and terms.
MIN_TILE = 16


class Tile(NamedTuple):
    """The tile that one program works on.

    Attributes:
      rows, terms, columns: of the two factors, [rows, terms] and [terms, columns]; powers of two, at least 16.
      warps: number of warps, of 32 threads each, that share the tile.
      stages: of the pipeline that copies tiles to shared memory.
    """

    rows: int
    terms: int
    columns: int
    warps: int
    stages: int


class RowTiles(NamedTuple):
    """Tiles of rows of all groups, in order.

    Attributes:
      group: the group of every tile; for tiles of rows in no group, the number of groups.
      first: first row of every tile.
      end: end (exclusive) of the rows that a tile may write; at most `first` for tiles that have nothing to do.
    """

    group: Int[Array, " t"]
    first: Int[Array, " t"]
    end: Int[Array, " t"]


def row_tiles(group_sizes: Int[Array, " E"], rows: int, tile: int, origin: Int[Array, ""] | None = None) -> RowTiles:
    """Divides the rows of groups into tiles; their number is static, and depends only on the shapes.

    Args:
      group_sizes: rows per group.
      rows: of all groups together, at most.
      tile: rows of a tile.
      origin: first row of the first group; rows outside the groups get no tile. None: row 0, and the rows after the
        last group get tiles with a group of their own, the last.
    """
    sizes, start = group_sizes.astype(jnp.int32), jnp.zeros((), jnp.int32)
    if origin is None:
        sizes = jnp.append(sizes, rows - jnp.sum(sizes, dtype=jnp.int32))
    else:
        start = origin.astype(jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32) + start
    last_tile = jnp.cumsum((sizes + tile - 1) // tile, dtype=jnp.int32)
    # Besides the rows // tile full tiles, every group may have one that is not full.
    index = jnp.arange(rows // tile + min(sizes.shape[0], rows), dtype=jnp.int32)
    group = jnp.sum((index[:, None] >= last_tile[None, :]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    known = jnp.minimum(group, sizes.shape[0] - 1)
    tile_in_group = index - (last_tile - (sizes + tile - 1) // tile)[known]
    first = (ends - sizes)[known] + tile * tile_in_group
    return RowTiles(known, first, jnp.where(group == known, ends[known], 0))


class Range(NamedTuple):
    """Consecutive rows or columns of a kernel, inside a Pallas kernel.

    Attributes:
      start: the first of them.
      size: their number.
      inside: mask of those that exist; None: all do.
    """

    start: Any
    size: int
    inside: Array | None

    @property
    def slice(self) -> Any:
        """Returns the range as an index of a reference."""
        return pl.ds(self.start, self.size)

    @property
    def indices(self) -> Int[Array, " n"]:
        """Returns every index of the range."""
        return self.start + jnp.arange(self.size, dtype=jnp.int32)


class Maker(Protocol):
    """How entries of a kernel [i, o] are made inside a Pallas kernel. Static and hashable."""

    def __call__(self, refs: Sequence[Any], expert: Any, rows: Range, columns: Range) -> Float[Array, "r c"]:
        """Returns some rows and columns of the kernel of an expert; entries that do not exist may be anything finite.

        Args:
          refs: references of the arrays that it is made from.
          expert: index of the expert.
          rows, columns: of its kernel.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Stored:
    """Kernels that are stored whole, as an array [E, i, o]."""

    def __call__(self, refs: Sequence[Any], expert: Any, rows: Range, columns: Range) -> Array:
        """Loads the entries; arguments as for `Maker`."""
        return load(refs[0].at[expert, rows.slice, columns.slice], rows.inside, columns.inside)


def product(
    lhs: Float[Array, "M i"],
    rhs: Float[Array, "E i o"],
    group_sizes: Int[Array, " E"],
    *,
    tile: Tile,
    transposed: bool = False,
    origin: Int[Array, ""] | None = None,
    into: Float[Array, "M o"] | None = None,
    interpret: bool = False,
) -> Float[Array, "M o"]:
    """Returns `out[m] = lhs[m] @ rhs[group of row m]`; rows in no group are zero, or those of `into`.

    Args:
      lhs: rows sorted by group.
      rhs: one kernel per group, of the dtype of `lhs`; [E, o, i] if `transposed`.
      group_sizes: rows per group.
      tile: of the output.
      transposed: multiplies with the transposed kernels.
      origin: row where the first group begins; goes with `into`. None: row 0.
      into: gives the output's rows in no group. The output takes over its buffer if that is not used again.
      interpret: run on any platform, slowly.
    """
    shape = rhs.shape[1], rhs.shape[2]
    options = {"tile": tile, "transposed": transposed, "origin": origin, "into": into, "interpret": interpret}
    return made_product(lhs, [rhs], group_sizes, Stored(), shape, **options)


def made_product(
    lhs: Float[Array, "M i"],
    arrays: Sequence[Array],
    group_sizes: Int[Array, " E"],
    maker: Maker,
    shape: tuple[int, int],
    *,
    tile: Tile,
    transposed: bool = False,
    origin: Int[Array, ""] | None = None,
    into: Float[Array, "M o"] | None = None,
    interpret: bool = False,
) -> Float[Array, "M o"]:
    """`product` with kernels that are made where they are multiplied, and rounded to the dtype of `lhs` before that.

    Args:
      lhs, group_sizes, tile, transposed, origin, into, interpret: see `product`.
      arrays: from which kernels are made.
      maker: makes them.
      shape: [i, o] of a kernel.
    """
    assert (origin is None) == (into is None)
    rows, fan_out = lhs.shape[0], shape[0 if transposed else 1]
    if rows == 0:
        return jnp.zeros((rows, fan_out), lhs.dtype) if into is None else into
    tiles = row_tiles(group_sizes, rows, tile.rows, origin)
    down, across = tiles.group.shape[0], pl.cdiv(fan_out, tile.columns)
    arguments = [*tiles, lhs, *arrays] + ([] if into is None else [into])
    options = {"maker": maker, "arrays": len(arrays), "groups": group_sizes.shape[0], "grid": (down, across)}
    return pl.pallas_call(
        partial(_product_kernel, tile=tile, transposed=transposed, **options),
        out_shape=jax.ShapeDtypeStruct((rows, fan_out), lhs.dtype),
        grid=(down * across,),
        input_output_aliases={} if into is None else {len(arguments) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="grouped_product_transposed" if transposed else "grouped_product",
    )(*arguments)


def _product_kernel(
    group_ref: Any,
    first_ref: Any,
    end_ref: Any,
    lhs_ref: Any,
    *refs: Any,
    tile: Tile,
    transposed: bool,
    maker: Maker,
    arrays: int,
    groups: int,
    grid: tuple[int, int],
) -> None:
    out_ref, refs = refs[-1], refs[:arrays]
    row_tile, column_tile = tile_position(pl.program_id(0), grid)
    group, first, end = group_ref[row_tile], first_ref[row_tile], end_ref[row_tile]
    terms, fan_out, start = lhs_ref.shape[1], out_ref.shape[1], column_tile * tile.columns
    row_inside = first + jnp.arange(tile.rows, dtype=jnp.int32) < end
    rows, columns = Range(first, tile.rows, row_inside), masked_range(start, tile.columns, fan_out)

    @pl.when(first < end)
    def _():
        # The last group has no kernel: its rows are zero.
        kernel = jnp.minimum(group, groups - 1)

        def add(step: Array, total: Array) -> Array:
            at = masked_range(step * tile.terms, tile.terms, terms)
            left = load(lhs_ref.at[rows.slice, at.slice], rows.inside, at.inside)
            right = maker(refs, kernel, *((columns, at) if transposed else (at, columns))).astype(left.dtype)
            return total + plgpu.dot(left, right, trans_b=transposed)

        steps = jnp.minimum(groups - group, 1) * pl.cdiv(terms, tile.terms)
        total = lax.fori_loop(0, steps, add, jnp.zeros((tile.rows, tile.columns), jnp.float32))
        mask = tile_mask(total.shape, rows.inside, columns.inside)
        plgpu.store(out_ref.at[rows.slice, columns.slice], total.astype(out_ref.dtype), mask=mask)


def outer(
    lhs: Float[Array, "M i"],
    dout: Float[Array, "M o"],
    group_sizes: Int[Array, " E"],
    *,
    tile: Tile,
    origin: Int[Array, ""] | None = None,
    dtype: DTypeLike | None = None,
    interpret: bool = False,
) -> Float[Array, "E i o"]:
    """Returns `out[e] = sum over the rows m of group e of lhs[m]^T dout[m]`; empty groups give zeros.

    Args:
      lhs, dout: rows sorted by group.
      group_sizes: rows per group.
      tile: of the output; its `terms` are rows of a group.
      origin: row where the first group begins; None: row 0.
      dtype: of the output; None: that of `lhs`.
      interpret: run on any platform, slowly.
    """
    groups, fan_in, fan_out = group_sizes.shape[0], lhs.shape[1], dout.shape[1]
    dtype = lhs.dtype if dtype is None else jnp.dtype(dtype)
    if lhs.shape[0] == 0:
        return jnp.zeros((groups, fan_in, fan_out), dtype)
    sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32) + (0 if origin is None else origin.astype(jnp.int32))
    grid = pl.cdiv(fan_in, tile.rows), pl.cdiv(fan_out, tile.columns)
    return pl.pallas_call(
        partial(_outer_kernel, tile=tile, grid=grid),
        out_shape=jax.ShapeDtypeStruct((groups, fan_in, fan_out), dtype),
        grid=(grid[0] * grid[1], groups),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="grouped_outer",
    )(ends - sizes, ends, lhs, dout)


def _outer_kernel(
    start_ref: Any, end_ref: Any, lhs_ref: Any, dout_ref: Any, out_ref: Any, *, tile: Tile, grid: tuple[int, int]
) -> None:
    (down, across), group = tile_position(pl.program_id(0), grid), pl.program_id(1)
    start, end = start_ref[group], end_ref[group]
    into = masked_range(down * tile.rows, tile.rows, lhs_ref.shape[1])
    out = masked_range(across * tile.columns, tile.columns, dout_ref.shape[1])

    def add(step: Array, total: Array) -> Array:
        first = start + step * tile.terms
        inside = first + jnp.arange(tile.terms, dtype=jnp.int32) < end
        left = load(lhs_ref.at[pl.ds(first, tile.terms), into.slice], inside, into.inside)
        right = load(dout_ref.at[pl.ds(first, tile.terms), out.slice], inside, out.inside)
        return total + plgpu.dot(left, right, trans_a=True)

    steps = (end - start + tile.terms - 1) // tile.terms
    total = lax.fori_loop(0, steps, add, jnp.zeros((tile.rows, tile.columns), jnp.float32))
    mask = tile_mask(total.shape, into.inside, out.inside)
    plgpu.store(out_ref.at[group, into.slice, out.slice], total.astype(out_ref.dtype), mask=mask)


# ---- parts of kernels -------------------------------------------------------------------------------------------

# Programs that run at the same time should find the same rows and columns in the cache.
_TILES_TOGETHER = 8


def tile_position(index: Array, grid: tuple[int, int]) -> tuple[Array, Array]:
    """Returns row and column of a program's tile: down some tiles of rows, then the next column of the same rows."""
    down, across = grid
    band = index // (_TILES_TOGETHER * across)
    height = jnp.minimum(down - band * _TILES_TOGETHER, _TILES_TOGETHER)
    within = index % (_TILES_TOGETHER * across)
    return band * _TILES_TOGETHER + within % height, within // height


def masked_range(start: Any, size: int, whole: int) -> Range:
    """Returns the range from `start` on; it gets a mask of the `whole` indices that exist, unless tiles always fit."""
    inside = None if whole % size == 0 else start + jnp.arange(size, dtype=jnp.int32) < whole
    return Range(start, size, inside)


def load(ref: Any, rows: Array | None, columns: Array | None) -> Array:
    """Loads a tile; zeros outside of the masks of its rows and columns. None: all entries are inside."""
    mask = tile_mask(ref.shape, rows, columns)
    return plgpu.load(ref, mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def tile_mask(shape: tuple[int, ...], rows: Array | None, columns: Array | None) -> Array | None:
    """Combines the masks of rows and columns into the mask of a tile; None: all entries are inside."""
    if rows is None and columns is None:
        return None
    mask = jnp.ones(shape, bool) if rows is None else jnp.broadcast_to(rows[:, None], shape)
    return mask if columns is None else mask & jnp.broadcast_to(columns[None, :], shape)
