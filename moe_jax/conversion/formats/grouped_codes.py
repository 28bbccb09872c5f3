"""Matrices of integers in words of 32 bits, whose groups of inputs share a scale and a zero point; GPTQ and AWQ."""

import abc
import dataclasses

import numpy as np

from moe_jax.conversion.formats.quantized_format import CodedMatrix, finite_scales, scale_blocks, shift_blocks
from moe_jax.conversion.tensors import CodesOfGroups, GroupedRows, Groups, ReadRows, TensorEntry
from moe_jax.core.errors import InputError

CODES, ZEROS, SCALES, ORDER = "qweight", "qzeros", "scales", "g_idx"
"""Names of tensors of a module."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedCodes(GroupedRows):
    """A matrix [out, in]: entry = (code - zero point) * scale.

    Attributes:
      module: the name to which those of its tensors are added.
      bits: of a code.
      inputs: number of them.
      group: inputs that share a scale and a zero point.
      codes: words of codes.
      zeros: words of zero points.
      scales: of all groups.
      order: Int32[in], the group of every input; None: they are in order.
      is_ordered: whether the groups are meant to be in order, whether or not `order` says so again.
    """

    module: str
    bits: int
    inputs: int
    group: int
    codes: TensorEntry
    zeros: TensorEntry
    scales: TensorEntry
    order: TensorEntry | None = None
    is_ordered: bool = True

    @abc.abstractmethod
    def codes_of(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        """Returns the codes of some rows, less 2^(bits-1), as Int8[n, in]."""

    @abc.abstractmethod
    def zeros_of(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        """Returns the zero points of some rows, less 2^(bits-1), as Int8[n, groups]."""

    @abc.abstractmethod
    def scales_of(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        """Returns the scales of some rows, [n, groups], as they are stored."""

    def decoded(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        zeros = self.zeros_of(read, start, stop).astype(np.float32)
        scales = self._finite_scales(read, start, stop)
        mixed = self._mixed_groups(read, scales.shape[1])
        values = self.codes_of(read, start, stop).astype(np.float32, order="C")  # blocks of its rows are views
        if mixed is None:
            shift_blocks(values, zeros, self.group)
            scale_blocks(values, scales, self.group)
            return values
        with np.errstate(all="ignore"):  # products that are not finite are found where the leaf is written
            values -= zeros[:, mixed]
            values *= scales[:, mixed]
        return values

    @property
    def groups(self) -> Groups | None:
        return Groups(self.bits, self.group) if self.is_ordered else None

    def codes_of_groups(self, read: ReadRows, start: int, stop: int) -> CodesOfGroups:
        scales = self._finite_scales(read, start, stop)
        if self._mixed_groups(read, scales.shape[1]) is not None:
            raise InputError(
                f"{self.module}.{ORDER} has groups that are out of order, although config.json says 'desc_act' false; "
                "convert without --codes keep"
            )
        middle = np.uint8(1 << (self.bits - 1))
        codes, zeros = self.codes_of(read, start, stop), self.zeros_of(read, start, stop)
        return CodesOfGroups(codes.view(np.uint8) + middle, scales, zeros.view(np.uint8) + middle)

    def _finite_scales(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        return finite_scales(self.scales_of(read, start, stop), f"{self.module}.{SCALES}")

    def _mixed_groups(self, read: ReadRows, count: int) -> np.ndarray | None:
        """The group of every input, of so many groups; None: they are in order."""
        if self.order is None:
            return None
        groups = read(self.order, 0, 1)[0]
        if groups.size and (groups.min() < 0 or groups.max() >= count):
            raise InputError(
                f"{self.module}.{ORDER} names groups from {groups.min()} to {groups.max()}, expected 0 to {count - 1}; "
                "fetch the checkpoint again"
            )
        return None if np.array_equal(groups, np.arange(self.inputs) // self.group) else groups


def module_of(name: str, matrix: CodedMatrix) -> str:
    """Returns the module whose codes have a name; raises `InputError` if its matrix is there without codes, too."""
    if matrix.has(matrix.name):
        raise InputError(f"{matrix.name} is stored beside {name}, expected one of the two; fetch the checkpoint again")
    return name.removesuffix(f".{CODES}")
