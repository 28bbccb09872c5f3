"""Grouped products on NVIDIA GPUs: chooses the kernel that fits the GPU, the shapes and the dtype.

- Hopper, bfloat16 or float16, and tiles that divide the shapes: JAX's Mosaic-GPU kernel, forward and d-rows.
- Otherwise, and for d-kernels: Triton (`TritonProducts`), on GPUs from Ampere on, for dtypes of at most 32 bits.
- Otherwise XLA's `ragged_dot`, which it lowers to a dense product over all experts, with a warning.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.kernels.gpu.triton_makers import MIN_TILE, Maker, OverBase, Range, Stored, load, masked_range, tile_mask
from moe_jax.kernels.hardware import TRITON_FROM, Capability, triton_fits
from moe_jax.kernels.plain import ragged_outer, ragged_product, zero_rows_beyond

logger = logging.getLogger(__name__)

ROWS, TERMS, COLUMNS = 128, 64, 128
# Tiles in flight (32 KiB each, of the 227 KiB of shared memory that a program may have), and the number of columns of
# tiles that concurrent programs traverse together.
_STAGES, _COLUMNS_TOGETHER = 4, 8


def fits(lhs: Array, rhs: Array, capability: Capability | None, *, transposed: bool = False) -> bool:
    """Whether JAX's kernel can be used: its instructions are Hopper's alone, and tiles must divide the shapes."""
    terms, columns = lhs.shape[1], rhs.shape[1 if transposed else 2]
    return (
        capability is not None
        and capability[0] == 9
        and lhs.dtype == rhs.dtype
        and lhs.dtype in (jnp.bfloat16, jnp.float16)
        and lhs.shape[0] > 0
        and lhs.shape[0] % ROWS == terms % TERMS == columns % COLUMNS == 0
    )


def hopper_product(lhs: Array, rhs: Array, group_sizes: Array, *, transposed: bool = False) -> Float[Array, "M o"]:
    """Computes `grouped_product`, with arguments that `fits` accepts, by JAX's kernel in Mosaic GPU."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    sizes = {"block_m": ROWS, "block_n": COLUMNS, "block_k": TERMS}
    schedule: Any = {"max_concurrent_steps": _STAGES, "grid_block_n": _COLUMNS_TOGETHER}
    group_sizes = group_sizes.astype(jnp.int32)
    out = ragged_dot_mgpu.ragged_dot(lhs, rhs, group_sizes=group_sizes, transpose_rhs=transposed, **sizes, **schedule)
    # The kernel leaves rows outside groups unwritten.
    return zero_rows_beyond(out, jnp.sum(group_sizes))


def grouped_product(
    lhs: Float[Array, "M i"],
    rhs: Float[Array, "E i o"],
    group_sizes: Int[Array, " E"],
    *,
    capability: Capability | None,
    one_device: bool = True,
    transposed: bool = False,
) -> Float[Array, "M o"]:
    """Returns `out[m] = lhs[m] @ rhs[group of row m]`; rows in no group are zero.

    Args:
      lhs: rows sorted by group.
      rhs: one kernel per group; [E, o, i] if `transposed`.
      group_sizes: rows per group.
      capability: of the GPU; None: unknown.
      one_device: whether a kernel can be called; see `kernels.by_platform`.
      transposed: multiplies with the transposed kernels.
    """
    if one_device and fits(lhs, rhs, capability, transposed=transposed):
        return hopper_product(lhs, rhs, group_sizes, transposed=transposed)
    if one_device and triton_fits(lhs.dtype, capability):
        return TritonProducts(capability).product(lhs, rhs, group_sizes, transposed=transposed)
    _warn_of_dense(group_sizes.shape[0], lhs.dtype.name, capability, one_device)
    return ragged_product(lhs, jnp.swapaxes(rhs, 1, 2) if transposed else rhs, group_sizes)


def grouped_outer(
    lhs: Float[Array, "M i"],
    dout: Float[Array, "M o"],
    group_sizes: Int[Array, " E"],
    *,
    capability: Capability | None,
    one_device: bool = True,
) -> Float[Array, "E i o"]:
    """Returns `out[e] = sum over the rows m of group e of lhs[m]^T dout[m]`; arguments as for `grouped_product`."""
    if one_device and triton_fits(lhs.dtype, capability):
        return TritonProducts(capability).outer(lhs, dout, group_sizes)
    _warn_of_dense(group_sizes.shape[0], lhs.dtype.name, capability, one_device)
    return ragged_outer(lhs, dout, group_sizes)


@lru_cache
def _warn_of_dense(groups: int, dtype: str, capability: Capability | None, one_device: bool) -> None:
    """Warns once: the function is cached."""
    reason = "the compiler cannot divide one between devices"
    if one_device:
        gpu = "" if capability is None else f", and this one has {capability[0]}.{capability[1]}"
        needs = "bfloat16, float16 or float32, and a GPU of compute capability {}.{}".format(*TRITON_FROM)
        reason = f"it needs {needs}{gpu}"
    logger.warning(
        "no grouped kernel for a product of %s rows with %d experts: %s. XLA multiplies every row with all experts: "
        "%d times the arithmetic, and as much more memory",
        dtype, groups, reason, groups,
    )  # fmt: skip


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


class TritonProducts(NamedTuple):
    """Triton's grouped products: forward, d-rows (transposed) and d-kernels (outer). Sums are float32.

    A program of the forward kernel makes one tile of the output: some rows of one group by some columns. Tiles of rows
    begin where their group begins, so that no tile has rows of two groups. Masks hide whatever lies beyond the rows of
    a group, the columns of a kernel or the axis that is summed over, so every shape fits.

    Attributes:
      capability: of the GPU; None: unknown.
      interpret: run the kernels on any platform, slowly.
      tile: of all products; None: those that suit the shapes.
    """

    capability: Capability | None
    interpret: bool = False
    tile: Tile | None = None

    def product(
        self,
        lhs: Float[Array, "M i"],
        rhs: Float[Array, "E i o"],
        group_sizes: Int[Array, " E"],
        *,
        transposed: bool = False,
        origin: Int[Array, ""] | None = None,
        into: Float[Array, "M o"] | None = None,
    ) -> Float[Array, "M o"]:
        """Returns `out[m] = lhs[m] @ rhs[group of row m]`; rows in no group are zero, or those of `into`.

        Args:
          lhs, rhs, group_sizes, transposed: see `grouped_product`; `rhs` is of the dtype of `lhs`.
          origin: row where the first group begins; goes with `into`. None: row 0.
          into: gives the output's rows in no group. The output takes over its buffer if that is not used again.
        """
        options: Any = {"transposed": transposed, "origin": origin, "into": into}
        return self.made_product(lhs, None, [rhs], group_sizes, Stored(), (rhs.shape[1], rhs.shape[2]), **options)

    def made_product(
        self,
        lhs: Float[Array, "M i"],
        base: Float[Array, "i o"] | None,
        arrays: Sequence[Array],
        group_sizes: Int[Array, " E"],
        maker: Maker,
        shape: tuple[int, int],
        *,
        transposed: bool = False,
        origin: Int[Array, ""] | None = None,
        into: Float[Array, "M o"] | None = None,
    ) -> Float[Array, "M o"]:
        """`product` with kernels that are made where they are multiplied, and first rounded to the dtype of `lhs`.

        Args:
          lhs, group_sizes, transposed, origin, into: see `product`.
          base: is added to what `maker` makes; None: there is none.
          arrays: from which `maker` makes kernels.
          maker: makes them.
          shape: [i, o] of a kernel.
        """
        assert (origin is None) == (into is None)
        rows, groups, (terms, fan_out) = lhs.shape[0], group_sizes.shape[0], shape[::-1] if transposed else shape
        if rows == 0:
            return jnp.zeros((rows, fan_out), lhs.dtype) if into is None else into
        tile = self.tile or product_tile(rows, groups, terms, fan_out, lhs.dtype, self.capability)
        if not isinstance(maker, Stored):
            # The arrays that a tile is made from take registers and shared memory, too.
            tile = tile._replace(columns=min(tile.columns, 128), stages=min(tile.stages, 3))
        if base is not None:
            arrays, maker = [base, *arrays], OverBase(maker)
        tiles = row_tiles(group_sizes, rows, tile.rows, origin)
        down, across = tiles.group.shape[0], pl.cdiv(fan_out, tile.columns)
        arguments = [*tiles, lhs, *arrays] + ([] if into is None else [into])
        options = {"maker": maker, "arrays": len(arrays), "groups": groups, "grid": (down, across)}
        return pl.pallas_call(
            partial(_product_kernel, tile=tile, transposed=transposed, **options),
            out_shape=jax.ShapeDtypeStruct((rows, fan_out), lhs.dtype),
            grid=(down * across,),
            input_output_aliases={} if into is None else {len(arguments) - 1: 0},
            compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=self.interpret,
            name="grouped_product_transposed" if transposed else "grouped_product",
        )(*arguments)

    def outer(
        self,
        lhs: Float[Array, "M i"],
        dout: Float[Array, "M o"],
        group_sizes: Int[Array, " E"],
        *,
        origin: Int[Array, ""] | None = None,
        dtype: DTypeLike | None = None,
    ) -> Float[Array, "E i o"]:
        """Returns `out[e] = sum over the rows m of group e of lhs[m]^T dout[m]`; empty groups give zeros.

        Args:
          lhs, dout: rows sorted by group.
          group_sizes: rows per group.
          origin: row where the first group begins; None: row 0.
          dtype: of the output; None: that of `lhs`.
        """
        (rows, fan_in), fan_out, groups = lhs.shape, dout.shape[1], group_sizes.shape[0]
        dtype = lhs.dtype if dtype is None else jnp.dtype(dtype)
        if rows == 0:
            return jnp.zeros((groups, fan_in, fan_out), dtype)
        # Its `terms` are rows of a group.
        tile = self.tile or outer_tile(rows, groups, fan_in, fan_out, lhs.dtype, self.capability)
        sizes = group_sizes.astype(jnp.int32)
        ends = jnp.cumsum(sizes, dtype=jnp.int32) + (0 if origin is None else origin.astype(jnp.int32))
        grid = pl.cdiv(fan_in, tile.rows), pl.cdiv(fan_out, tile.columns)
        return pl.pallas_call(
            partial(_outer_kernel, tile=tile, grid=grid),
            out_shape=jax.ShapeDtypeStruct((groups, fan_in, fan_out), dtype),
            grid=(grid[0] * grid[1], groups),
            compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=self.interpret,
            name="grouped_outer",
        )(ends - sizes, ends, lhs, dout)


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


# Programs that run at the same time should find the same rows and columns in the cache.
_TILES_TOGETHER = 8


def tile_position(index: Array, grid: tuple[int, int]) -> tuple[Array, Array]:
    """Returns row and column of a program's tile: down some tiles of rows, then the next column of the same rows."""
    down, across = grid
    band = index // (_TILES_TOGETHER * across)
    height = jnp.minimum(down - band * _TILES_TOGETHER, _TILES_TOGETHER)
    within = index % (_TILES_TOGETHER * across)
    return band * _TILES_TOGETHER + within % height, within // height


def product_tile(
    rows: int, groups: int, terms: int, columns: int, dtype: DTypeLike, capability: Capability | None
) -> Tile:
    """Returns the tile of a product of `rows` rows in `groups` groups: as high as a group is on average."""
    widest = _widest_tile(dtype, capability)
    high = _fitting(-(-rows // groups), widest.rows)
    if high < widest.rows:
        # A low tile is soon done: with narrow ones more programs run at a time.
        widest = widest._replace(columns=min(widest.columns, 128), warps=4)
    return widest._replace(rows=high, terms=_fitting(terms, widest.terms), columns=_fitting(columns, widest.columns))


def outer_tile(
    rows: int, groups: int, fan_in: int, fan_out: int, dtype: DTypeLike, capability: Capability | None
) -> Tile:
    """Returns the tile for sums of outer products [fan_in, fan_out] over the rows of a group."""
    widest = _widest_tile(dtype, capability)
    return widest._replace(
        rows=_fitting(fan_in, widest.rows),
        terms=_fitting(-(-rows // groups), widest.terms),
        columns=_fitting(fan_out, widest.columns),
    )


def _widest_tile(dtype: DTypeLike, capability: Capability | None) -> Tile:
    """Returns tiles that fill a core's shared memory: 227 KiB on Hopper, 163 on A100, 99 on desktop GPUs."""
    if jnp.dtype(dtype).itemsize > 2:
        return Tile(rows=64, terms=32, columns=128, warps=4, stages=3)
    if capability is not None and capability[0] in (9, 10):
        return Tile(rows=128, terms=64, columns=256, warps=8, stages=4)
    if capability == (8, 0):
        return Tile(rows=128, terms=64, columns=256, warps=8, stages=3)
    return Tile(rows=128, terms=32, columns=128, warps=4, stages=4)


def _fitting(size: int, limit: int) -> int:
    """Returns the smallest power of two from 16 to `limit` that is at least `size`; without one, the largest."""
    return max(MIN_TILE, min(limit, 1 << (size - 1).bit_length()))
