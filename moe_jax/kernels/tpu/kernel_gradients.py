"""Gradients of the kernels of a grouped product: `out[e] = rows_e^T dout_e`, whole or of low-rank factors.

XLA has a grouped kernel only for the product of sorted rows: for this gradient it multiplies all rows with those of
every group in turn, E times the arithmetic.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from moe_jax.kernels.hardware import ANY_CORE, LANES, RESERVED, Core, block_bytes, round_up
from moe_jax.kernels.tpu.fused_tile import Operand, Piece
from moe_jax.kernels.tpu.parts import (
    COLUMNS,
    Visits,
    changed,
    dot,
    group_visits,
    in_pieces,
    over_strips,
    scaled_rows,
    split,
)

if TYPE_CHECKING:
    from moe_jax.kernels.tpu.tiles import PackedTile

ROW_BLOCK = 512


def grouped_outer(
    rows: Float[Array, "M i"],
    dout: Float[Array, "M o"],
    group_sizes: Int[Array, " E"],
    dtype: Any,
    tile: "PackedTile | None" = None,
    operands: Sequence[Operand] = (),
    *,
    core: Core = ANY_CORE,
    interpret: bool = False,
) -> Float[Array, "E i o"] | Float[Array, "E s o"]:
    """Returns the sums over the rows of every group, rounded once; zero for groups without rows.

    Args:
      rows: sorted by group.
      dout: in the dtype of the rows.
      group_sizes: rows per group, int32.
      dtype: of the result.
      tile: reduces the sums, in fast memory, to a row for every `tile.shared` rows; None: they are not reduced.
      operands: of the tile.
      core: the core for which the sizes of blocks are chosen.
      interpret: run the kernel in interpret mode.
    """
    shared = 1 if tile is None else tile.shared
    fan_in, fan_out = rows.shape[1], dout.shape[1]
    blocks = plan_blocks(rows.shape[0], (fan_in, fan_out), rows.dtype, dtype, tile, operands, core)
    pad = max(0, blocks.rows - rows.shape[0])
    rows, dout = (jnp.pad(array, ((0, pad), (0, 0))) for array in (rows, dout))
    visits, count = group_visits(group_sizes, rows.shape[0], blocks.rows, every_group=True)
    grid = -(-fan_in // blocks.height), -(-fan_out // blocks.width), count

    def of_operand(operand: Operand) -> pl.BlockSpec:
        def index(h: Any, w: Any, v: Any, visits: Any) -> tuple:
            return visits.group[v], *operand.index_of_block(h, w)

        return pl.BlockSpec((None, *operand.block_of(blocks.height, blocks.width)), index)

    out = pl.pallas_call(
        partial(_outer_kernel, blocks=blocks, tile=tile),
        out_shape=jax.ShapeDtypeStruct(
            (group_sizes.shape[0], *((fan_in,) if tile is None else (fan_in // shared, 1)), fan_out), dtype
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[
                pl.BlockSpec((blocks.rows, blocks.height), lambda h, w, v, visits: (visits.block[v], h)),
                pl.BlockSpec((blocks.rows, blocks.width), lambda h, w, v, visits: (visits.block[v], w)),
                *map(of_operand, operands),
            ],
            out_specs=pl.BlockSpec((None, blocks.height, blocks.width), lambda h, w, v, visits: (visits.group[v], h, w))
            if tile is None
            else pl.BlockSpec(
                (None, blocks.height // shared, 1, blocks.width), lambda h, w, v, visits: (visits.group[v], h, 0, w)
            ),
            scratch_shapes=[pltpu.VMEM((blocks.height, blocks.width), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=blocks.vmem + RESERVED
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows.size * fan_out,
            bytes_accessed=rows.nbytes * grid[1]
            + dout.nbytes * grid[0]
            + sum(operand.array.nbytes for operand in operands)
            + group_sizes.shape[0] * fan_in // shared * fan_out * jnp.dtype(dtype).itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="grouped_outer" if tile is None else "reduced_outer",
    )(visits, rows, dout, *(operand.array for operand in operands))
    return out if tile is None else out[:, :, 0]


def _outer_kernel(
    visits: Visits, rows_ref: Any, dout_ref: Any, *refs: Any, blocks: "Blocks", tile: "PackedTile | None"
) -> None:
    *operand_refs, out_ref, sum_ref = refs
    v = pl.program_id(2)

    @pl.when(changed(visits.group, v))
    def _clear() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def strip(at: Any, inside: Array) -> None:
        own = pl.ds(at, blocks.strip)
        # Zeros in place of rows of other groups, and of rows beyond the last, which may be anything.
        left = jnp.where(inside, rows_ref[own, :], jnp.zeros((), rows_ref.dtype))

        def piece(start: Any, width: int) -> None:
            columns = pl.ds(start, width)
            right = jnp.where(inside, dout_ref[own, columns], jnp.zeros((), dout_ref.dtype))
            sum_ref[:, columns] += dot(left, right, (0, 0))

        in_pieces(blocks.width, COLUMNS, piece)

    over_strips(visits, v, blocks.rows, blocks.strip, strip)

    last = pl.num_programs(2) - 1

    @pl.when(jnp.logical_or(v == last, visits.group[v] != visits.group[jnp.minimum(v + 1, last)]))
    def _write() -> None:
        if tile is None:
            out_ref[...] = sum_ref[...].astype(out_ref.dtype)
        else:
            _reduce(tile, operand_refs, sum_ref, out_ref)


def _reduce(tile: "PackedTile", operand_refs: Sequence[Any], sum_ref: Any, out_ref: Any) -> None:
    height, width = sum_ref.shape

    def of_rows(row: Any, rows: int) -> None:
        first = scaled_rows(row, tile.step, 1, tile.shared)

        def piece(column: Any, columns: int) -> None:
            across = pl.ds(column, columns)
            gradient = sum_ref[pl.ds(row, rows), across]
            reduced = tile.reduce(operand_refs, Piece(row, column, (rows, columns)), gradient)
            out_ref[pl.ds(first, rows // tile.shared), :, across] = reduced[:, None, :]

        in_pieces(width, COLUMNS, piece)

    in_pieces(height, tile.step, of_rows)


class Blocks(NamedTuple):
    """Sizes of blocks.

    Attributes:
      rows: rows of a block of rows.
      strip: rows that are multiplied at a time.
      height, width: of a block of a kernel.
      vmem: bytes of fast memory.
    """

    rows: int
    strip: int
    height: int
    width: int
    vmem: int


def plan_blocks(
    rows: int, shape: tuple[int, int], dtype: Any, out_dtype: Any, tile: Any, operands: Sequence[Operand], core: Core
) -> Blocks:
    """Chooses the blocks that move the fewest bytes.

    Args:
      rows, shape: M, and [i, o].
      dtype, out_dtype: of the rows and of the result.
      tile, operands: see `grouped_outer`.
      core: the core that they have to fit.

    Raises:
      ValueError: if not even the smallest blocks fit.
    """
    # The height of blocks is a multiple of `unit`; a row of the result stands for `shared` rows of a kernel.
    unit, shared = (LANES, 1) if tile is None else (tile.step, tile.shared)
    itemsize = jnp.dtype(dtype).itemsize
    block = min(ROW_BLOCK, round_up(rows, 32 // itemsize))
    strip = block if block % core.rows else core.rows
    best = None
    for across in range(1, -(-shape[0] // unit) + 1):
        height = shape[0] if across == 1 else round_up(-(-shape[0] // across), unit)
        for along in range(1, -(-shape[1] // LANES) + 1):
            width = shape[1] if along == 1 else round_up(-(-shape[1] // along), LANES)
            tile = (height, width)
            moved = sum(block_bytes((block, side), dtype) for side in tile)
            moved += block_bytes(tile if shared == 1 else (height // shared, 1, width), out_dtype)
            moved += sum(block_bytes(operand.block_of(height, width), operand.array.dtype) for operand in operands)
            vmem = 2 * moved
            vmem += block_bytes(tile, jnp.float32) + 2 * block_bytes((strip, height), jnp.float32)
            # The product of a strip, before it is added.
            vmem += 2 * block_bytes((height, min(width, COLUMNS)), jnp.float32)
            if operands:
                vmem += 8 * 4 * COLUMNS * unit
            enough = min(core.cores, -(-shape[0] // unit) * -(-shape[1] // LANES))
            if vmem + RESERVED > core.vmem or across * along < enough:
                continue
            moved = rows * itemsize * (shape[0] * -(-shape[1] // width) + shape[1] * -(-shape[0] // height))
            score = moved, vmem
            if best is None or score < best[0]:
                best = score, Blocks(block, strip, height, width, vmem)
            break
    if best is None:
        raise ValueError(f"no block of the gradients of kernels {shape} fits into {core.vmem} bytes of fast memory")
    return best[1]


# ---- low-rank kernels: without the gradient of any whole kernel -------------------------------------------------

ROW_BLOCKS, STRIP = (512, 256, 128), 128


def low_rank_gradients(
    rows: Float[Array, "M i"],
    dout: Float[Array, "M o"],
    a: Float[Array, "E i r"],
    b: Float[Array, "E r o"],
    group_sizes: Int[Array, " E"],
    *,
    core: Core = ANY_CORE,
    interpret: bool = False,
) -> tuple[Float[Array, "E i r"], Float[Array, "E r o"]]:
    """Returns the gradients of `a` and `b` of kernels `a b`, float32; zero for groups without rows.

    For the rows x and the output gradients y of a group, `da = x^T (y b^T)` and `db = (x a)^T y`; a row is read once.
    Arrays that must be in the dtype of the rows are split into two terms of it, so that the only loss is the rounding
    of sums in float32.

    Args:
      rows: sorted by group, as they were multiplied.
      dout: gradient of the product, in the dtype of the rows.
      a, b: factors of every group.
      group_sizes: rows per group, int32.
      core: the core for which the sizes of blocks are chosen.
      interpret: run the kernel in interpret mode.

    Raises:
      ValueError: if the factors are too large for the kernel (see `fits`).
    """
    (groups, fan_in, rank), fan_out = a.shape, b.shape[2]
    block = _block(rows.shape[0], (fan_in, fan_out), rank, rows.dtype, core)
    if block is None:
        raise ValueError(f"factors of rank {rank} of kernels {(fan_in, fan_out)} do not fit into fast memory")
    pad = max(0, block.rows - rows.shape[0])
    rows, dout = (jnp.pad(array, ((0, pad), (0, 0))) for array in (rows, dout))
    visits, count = group_visits(group_sizes, rows.shape[0], block.rows, every_group=True)
    factors = _terms(jnp.swapaxes(a, 1, 2), rows.dtype), _terms(b, rows.dtype)

    def of_rows(v: Any, visits: Any) -> tuple:
        return visits.block[v], 0

    def of_group(v: Any, visits: Any) -> tuple:
        return visits.group[v], 0, 0

    sides = (fan_in, fan_out)
    da, db = pl.pallas_call(
        partial(_low_rank_kernel, block=block, terms=len(factors[0])),
        out_shape=[jax.ShapeDtypeStruct((groups, rank, side), jnp.float32) for side in sides],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(count,),
            in_specs=[pl.BlockSpec((block.rows, side), of_rows) for side in sides]
            + [pl.BlockSpec((None, rank, side), of_group) for side in sides for _ in factors[0]],
            out_specs=[pl.BlockSpec((None, rank, side), of_group) for side in sides],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=block.vmem + RESERVED
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * rows.shape[0] * rank * sum(sides),
            bytes_accessed=rows.nbytes + dout.nbytes + groups * rank * sum(sides) * (4 + 2 * rows.dtype.itemsize),
            transcendentals=0,
        ),
        interpret=interpret,
        name="low_rank_gradients",
    )(visits, rows, dout, *factors[0], *factors[1])
    return jnp.swapaxes(da, 1, 2), db


def fits(rows: int, shape: tuple[int, int], rank: int, dtype: Any, core: Core) -> bool:
    """Whether the kernel takes factors of this rank, for kernels of shape [i, o]."""
    return _block(rows, shape, rank, dtype, core) is not None


class _Block(NamedTuple):
    """Rows of a block and of a strip, and the fast memory that all blocks take together."""

    rows: int
    strip: int
    vmem: int


def _block(rows: int, shape: tuple[int, int], rank: int, dtype: Any, core: Core) -> _Block | None:
    """Returns the longest block of rows that fits; None: none does."""
    for most in ROW_BLOCKS:
        size = min(most, round_up(rows, 32 // jnp.dtype(dtype).itemsize))
        of_rows = sum(block_bytes((size, side), dtype) for side in shape)
        of_group = sum(2 * block_bytes((rank, side), dtype) + block_bytes((rank, side), jnp.float32) for side in shape)
        # Masked strips, and pieces in float32.
        inside = sum(3 * block_bytes((STRIP, side), dtype) for side in shape) + 4 * 4 * COLUMNS * max(rank, STRIP)
        vmem = 2 * (of_rows + of_group) + inside
        if vmem + RESERVED <= core.vmem and size % min(size, STRIP) == 0:
            return _Block(size, min(size, STRIP), vmem)
    return None


def _terms(factor: Array, dtype: Any) -> tuple[Array, ...]:
    """Returns the factor as a sum of arrays of the dtype."""
    return (factor,) if factor.dtype == dtype else (factor.astype(dtype),) if dtype == jnp.float32 else split(factor)


def _low_rank_kernel(visits: Visits, rows_ref: Any, dout_ref: Any, *refs: Any, block: _Block, terms: int) -> None:
    a_refs, b_refs, (da_ref, db_ref) = refs[:terms], refs[terms : 2 * terms], refs[2 * terms :]
    v = pl.program_id(0)

    @pl.when(changed(visits.group, v))
    def _clear() -> None:
        da_ref[...] = jnp.zeros_like(da_ref)
        db_ref[...] = jnp.zeros_like(db_ref)

    def strip(at: Any, inside: Array) -> None:
        own = pl.ds(at, block.strip)
        # Zeros in place of rows of other groups, and of rows beyond the last, which may be anything.
        left, right = (jnp.where(inside, ref[own, :], jnp.zeros((), ref.dtype)) for ref in (rows_ref, dout_ref))
        _add(db_ref, a_refs, left, right)
        _add(da_ref, b_refs, right, left)

    over_strips(visits, v, block.rows, block.strip, strip)


def _add(total_ref: Any, factor_refs: Any, inner: Array, outer: Array) -> None:
    """Adds `(factor inner^T) outer` to the sum, [r, side]."""
    thin = sum((dot(ref[...], inner, (1, 1)) for ref in factor_refs[1:]), dot(factor_refs[0][...], inner, (1, 1)))
    thin_terms = (thin,) if outer.dtype == jnp.float32 else split(thin)

    def piece(start: int, width: int) -> None:
        columns = outer[:, start : start + width]
        products = [dot(term, columns, (1, 0)) for term in thin_terms]
        total_ref[:, start : start + width] += sum(products[1:], products[0])

    for start in range(0, outer.shape[1], 4 * COLUMNS):
        piece(start, min(4 * COLUMNS, outer.shape[1] - start))
