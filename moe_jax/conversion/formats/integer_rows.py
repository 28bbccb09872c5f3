"""Matrices in integers, one to a byte or packed into words of 32 bits, with scales and perhaps zero points."""

import dataclasses
import math

import numpy as np

from moe_jax.conversion.formats.fp8 import as_float32
from moe_jax.conversion.formats.quantized_format import finite_scales, scale_blocks, shift_blocks
from moe_jax.conversion.tensors import CodesOfGroups, GroupedRows, Groups, ReadRows, TensorEntry
from moe_jax.core.errors import InputError

WORD = 32  # bits
_UNSET = -1  # what the groups of columns are before a calibration orders them


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegerRows(GroupedRows):
    """A matrix [out, in]: entry = (code - zero point) * scale.

    Attributes:
      name: of the matrix.
      codes: Int8[out, in], or packed along its rows in Int32[out, in * bits / 32], as 2^(bits-1) more than they are.
      bits: of a code.
      columns: of the matrix.
      block: rows and columns that share a scale.
      scales: [out / rows, in / columns] of blocks, or one scale for all.
      zeros: zero points in int8, in the shape of the scales, or packed along the first axis as codes are; None: all are
        zero.
      order: Int32[in], the group of every column, whose `block` has one row; None: they are in order.
    """

    name: str
    codes: TensorEntry
    bits: int
    columns: int
    block: tuple[int, int]
    scales: TensorEntry
    zeros: TensorEntry | None
    order: TensorEntry | None

    def decoded(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        values = as_float32(self._codes(read, start, stop))
        scales = finite_scales(self._of_rows(read, self.scales, start, stop), f"{self.name}_scale")
        zeros = None if self.zeros is None else self._zeros(read, self.zeros, start, stop)
        groups, width = self._group_of_columns(read, scales.shape[1]), self.block[1]
        if groups is not None:
            scales, zeros, width = scales[:, groups], None if zeros is None else zeros[:, groups], 1
        if zeros is not None:
            shift_blocks(values, zeros, width)
        scale_blocks(values, scales, width)
        return values

    @property
    def groups(self) -> Groups | None:
        return Groups(self.bits, self.block[1]) if self.order is None and self.block[0] == 1 else None

    def codes_of_groups(self, read: ReadRows, start: int, stop: int) -> CodesOfGroups:
        scales = finite_scales(self._of_rows(read, self.scales, start, stop), f"{self.name}_scale")
        shape = (stop - start, math.ceil(self.columns / self.block[1]))
        middle = 1 << (self.bits - 1)
        zeros = np.zeros((1, 1)) if self.zeros is None else self._zeros(read, self.zeros, start, stop)
        codes = self._codes(read, start, stop).view(np.uint8) + np.uint8(middle)
        whole = np.broadcast_to(zeros.astype(np.int32) + middle, shape)
        return CodesOfGroups(codes, np.broadcast_to(scales, shape), whole)

    def _codes(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        """The codes of some rows, less 2^(bits-1), as Int8[n, in]."""
        codes = read(self.codes, start, stop)
        return unpacked(codes, self.bits, self.columns) if self.codes.dtype == "I32" else codes

    def _of_rows(self, read: ReadRows, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        """Returns the values of the blocks of some rows, [rows, groups]; [1, 1] if there is one for all."""
        if len(entry.shape) < 2:
            return read(entry, 0, 1)
        places = np.arange(start, stop) // self.block[0]
        first, last = int(places[0]), int(places[-1])
        return read(entry, first, last + 1)[places - first]

    def _zeros(self, read: ReadRows, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        if entry.dtype != "I32":
            return as_float32(self._of_rows(read, entry, start, stop))
        # 32 codes fill whole words, with which a code begins.
        whole = start // WORD
        words = read(entry, whole * self.bits, math.ceil(stop * self.bits / WORD))
        first = whole * WORD
        codes = unpacked(np.ascontiguousarray(words.T), self.bits, stop - first)
        return as_float32(codes[:, start - first :].T)

    def _group_of_columns(self, read: ReadRows, count: int) -> np.ndarray | None:
        """Returns the group of every column, of so many; None: they are in order."""
        if self.order is None:
            return None
        groups = read(self.order, 0, 1)[0]
        if (groups == _UNSET).all():
            return None
        if groups.min() < 0 or groups.max() >= count:
            raise InputError(
                f"{self.name}_g_idx names groups from {groups.min()} to {groups.max()}, expected 0 to {count - 1}; "
                "fetch the checkpoint again"
            )
        return groups


def unpacked(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns the codes in words Int32[n, m], the first in the lowest bits, less 2^(bits-1), as Int8[n, count].

    A code may begin in one word and end in the next.
    """
    stored = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (stored[..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(len(words), -1)[:, :count]
    else:
        singly = np.unpackbits(stored, axis=-1, count=count * bits, bitorder="little")
        codes = np.packbits(singly.reshape(len(words), count, bits), axis=-1, bitorder="little")[..., 0]
    return (codes - np.uint8(1 << (bits - 1))).view(np.int8)
