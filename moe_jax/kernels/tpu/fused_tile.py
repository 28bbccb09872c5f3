"""How a kernel [i, o] of one expert is made inside a Pallas kernel, from the stored arrays.

A fused tile is a static description: which arrays of an expert are brought into fast memory for a block of the kernel,
and how entries of the kernel are made from them there.
"""

import abc
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

STEP = 256


class Operand(NamedTuple):
    """An array [E, ...] of all experts, and how its axes after the first correspond to those of the kernels [i, o].

    Attributes:
      array: of all experts.
      rows: the axis that follows the rows of the kernel, 0 for the first one after E; None: none does.
      columns: the axis that follows the columns of the kernel, entry by entry; None: none does.
      per_row: entries along the axis `rows` for each row of the kernel: 1/4 where a byte holds the codes of four rows.
    """

    array: Array
    rows: int | None = None
    columns: int | None = None
    per_row: Fraction = Fraction(1)

    def block_of(self, height: int, width: int) -> tuple[int, ...]:
        """Returns the shape of the block that belongs to a block of the kernel."""
        block = list(self.array.shape[1:])
        for axis, size in ((self.rows, int(height * self.per_row)), (self.columns, width)):
            if axis is not None:
                block[axis] = min(block[axis], size)
        return tuple(block)

    def index_of_block(self, down: Any, across: Any) -> tuple[Any, ...]:
        """Returns the index of the block that belongs to the block of the kernel with these indices."""
        index = [0] * (self.array.ndim - 1)
        for axis, block in ((self.rows, down), (self.columns, across)):
            if axis is not None:
                index[axis] = block
        return tuple(index)


class Piece(NamedTuple):
    """A piece of a block of the kernel; offsets may be traced, sizes are static.

    Attributes:
      row, column: of its first entry, within the block.
      shape: of the piece.
    """

    row: Any
    column: Any
    shape: tuple[int, int]


class FusedTile(abc.ABC):
    """Makes pieces of kernels inside a Pallas kernel, and the gradients of their arrays. Static, hashable.

    A form of experts that has one returns it from `KernelForm.fused_tile`, whatever the platform: Pallas, which takes a
    while to import, is imported where it is used.

    Attributes:
      step: pieces begin at multiples of this many rows, a multiple of 128.
      is_whole: its only operand is the kernel itself.
    """

    step = STEP
    is_whole = False

    @abc.abstractmethod
    def operands(self, arrays: Mapping[str, Array], dtype: Any) -> Sequence[Operand]:
        """Returns the arrays that a kernel reads: those that are stored, or small ones computed from them.

        Args:
          arrays: of all experts, by name.
          dtype: in which the kernels are multiplied.
        """

    @abc.abstractmethod
    def make(self, refs: Sequence[Any], piece: Piece) -> Float[Array, "p q"]:
        """Returns a piece of the part that is added to the base, float32; called inside a Pallas kernel.

        Args:
          refs: of the operands' blocks, of one expert.
          piece: its place in the block.
        """

    def gradients(
        self,
        rows: Float[Array, "M i"],
        dout: Float[Array, "M o"],
        arrays: Mapping[str, Array],
        trained: Sequence[str],
        group_sizes: Int[Array, " E"],
        **options: Any,
    ) -> dict[str, Array]:
        """Returns the gradients of the trained arrays, float32, with no gradient of any whole kernel in memory.

        Args:
          rows: sorted by group, as they were multiplied.
          dout: gradient of the product.
          arrays: of all experts, by name.
          trained: names of the arrays whose gradients are wanted.
          group_sizes: rows per group.
          options: `core` and `interpret` of the kernels.
        """
        assert not trained, f"kernels of {type(self).__name__} are frozen: {trained}"
        return {}
