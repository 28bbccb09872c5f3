"""Grouped product with kernels that are made in fast memory: `out[m] = rows[m] @ (base + delta of the group of m)`.

For a block of columns of the kernels, the base is read once; for each expert in turn what is stored of it is read once,
a *panel* of its kernel is made (summed in float32, rounded to the dtype of the rows) and kept while blocks of its rows
pass by. No kernel is ever in HBM. With few rows, every byte that is stored is read once, and nothing else; with many,
rows are read once for every panel, whose width is chosen so that this costs least. Long kernels may be cut into parts
of their rows, with a call for each, which adds its terms to the sums of the call before.

The transposed product, with the gradient of the output in the place of the rows, takes panels of rows of the kernels.

The *gated* product is made of two: a panel of each of two kernels meets the rows, and only `act(gate) * up` goes to
HBM, where two products would be written, read again, and written as one.
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

from moe_jax.kernels.tpu.chip import ANY_CORE, RESERVED, Core
from moe_jax.kernels.tpu.fused_tile import FusedTile, Operand, Piece
from moe_jax.kernels.tpu.gated_activation import activated
from moe_jax.kernels.tpu.group_visits import OfShare, Visits, visits_of_shares
from moe_jax.kernels.tpu.pieces import COLUMNS, changed, dot, in_pieces, over_strips
from moe_jax.kernels.tpu.product_blocks import Made, Plan, plan_blocks


class Kernels(NamedTuple):
    """Kernels of all groups, as they are stored.

    Attributes:
      base: shared by all groups; None: there is none.
      arrays: of the experts, by name, stacked over the groups.
      tile: makes kernels of the arrays.
    """

    base: Float[Array, "i o"] | None
    arrays: Mapping[str, Array]
    tile: FusedTile


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
    return _product(rows, [Kernels(base, arrays, tile)], group_sizes, shape, None, transposed, core, interpret)


def gated_product(
    rows: Float[Array, "M i"],
    gate: Kernels,
    up: Kernels,
    group_sizes: Int[Array, " E"],
    shape: tuple[int, int],
    activation: str,
    *,
    core: Core = ANY_CORE,
    interpret: bool = False,
) -> Float[Array, "M o"]:
    """`act(rows[m] @ gate kernel) * (rows[m] @ up kernel)`, computed in float32 and rounded once.

    Args:
      rows: sorted by group.
      gate, up: the kernels [i, o].
      group_sizes, shape, core, interpret: see `grouped_product`.
      activation: a key of `functional.ffn.ACTIVATION_FUNCTIONS`.
    """
    return _product(rows, [gate, up], group_sizes, shape, activation, False, core, interpret)


def _product(
    rows: Array,
    kernels: Sequence[Kernels],
    group_sizes: Array,
    shape: tuple[int, int],
    activation: str | None,
    transposed: bool,
    core: Core,
    interpret: bool,
) -> Array:
    every = []
    for base, arrays, tile in kernels:
        operands = tuple(tile.operands(arrays, rows.dtype))
        stored = base is None and tile.is_whole and operands[0].array.dtype == rows.dtype
        every.append(Made(tile, base, operands, stored))
    adds = activation is None
    plan = plan_blocks(rows.shape[0], shape, rows.dtype, every, core, transposed=transposed, adds=adds)
    visits, count = visits_of_shares(group_sizes, rows.shape[0], plan.rows, plan.shares)
    of_share = visits.block.shape[0] // plan.shares
    padded = jnp.pad(rows, ((0, max(0, plan.rows - rows.shape[0])), (0, 0)))
    panel = (plan.width, plan.depth) if transposed else (plan.depth, plan.width)
    length, width = (shape[1], shape[0]) if transposed else shape

    # The axis that is divided between cores comes first: that of the shares, or of panels where there is one share.
    by_rows = plan.shares > 1
    name = "grouped_product" if activation is None else "gated_product"
    layout = tuple(_Layout(made.tile, made.base is not None, len(made.operands), made.stored) for made in every)

    def panel_of(outer: Any, inner: Any) -> Any:
        return inner if by_rows else outer

    def visit_of(outer: Any, v: Any) -> Any:
        return outer * of_share + v if by_rows else v

    def of_out(outer: Any, inner: Any, v: Any, visits: Any) -> tuple:
        return visits.block[visit_of(outer, v)], panel_of(outer, inner)

    def of_cut(cut: int, sums: Array | None) -> Array:
        """The sums with the terms of a cut."""

        def at(outer: Any, inner: Any) -> tuple:
            n = panel_of(outer, inner)
            return (n, cut) if transposed else (cut, n)

        def of_rows(outer: Any, inner: Any, v: Any, visits: Any) -> tuple:
            return visits.block[visit_of(outer, v)], cut

        def of_base(outer: Any, inner: Any, v: Any, visits: Any) -> tuple:
            return at(outer, inner)

        def of_operand(operand: Operand) -> pl.BlockSpec:
            def index(outer: Any, inner: Any, v: Any, visits: Any) -> tuple:
                return visits.group[visit_of(outer, v)], *operand.index_of_block(*at(outer, inner))

            return pl.BlockSpec((None, *operand.block_of(*panel)), index)

        specs, inputs = [pl.BlockSpec((plan.rows, plan.depth), of_rows)], [padded]
        for made in every:
            if made.base is not None:
                # A block of the base is used for long: a second one, in which the next arrives meanwhile, has to pay.
                specs.append(pl.BlockSpec(panel, of_base, pipeline_mode=pl.Buffered(plan.bases)))
                inputs.append(made.base)
            specs += [of_operand(operand) for operand in made.operands]
            inputs += [operand.array for operand in made.operands]
        if sums is not None:
            specs.append(pl.BlockSpec((plan.rows, plan.width), of_out))
            inputs.append(sums)
        own = min(plan.depth, length - cut * plan.depth)
        dtype = rows.dtype if cut == plan.cuts - 1 else jnp.float32
        return pl.pallas_call(
            partial(
                _kernel, layout=layout, plan=plan, activation=activation, transposed=transposed,
                depth=own, continues=sums is not None,
            ),
            out_shape=jax.ShapeDtypeStruct((padded.shape[0], width), dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(plan.shares, plan.panels, count) if by_rows else (plan.panels, 1, count),
                in_specs=specs,
                out_specs=pl.BlockSpec((plan.rows, plan.width), of_out),
                scratch_shapes=[pltpu.VMEM(panel, rows.dtype) for made in every if not made.stored],
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=plan.vmem + RESERVED
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * len(every) * rows.shape[0] * own * width,
                bytes_accessed=plan.traffic // plan.cuts,
                transcendentals=0 if activation is None else rows.shape[0] * width,
            ),
            interpret=interpret,
            name=f"{name}_transposed" if transposed else name,
        )(visits, *inputs)  # fmt: skip

    sums = None
    for cut in range(plan.cuts):
        sums = of_cut(cut, sums)
    assert sums is not None
    return sums[: rows.shape[0]]


# ---- the kernel -------------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Which references of the Pallas kernel are those of one of the kernels that it multiplies with."""

    tile: FusedTile
    has_base: bool
    operands: int
    stored: bool


def _kernel(
    visits: Visits,
    rows_ref: Any,
    *refs: Any,
    layout: Sequence[_Layout],
    plan: Plan,
    activation: str | None,
    transposed: bool,
    depth: int,
    continues: bool,
) -> None:
    inputs, others = iter(refs), [*refs[sum(one.has_base + one.operands for one in layout) :]]
    sums_ref: Any = others.pop(0) if continues else None
    out_ref, *scratch = others
    v, panels = pl.program_id(2), []
    if plan.shares > 1:
        start = pl.program_id(0) * (visits.block.shape[0] // plan.shares)
        own_visits: Any = (OfShare(values, start) for values in visits)
        visits = Visits(*own_visits)
    width = plan.width
    for one in layout:
        base_ref = next(inputs) if one.has_base else None
        operand_refs = [next(inputs) for _ in range(one.operands)]
        panels.append(operand_refs[0] if one.stored else scratch.pop(0))
        if not one.stored:

            @pl.when(jnp.logical_and(visits.end[v] > 0, changed(visits.group, v)))
            def _make(panel_ref=panels[-1], base_ref=base_ref, operand_refs=operand_refs, tile=one.tile) -> None:
                _make_panel(panel_ref, base_ref, operand_refs, tile, (width, depth) if transposed else (depth, width))

    @pl.when(changed(visits.block, v))
    def _clear() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    def multiply(at: Any, inside: Array) -> None:
        own = pl.ds(at, plan.strip)

        def piece(start: Any, width: int) -> None:
            columns = pl.ds(start, width)
            products = []
            for panel_ref in panels:
                # What lies beyond the last terms is nothing.
                weights = panel_ref[columns, :depth] if transposed else panel_ref[:depth, columns]
                products.append(dot(rows_ref[own, :depth], weights, (1, 1 if transposed else 0)))
            product = products[0] if activation is None else activated(products[0], activation) * products[1]
            if sums_ref is not None:
                product = sums_ref[own, columns] + product
            kept = out_ref[own, columns].astype(jnp.float32)
            out_ref[own, columns] = jnp.where(inside, product, kept).astype(out_ref.dtype)

        in_pieces(plan.width, COLUMNS, piece)

    over_strips(visits, v, plan.rows, plan.strip, multiply)


def _make_panel(
    panel_ref: Any, base_ref: Any, operand_refs: Sequence[Any], tile: FusedTile, shape: tuple[int, int]
) -> None:
    height, width = shape

    def of_rows(row: Any, rows: int) -> None:
        def piece(column: Any, columns: int) -> None:
            at = pl.ds(row, rows), pl.ds(column, columns)
            made = tile.make(operand_refs, Piece(row, column, (rows, columns)))
            if base_ref is not None:
                made = base_ref[at].astype(jnp.float32) + made
            panel_ref[at] = made.astype(panel_ref.dtype)

        in_pieces(width, COLUMNS, piece)

    in_pieces(height, tile.step, of_rows)
