"""Sizes of the blocks of a grouped product: the ones that move the fewest bytes and fit into fast memory."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels.tpu.chip import LANES, RESERVED, Core, block_bytes, round_up
from moe_jax.kernels.tpu.fused_tile import FusedTile, Operand
from moe_jax.kernels.tpu.pieces import COLUMNS

# Blocks of rows, from the longest.
ROW_BLOCKS = (512, 256, 128)
# That a kernel is cut into along the sums of a product: sums that go to memory in between.
MOST_CUTS = 4


class Made(NamedTuple):
    """Kernels of all groups, and what they are made of.

    Attributes:
      tile: makes what is added to the base.
      base: shared by all groups; None: there is none.
      operands: of the tile.
      stored: the operand is multiplied as it is, so that no panel is made.
    """

    tile: FusedTile
    base: Float[Array, "i o"] | None
    operands: tuple[Operand, ...]
    stored: bool


class Plan(NamedTuple):
    """Sizes of blocks.

    Attributes:
      rows: of a block of rows.
      strip: rows that are multiplied at a time; those of a block that no group has are left out strip by strip.
      width: columns of a panel, or rows of it in the transposed product.
      panels: number of panels of a kernel.
      depth: terms of a sum in a call, or what is left of them in the last one.
      cuts: calls, one after another, of which each adds its terms to the sums of the one before, in float32.
      shares: of the rows, one for each core; 1: cores have panels of their own instead.
      bases: blocks of the base in fast memory.
      vmem: bytes of fast memory.
      traffic: bytes that are read and written, if every group has rows.
    """

    rows: int
    strip: int
    width: int
    panels: int
    depth: int
    cuts: int
    shares: int
    bases: int
    vmem: int
    traffic: int


def plan_blocks(
    rows: int,
    shape: tuple[int, int],
    dtype: Any,
    kernels: Sequence[Made],
    core: Core,
    *,
    transposed: bool = False,
    adds: bool = True,
) -> Plan:
    """Chooses the blocks that move the fewest bytes; those during which nothing else can happen are counted twice.

    Cores have as many panels each, or as many rows: then each of them reads the base. Rows are read once for every
    panel. Where they are much longer than what is made of them, as in a `down` projection, wider panels of a part of
    the rows' length may take less, though sums are then written and read in float32.

    Args:
      rows: M.
      shape: [i, o] of the kernels.
      dtype: of the rows.
      kernels: that the rows are multiplied with; all of that shape, and for as many groups.
      core: what they have to fit.
      transposed: see `grouped_product`.
      adds: what is written is the sum, so that it can be computed in several calls.

    Raises:
      ValueError: if not even the smallest blocks fit.
    """
    itemsize, step = jnp.dtype(dtype).itemsize, max(made.tile.step for made in kernels)
    length, width = (shape[1], shape[0]) if transposed else shape
    # Panels of rows, or parts of them, begin where pieces do, and with whole rows of what is stored.
    unit, deep = (step, LANES) if transposed else (LANES, step)
    most, best = -(-width // unit), None
    experts = kernels[0].operands[0].array.shape[0]
    for block in ROW_BLOCKS:
        block = min(block, round_up(rows, 32 // itemsize))
        strip = min(block, core.rows)
        shared = {1, core.cores if -(-rows // block) % core.cores == 0 else 1}
        cuts = range(1, min(MOST_CUTS, -(-length // deep)) + 1) if adds else (1,)
        for bases, shares, cut, panels in itertools.product((2, 1), sorted(shared), cuts, range(1, most + 1)):
            depth = length if cut == 1 else round_up(-(-length // cut), deep)
            columns = width if panels == 1 else round_up(-(-width // panels), unit)
            if block % strip or depth * (cut - 1) >= length:
                continue
            panel = (columns, depth) if transposed else (depth, columns)
            of_base = sum(block_bytes(panel, made.base.dtype) for made in kernels if made.base is not None)
            of_expert = sum(
                block_bytes(operand.block_of(*panel), operand.array.dtype)
                for made in kernels
                for operand in made.operands
            )
            panels_made = sum(not made.stored for made in kernels) * block_bytes(panel, dtype)
            in_rows, out = (block_bytes((block, size), dtype) for size in (depth, columns))
            if cut > 1:
                out = 2 * block_bytes((block, columns), jnp.dtype(jnp.float32))
            vmem = bases * of_base + 2 * (of_expert + in_rows + out) + panels_made
            # Pieces of float32: those that are made, and those that are multiplied.
            vmem += (4 + 2 * len(kernels)) * 4 * COLUMNS * max(step, strip)
            if vmem + RESERVED > core.vmem:
                continue
            count = -(-width // columns)
            of_kernels = shares * of_base + (experts + shares - 1) * of_expert
            moved = count * (rows * length * itemsize + cut * of_kernels) + (cut - 1) * 2 * 4 * rows * width
            traffic = moved + rows * width * itemsize
            # Cores have the same to do, if they can.
            uneven = shares == 1 and count % core.cores > 0
            waits = shares * cut * (of_base * (1 if bases == 2 else count) + of_expert)
            # Sums take memory, too: cuts that hardly save anything are not worth it.
            score = uneven, (moved + waits) * (1.05 if cut > 1 else 1.0), -block
            if best is None or score < best[0]:
                best = score, Plan(block, strip, columns, count, depth, cut, shares, bases, vmem, traffic)
    if best is None:
        raise ValueError(f"no block of kernels {shape} fits into {core.vmem} bytes of fast memory")
    return best[1]
