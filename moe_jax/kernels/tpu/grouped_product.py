"""Grouped product with kernels that are made in fast memory: `out[m] = rows[m] @ (base + delta of the group of m)`.

For a block of columns of the kernels, the base is read once; for each expert in turn what is stored of it is read once,
a *panel* of its kernel is made (summed in float32, rounded to the dtype of the rows) and kept while blocks of its rows
pass by. No kernel is ever in HBM. With few rows, every byte that is stored is read once, and nothing else; with many,
rows are read once for every panel, whose width is chosen so that this costs least.

The transposed product, with the gradient of the output in the place of the rows, takes panels of rows of the kernels.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from moe_jax.kernels.tpu.chip import ANY_CORE, LANES, RESERVED, Core, block_bytes, round_up
from moe_jax.kernels.tpu.fused_tile import FusedTile, Operand, Piece
from moe_jax.kernels.tpu.group_visits import Visits, group_visits
from moe_jax.kernels.tpu.pieces import COLUMNS, changed, dot, in_pieces, over_strips

# Blocks of rows, from the longest.
ROW_BLOCKS = (512, 256, 128)


def reference(
    rows: Float[Array, "M k"], kernels: Float[Array, "E i o"], group_sizes: Int[Array, " E"], transposed: bool = False
) -> Float[Array, "M n"]:
    """The same product in plain JAX, float32, with kernels that are whole; for tests."""
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows.shape[0], dtype=jnp.int32), side="right")
    member = jax.nn.one_hot(group, kernels.shape[0], dtype=jnp.float32)
    wide, kernels = rows.astype(jnp.float32), kernels.astype(jnp.float32)
    equation = "mo,eio,me->mi" if transposed else "mi,eio,me->mo"
    return jnp.einsum(equation, wide, kernels, member, precision=lax.Precision.HIGHEST)


def grouped_product(
    rows: Float[Array, "M k"],
    base: Float[Array, "i o"] | None,
    arrays: Mapping[str, Array],
    group_sizes: Int[Array, " E"],
    tile: FusedTile,
    shape: tuple[int, int],
    *,
    transposed: bool = False,
    core: Core = ANY_CORE,
    interpret: bool = False,
) -> Float[Array, "M n"]:
    """`rows[m] @ kernel[group of m]`, in the dtype of the rows, with sums in float32.

    Args:
      rows: sorted by group, [M, i]; transposed: [M, o].
      base: shared by all groups; None: there is none.
      arrays: of the experts, by name, stacked over the groups.
      group_sizes: rows per group, int32. Rows beyond their sum give zeros.
      tile: makes kernels of the arrays.
      shape: [i, o] of the kernels.
      transposed: multiply with the transposed kernels; the result is [M, i].
      core: for which the sizes of blocks are chosen.
      interpret: run the kernel in interpret mode.
    """
    operands = tuple(tile.operands(arrays, rows.dtype))
    stored = base is None and tile.is_whole and operands[0].array.dtype == rows.dtype
    plan = plan_blocks(
        rows.shape[0], shape, rows.dtype, base, operands, tile.step, core, transposed=transposed, stored=stored
    )
    visits, count = group_visits(group_sizes, rows.shape[0], plan.rows)
    padded = jnp.pad(rows, ((0, max(0, plan.rows - rows.shape[0])), (0, 0)))
    panel = (plan.width, shape[1]) if transposed else (shape[0], plan.width)
    width = shape[0] if transposed else shape[1]

    def of_base(n: Any, v: Any, visits: Any) -> tuple:
        return (n, 0) if transposed else (0, n)

    def of_operand(operand: Operand) -> pl.BlockSpec:
        def index(n: Any, v: Any, visits: Any) -> tuple:
            return visits.group[v], *operand.index_of_block(*((n, 0) if transposed else (0, n)))

        return pl.BlockSpec((None, *operand.block_of(*panel)), index)

    specs = [pl.BlockSpec((plan.rows, padded.shape[1]), lambda n, v, visits: (visits.block[v], 0))]
    # A block of the base is used for long: a second one, in which the next would arrive meanwhile, has to pay.
    specs += [] if base is None else [pl.BlockSpec(panel, of_base, pipeline_mode=pl.Buffered(plan.bases))]
    specs += [of_operand(operand) for operand in operands]
    out = pl.pallas_call(
        partial(_kernel, tile=tile, plan=plan, has_base=base is not None, stored=stored, transposed=transposed),
        out_shape=jax.ShapeDtypeStruct((padded.shape[0], width), rows.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(plan.panels, count),
            in_specs=specs,
            out_specs=pl.BlockSpec((plan.rows, plan.width), lambda n, v, visits: (visits.block[v], n)),
            scratch_shapes=[] if stored else [pltpu.VMEM(panel, rows.dtype)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=plan.vmem + RESERVED
        ),
        cost_estimate=pl.CostEstimate(flops=2 * rows.size * width, bytes_accessed=plan.traffic, transcendentals=0),
        interpret=interpret,
        name="grouped_product_transposed" if transposed else "grouped_product",
    )(visits, padded, *([] if base is None else [base]), *(operand.array for operand in operands))
    return out[: rows.shape[0]]


# ---- the kernel -------------------------------------------------------------------------------------------------


def _kernel(
    visits: Visits,
    rows_ref: Any,
    *refs: Any,
    tile: FusedTile,
    plan: "Plan",
    has_base: bool,
    stored: bool,
    transposed: bool,
) -> None:
    base_ref, refs = (refs[0], refs[1:]) if has_base else (None, refs)
    if stored:
        *operand_refs, out_ref = refs
        (panel_ref,) = operand_refs
    else:
        *operand_refs, out_ref, panel_ref = refs
    v = pl.program_id(1)

    if not stored:

        @pl.when(jnp.logical_and(visits.end[v] > 0, changed(visits.group, v)))
        def _make() -> None:
            _make_panel(panel_ref, base_ref, operand_refs, tile)

    @pl.when(changed(visits.block, v))
    def _clear() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    def multiply(at: Any, inside: Array) -> None:
        own = pl.ds(at, plan.strip)

        def piece(start: Any, width: int) -> None:
            columns = pl.ds(start, width)
            weights = panel_ref[columns, :] if transposed else panel_ref[:, columns]
            product = dot(rows_ref[own, :], weights, (1, 1 if transposed else 0))
            kept = out_ref[own, columns].astype(jnp.float32)
            out_ref[own, columns] = jnp.where(inside, product, kept).astype(out_ref.dtype)

        in_pieces(plan.width, COLUMNS, piece)

    over_strips(visits, v, plan.rows, plan.strip, multiply)


def _make_panel(panel_ref: Any, base_ref: Any, operand_refs: Sequence[Any], tile: FusedTile) -> None:
    height, width = panel_ref.shape

    def of_rows(row: Any, rows: int) -> None:
        def piece(column: Any, columns: int) -> None:
            at = pl.ds(row, rows), pl.ds(column, columns)
            made = tile.make(operand_refs, Piece(row, column, (rows, columns)))
            if base_ref is not None:
                made = base_ref[at].astype(jnp.float32) + made
            panel_ref[at] = made.astype(panel_ref.dtype)

        in_pieces(width, COLUMNS, piece)

    in_pieces(height, tile.step, of_rows)


# ---- blocks -----------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Sizes of blocks.

    Attributes:
      rows: of a block of rows.
      strip: rows that are multiplied at a time; those of a block that no group has are left out strip by strip.
      width: columns of a panel, or rows of it in the transposed product.
      panels: number of panels of a kernel.
      bases: blocks of the base in fast memory.
      vmem: bytes of fast memory.
      traffic: bytes that are read and written, if every group has rows.
    """

    rows: int
    strip: int
    width: int
    panels: int
    bases: int
    vmem: int
    traffic: int


def plan_blocks(
    rows: int,
    shape: tuple[int, int],
    dtype: Any,
    base: Any,
    operands: Sequence[Operand],
    step: int,
    core: Core,
    *,
    transposed: bool,
    stored: bool,
) -> Plan:
    """Chooses the blocks that move the fewest bytes; those during which nothing else can happen are counted twice.

    Args:
      rows: M.
      shape: [i, o] of the kernels.
      dtype: of the rows.
      base: array or None.
      operands: of the tile.
      step: of the tile.
      core: what they have to fit.
      transposed: see `grouped_product`.
      stored: the operand is multiplied as it is, so that no panel is made.

    Raises:
      ValueError: if not even the smallest blocks fit.
    """
    itemsize = jnp.dtype(dtype).itemsize
    depth, width = (shape[1], shape[0]) if transposed else shape
    # Panels of rows begin where pieces do, and with whole rows of what is stored.
    unit = step if transposed else LANES
    most, best = -(-width // unit), None
    for block in ROW_BLOCKS:
        block = min(block, round_up(rows, 32 // itemsize))
        strip = min(block, core.rows)
        choices = itertools.product((2, 1), range(min(core.cores, most), most + 1))
        for bases, panels in choices if block % strip == 0 else ():
            columns = width if panels == 1 else round_up(-(-width // panels), unit)
            panel = (columns, depth) if transposed else (depth, columns)
            of_base = 0 if base is None else block_bytes(panel, base.dtype)
            of_expert = sum(
                block_bytes(operand.block_of(*panel), operand.array.dtype) for operand in operands
            )
            in_rows, out = (block_bytes((block, size), dtype) for size in (depth, columns))
            vmem = bases * of_base + 2 * (of_expert + in_rows + out) + (0 if stored else block_bytes(panel, dtype))
            # Pieces of float32: those that are made, and those that are multiplied.
            vmem += 6 * 4 * COLUMNS * max(step, strip)
            if vmem + RESERVED > core.vmem:
                continue
            count = -(-width // columns)
            experts = operands[0].array.shape[0]
            moved = count * (rows * depth * itemsize + of_base + experts * of_expert)
            traffic = moved + rows * width * itemsize
            score = moved + of_base * (1 if bases == 2 else count) + of_expert, -block
            if best is None or score < best[0]:
                best = score, Plan(block, strip, columns, count, bases, vmem, traffic)
    if best is None:
        raise ValueError(f"no block of kernels {shape} fits into {core.vmem} bytes of fast memory")
    return best[1]
