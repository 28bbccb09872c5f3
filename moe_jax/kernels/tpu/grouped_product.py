"""Grouped product with kernels that are made in fast memory: `out[m] = rows[m] @ (base + delta of the group of m)`.

A *panel* is a block of columns of a kernel. For each expert in turn, the kernel reads the expert's stored arrays, makes
its panel (the sum with the panel of the base in float32, rounded to the dtype of the rows) and multiplies it with the
expert's rows. No kernel is ever in HBM. With few rows, every stored byte is read once, and nothing else. With many,
`product_blocks` chooses what stays in fast memory and is read once while the rest passes by, several times:

- panels, as wide as fit: all rows pass by each of them;
- a share of the rows, as large as fits: all panels pass by each of them, narrow ones;
- the sums of a share of the rows: terms pass by, with panels that are wide and a few rows deep. They are rounded and
  written after the last one.

The transposed product has the gradient of the output in place of the rows, and takes panels of rows of the kernels.

The *gated* product consists of two: a panel of each of two kernels meets the rows, and only `act(gate) * up` goes to
HBM. As two products it would be written, read again, and written as one.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from moe_jax.kernels.hardware import ANY_CORE, LANES, RESERVED, Core, round_up
from moe_jax.kernels.plain import activated, gated_factor
from moe_jax.kernels.tpu.fused_tile import FusedTile, Operand, Piece
from moe_jax.kernels.tpu.parts import (
    COLUMNS,
    ShareEntries,
    Visits,
    changed,
    dot,
    in_pieces,
    over_strips,
    visits_of_shares,
)
from moe_jax.kernels.tpu.product_blocks import Made, Plan, Stays, plan_blocks


class Kernels(NamedTuple):
    """Kernels of all groups, in the form in which they are stored.

    Attributes:
      base: shared by all groups; None: there is none.
      arrays: of the experts, by name, stacked over the groups.
      tile: makes kernels from the arrays.
    """

    base: Float[Array, "i o"] | None
    arrays: Mapping[str, Array]
    tile: FusedTile


def grouped_product(
    rows: Float[Array, "M k"],
    kernels: Kernels | tuple[Kernels, Kernels],
    group_sizes: Int[Array, " E"],
    shape: tuple[int, int],
    *,
    activation: str | None = None,
    transposed: bool = False,
    core: Core = ANY_CORE,
    interpret: bool = False,
) -> Float[Array, "M n"]:
    """Returns `rows[m] @ kernel[group of m]`, in the dtype of the rows, with sums in float32.

    Of two kernels, gate and up, `act(rows[m] @ gate kernel) * (rows[m] @ up kernel)`, rounded once.

    Args:
      rows: sorted by group, [M, i]; transposed: [M, o].
      kernels: of all groups; or those of gate and of up.
      group_sizes: rows per group, int32. Rows beyond their sum give zeros.
      shape: [i, o] of the kernels.
      activation: a key of `kernels.plain.ACTIVATION_FUNCTIONS`, for two kernels; None: there is one.
      transposed: multiply with the transposed kernels; the result is [M, i].
      core: the core for which the sizes of blocks are chosen.
      interpret: run the kernel in interpret mode.
    """
    every = []
    for base, arrays, tile in [kernels] if isinstance(kernels, Kernels) else kernels:
        operands = tuple(tile.operands(arrays, rows.dtype))
        stored = base is None and tile.is_whole and operands[0].array.dtype == rows.dtype
        every.append(Made(tile, base, operands, stored))
    plan = plan_blocks(rows.shape[0], shape, rows.dtype, every, core, transposed=transposed, adds=activation is None)
    sizes, sums = plan.sizes, plan.sizes.stays is Stays.SUMS
    visits, count = visits_of_shares(group_sizes, rows.shape[0], sizes.rows, sizes.shares)
    places = _GridSteps(plan, visits.block.shape[0] // sizes.shares)
    padded = jnp.pad(rows, ((0, max(0, sizes.rows - rows.shape[0])), (0, 0)))
    width = shape[0] if transposed else shape[1]
    # Sums are written strip by strip.
    height = round_up(padded.shape[0], plan.strip) if sums else padded.shape[0]
    panel = (sizes.width, sizes.depth) if transposed else (sizes.depth, sizes.width)
    layout = tuple(_Layout(made.tile, made.base is not None, len(made.operands), made.stored) for made in every)

    # Indices of blocks, from the indices of a step of the grid and the visits after them.
    def of_rows(*at: Any) -> tuple:
        return at[-1].block[places.visit(*at)], places.depth(*at)

    def of_out(*at: Any) -> tuple:
        return at[-1].block[places.visit(*at)], places.panel(*at)

    def of_kernel(*at: Any) -> tuple:
        n, k = places.panel(*at), places.depth(*at)
        return (n, k) if transposed else (k, n)

    def of_operand(operand: Operand) -> pl.BlockSpec:
        def index(*at: Any) -> tuple:
            return at[-1].group[places.visit(*at)], *operand.index_of_block(*of_kernel(*at))

        return pl.BlockSpec((None, *operand.block_of(*panel)), index)

    # Rows that stay in use for long get one buffer: a second one, for the next block to arrive in, would not pay.
    blocks_of_rows = 1 if sizes.stays is Stays.ROWS else 2
    specs = [pl.BlockSpec((sizes.rows, sizes.depth), of_rows, pipeline_mode=pl.Buffered(blocks_of_rows))]
    inputs = [padded]
    for made in every:
        if made.base is not None:
            specs.append(pl.BlockSpec(panel, of_kernel, pipeline_mode=pl.Buffered(sizes.bases)))
            inputs.append(made.base)
        specs += [of_operand(operand) for operand in made.operands]
        inputs += [operand.array for operand in made.operands]
    scratch: list[Any] = [pltpu.VMEM(panel, rows.dtype) for made in every if not made.stored]
    if sums:
        scratch += [
            pltpu.VMEM((sizes.rows, sizes.width), jnp.float32),
            pltpu.VMEM((plan.strip, sizes.width), rows.dtype),
            pltpu.SemaphoreType.DMA,
        ]
    name = "grouped_product" if activation is None else "gated_product"
    product = pl.pallas_call(
        partial(_kernel, layout=layout, places=places, activation=activation, transposed=transposed),
        out_shape=jax.ShapeDtypeStruct((height, width), rows.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=places.grid(count),
            in_specs=specs,
            out_specs=pl.BlockSpec(memory_space=pl.ANY) if sums else pl.BlockSpec((sizes.rows, sizes.width), of_out),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=plan.vmem + RESERVED,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(every) * rows.shape[0] * shape[0] * shape[1],
            bytes_accessed=plan.traffic,
            transcendentals=0 if activation is None else rows.shape[0] * width,
        ),
        interpret=interpret,
        name=f"{name}_transposed" if transposed else name,
    )(visits, *inputs)
    return product[: rows.shape[0]]


class _GridSteps(NamedTuple):
    """The place of a step of the grid, given the visits of a share; cores divide the first axis: shares or panels."""

    plan: Plan
    of_share: int

    def grid(self, visits: Any) -> tuple:
        split, shares, panels = self.plan.sizes.split, self.plan.sizes.shares, self.plan.panels
        ahead = (shares, 1, panels) if split == 1 else (split, shares, panels // split)
        return *ahead, self.plan.depths, visits

    def share(self, *at: Any) -> Any:
        return at[0 if self.plan.sizes.split == 1 else 1]

    def panel(self, *at: Any) -> Any:
        split = self.plan.sizes.split
        return at[2] if split == 1 else at[0] * (self.plan.panels // split) + at[2]

    def depth(self, *at: Any) -> Any:
        return at[3]

    def visit(self, *at: Any) -> Any:
        return self.share(*at) * self.of_share + at[4]


# ---- the kernel -------------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """The references of the Pallas kernel that belong to one of the kernels that it multiplies with."""

    tile: FusedTile
    has_base: bool
    operands: int
    stored: bool


def _kernel(
    visits: Visits,
    rows_ref: Any,
    *refs: Any,
    layout: Sequence[_Layout],
    places: _GridSteps,
    activation: str | None,
    transposed: bool,
) -> None:
    inputs, plan = iter(refs), places.plan
    out_ref, *scratch = refs[sum(one.has_base + one.operands for one in layout) :]
    at_step = [pl.program_id(axis) for axis in range(5)]
    share, n, k, v, last = places.share(*at_step), places.panel(*at_step), *at_step[3:], pl.num_programs(4) - 1
    own_visits: Any = (ShareEntries(values, share * places.of_share) for values in visits)
    visits, panels, sizes = Visits(*own_visits), [], plan.sizes
    for one in layout:
        base_ref = next(inputs) if one.has_base else None
        operand_refs = [next(inputs) for _ in range(one.operands)]
        panels.append(operand_refs[0] if one.stored else scratch.pop(0))
        if not one.stored:

            @pl.when(jnp.logical_and(visits.end[v] > 0, changed(visits.group, v)))
            def _make(panel_ref=panels[-1], base_ref=base_ref, operand_refs=operand_refs, tile=one.tile) -> None:
                _make_panel(panel_ref, base_ref, operand_refs, tile)

    sums_ref: Any = scratch[0] if scratch else out_ref

    @pl.when(jnp.logical_and(k == 0, changed(visits.block, v)))
    def _clear() -> None:
        sums_ref[...] = jnp.zeros_like(sums_ref)

    def multiply(at: Any, inside: Array) -> None:
        own = pl.ds(at, plan.strip)

        def piece(start: Any, width: int) -> None:
            columns = pl.ds(start, width)
            products = []
            for panel_ref in panels:
                weights = panel_ref[columns, :] if transposed else panel_ref[:, columns]
                products.append(dot(rows_ref[own, :], weights, (1, 1 if transposed else 0)))
            product = products[0]
            if activation is not None:
                product = activated(product, activation) * gated_factor(products[1], activation)
            kept = sums_ref[own, columns].astype(jnp.float32)
            # All terms are there, or a part of them.
            product = kept + product if scratch else product
            sums_ref[own, columns] = jnp.where(inside, product, kept).astype(sums_ref.dtype)

        in_pieces(sizes.width, COLUMNS, piece)

    over_strips(visits, v, sizes.rows, plan.strip, multiply)
    if scratch:
        _, strip_ref, semaphore = scratch
        columns = pl.ds(pl.multiple_of(n * sizes.width, LANES), sizes.width)
        part_ref = out_ref if plan.panels == 1 else out_ref.at[:, columns]

        @pl.when(jnp.logical_and(k == plan.depths - 1, v == last))
        def _write() -> None:
            _write_sums(sums_ref, strip_ref, semaphore, part_ref, share * sizes.rows)


def _write_sums(sums_ref: Any, strip_ref: Any, semaphore: Any, out_ref: Any, row: Any) -> None:
    """Rounds the sums and writes those of rows that exist, strip by strip, from row `row` of the output on."""
    strip, width = strip_ref.shape

    def one(index: Any, _: None) -> None:
        at = pl.multiple_of(index * strip, strip)

        def piece(start: Any, width: int) -> None:
            columns = pl.ds(start, width)
            strip_ref[:, columns] = sums_ref[pl.ds(at, strip), columns].astype(strip_ref.dtype)

        in_pieces(width, COLUMNS, piece)
        there = out_ref.at[pl.ds(pl.multiple_of(row + at, strip), strip), :]
        copy = pltpu.make_async_copy(strip_ref, there, semaphore)
        copy.start()
        copy.wait()

    rows = jnp.minimum(sums_ref.shape[0], out_ref.shape[0] - row)
    lax.fori_loop(0, lax.div(rows, strip), one, None)


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
