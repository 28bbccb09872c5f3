"""Sizes of the blocks of a grouped product: those that fit into fast memory and move the fewest bytes."""

import itertools
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels.hardware import LANES, RESERVED, Core, block_bytes, round_up
from moe_jax.kernels.tpu.fused_tile import FusedTile, Operand
from moe_jax.kernels.tpu.parts import COLUMNS

# Rows of blocks that pass by, from the longest.
ROW_BLOCKS = (512, 256, 128)
# Sides of blocks of a kernel that pass by, from the longest.
SIDES = (512, 256, 128)
# Most panels whose sums stay in fast memory while their terms pass by.
MOST_SUMMED = 4


class Made(NamedTuple):
    """Kernels of all groups, and the arrays that they are made from.

    Attributes:
      tile: makes the part that is added to the base.
      base: shared by all groups; None: there is none.
      operands: of the tile.
      stored: the operand is multiplied as it is, so that no panel is made.
    """

    tile: FusedTile
    base: Float[Array, "i o"] | None
    operands: tuple[Operand, ...]
    stored: bool


class Stays(Enum):
    """The part of a product that stays in fast memory while the rest passes by."""

    PANEL = auto()
    ROWS = auto()
    SUMS = auto()


class Sizes(NamedTuple):
    """Sizes of blocks, and what is divided between cores.

    Attributes:
      stays: a panel stays, and all blocks of rows of a share pass by; or a share of the rows, which is one block,
        stays, and panels pass by; or its sums stay, and blocks of their terms pass by.
      rows: rows of a block of rows.
      shares: number of shares of the rows, one after another, or side by side on several cores.
      split: number of parts of the panels, one for each core, which then takes all shares; 1: cores divide the shares.
      width: columns of a panel, or rows of it in the transposed product.
      depth: terms of a sum that are loaded at a time.
      bases: number of blocks of the base in fast memory.
    """

    stays: Stays
    rows: int
    shares: int
    split: int
    width: int
    depth: int
    bases: int = 2


class Plan(NamedTuple):
    """The blocks of a grouped product, and their cost.

    Attributes:
      sizes: of blocks.
      strip: rows that are multiplied at a time; rows of a block that no group has are left out strip by strip.
      panels: number of panels of a kernel.
      depths: number of blocks of terms of a sum.
      vmem: bytes of fast memory.
      traffic: bytes that are read and written, if every group has rows.
    """

    sizes: Sizes
    strip: int
    panels: int
    depths: int
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
    """Chooses the blocks that move the fewest bytes; bytes moved while nothing is computed count twice.

    Either panels stay in fast memory and rows pass by, once for every panel; or a share of the rows, or of their sums,
    stays and kernels pass by: the base once for every share, an expert once for every share in which it has rows. A
    panel takes fast memory for the base, for codes and for what is made of them, a row only for itself: where kernels
    are too large to be read in few panels, fewer shares of rows suffice. The sums stay where rows are much longer than
    their results, as in a `down` projection.

    Cores have equally many panels each, or equally many shares.

    Args:
      rows: M.
      shape: [i, o] of the kernels.
      dtype: of the rows.
      kernels: that the rows are multiplied with; all of that shape, and for as many groups.
      core: the core that the blocks have to fit.
      transposed: see `grouped_product`.
      adds: the output is the sum itself, so that its terms can be added up one part after another.

    Raises:
      ValueError: if not even the smallest blocks fit.
    """
    chooser = Chooser(rows, shape, jnp.dtype(dtype), kernels, core, transposed)
    best = None
    for plan in (*chooser.plans_with_rows_passing(), *chooser.plans_with_kernels_passing(adds)):
        score = chooser.is_uneven(plan), plan.traffic + chooser.idle_bytes(plan), -plan.sizes.rows
        if best is None or score < best[0]:
            best = score, plan
    if best is None:
        raise ValueError(f"no block of kernels {shape} fits into {core.vmem} bytes of fast memory")
    return best[1]


class Chooser:
    """Finds the plans that fit; arguments as for `plan_blocks`."""

    def __init__(
        self, rows: int, shape: tuple[int, int], dtype: jnp.dtype, kernels: Sequence[Made], core: Core, transposed: bool
    ):
        self.rows, self.dtype, self.kernels, self.core, self.transposed = rows, dtype, kernels, core, transposed
        self.length, self.width = (shape[1], shape[0]) if transposed else shape
        self.step = max(made.tile.step for made in kernels)
        # Panels of rows, or parts of them, must begin with a piece, and with a whole row of the stored arrays.
        self.unit, self.deep = (self.step, LANES) if transposed else (LANES, self.step)
        self.most_rows = round_up(rows, 32 // dtype.itemsize)

    def plans_with_rows_passing(self) -> Iterator[Plan]:
        """Yields plans in which all rows pass by every panel."""
        cores = self.core.cores
        for longest, bases in itertools.product(ROW_BLOCKS, (2, 1)):
            block = min(longest, self.most_rows)
            shares = {1, cores if -(-self.rows // block) % cores == 0 else 1}
            for share, panels in itertools.product(sorted(shares), range(1, -(-self.width // self.unit) + 1)):
                width = self.width if panels == 1 else round_up(-(-self.width // panels), self.unit)
                split = cores if share == 1 and -(-self.width // width) % cores == 0 else 1
                plan = self.plan(Sizes(Stays.PANEL, block, share, split, width, self.length, bases))
                if plan is not None:
                    yield plan

    def plans_with_kernels_passing(self, adds: bool) -> Iterator[Plan]:
        """Yields plans in which kernels pass by, with as few shares of the rows as fit."""
        strip = min(self.core.rows, self.most_rows)
        sides = [side for side in SIDES if side % self.unit == 0 and side < self.width]
        blocks = [(Stays.ROWS, side, self.length) for side in sides]
        if adds:
            widths = {self.width // panels for panels in range(1, MOST_SUMMED + 1) if self.width % panels == 0}
            widths = sorted((w for w in widths if w == self.width or w % self.unit == 0), reverse=True)
            depths = [side for side in SIDES if side % self.deep == 0 and self.length % side == 0]
            blocks += [(Stays.SUMS, width, depth) for width in widths for depth in depths if depth < self.length]
        for (stays, width, depth), split in itertools.product(blocks, sorted({1, self.core.cores})):
            # Shorter sides would leave a part of the matrix unit idle.
            if min(width, depth) < self.core.rows or -(-self.width // width) % split:
                continue
            each = self.core.cores // split
            for shares in range(each, -(-self.rows // strip) + 1, each):
                block = round_up(-(-self.rows // shares), strip)
                if -(-self.rows // block) != shares:
                    continue
                plan = self.plan(Sizes(stays, block, shares, split, width, depth))
                if plan is not None:
                    yield plan
                    break

    def plan(self, sizes: Sizes) -> Plan | None:
        """Returns the plan of these sizes, with its memory and traffic; None: the blocks do not fit."""
        strip, wide = min(sizes.rows, self.core.rows), jnp.dtype(jnp.float32)
        if sizes.rows % strip:
            return None
        panels, depths = -(-self.width // sizes.width), -(-self.length // sizes.depth)
        of_base, of_expert, made = self.blocks_of_kernels(sizes)
        in_rows, out = (block_bytes((sizes.rows, side), self.dtype) for side in (sizes.depth, sizes.width))
        vmem = sizes.bases * of_base + 2 * of_expert + made + (1 if sizes.stays is Stays.ROWS else 2) * in_rows
        if sizes.stays is Stays.SUMS:
            vmem += block_bytes((sizes.rows, sizes.width), wide) + block_bytes((strip, sizes.width), self.dtype)
        else:
            vmem += 2 * out
        # Float32 pieces: those that are made, and those that are multiplied.
        vmem += (4 + 2 * len(self.kernels)) * 4 * COLUMNS * max(self.step, strip)
        if vmem + RESERVED > self.core.vmem:
            return None
        experts = self.kernels[0].operands[0].array.shape[0]
        # Rows that stay are read by every core that has panels of its own, others once for every panel.
        readings = sizes.split if sizes.stays is Stays.ROWS else panels
        moved = readings * self.rows * self.length + self.rows * self.width
        traffic = moved * self.dtype.itemsize
        traffic += panels * depths * (sizes.shares * of_base + (experts + sizes.shares - 1) * of_expert)
        return Plan(sizes, strip, panels, depths, vmem, traffic)

    def blocks_of_kernels(self, sizes: Sizes) -> tuple[int, int, int]:
        """Returns the bytes of a block of the base, of an expert's stored arrays, and of the panel made from these."""
        panel = (sizes.width, sizes.depth) if self.transposed else (sizes.depth, sizes.width)
        of_base = sum(block_bytes(panel, made.base.dtype) for made in self.kernels if made.base is not None)
        operands = [operand for made in self.kernels for operand in made.operands]
        of_expert = sum(block_bytes(operand.block_of(*panel), operand.array.dtype) for operand in operands)
        return of_base, of_expert, sum(not made.stored for made in self.kernels) * block_bytes(panel, self.dtype)

    def is_uneven(self, plan: Plan) -> bool:
        """Whether one core has more to do than another."""
        return plan.sizes.split == 1 and plan.sizes.shares % self.core.cores > 0

    def idle_bytes(self, plan: Plan) -> int:
        """Returns the number of bytes that are moved while nothing is computed."""
        sizes, itemsize = plan.sizes, self.dtype.itemsize
        if sizes.stays is Stays.ROWS:  # A share arrives.
            return sizes.split * self.rows * self.length * itemsize
        if sizes.stays is Stays.SUMS:  # Those of a share leave.
            return self.rows * self.width * itemsize
        of_base, of_expert, _ = self.blocks_of_kernels(sizes)
        return sizes.shares * (of_base * (1 if sizes.bases == 2 else plan.panels) + of_expert)
