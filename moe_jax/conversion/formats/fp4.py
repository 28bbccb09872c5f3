"""Matrices in floating-point numbers of four bits (E2M1), two to a byte, the first in its low half.

The numbers are those of the MX formats of the Open Compute Project, https://www.opencompute.org/documents.
NVFP4 has scales in e4m3, of 16 numbers each, and one for the whole matrix; MXFP4 has powers of two, of 32 numbers.
"""

import dataclasses

import numpy as np

from moe_jax.conversion.formats.fp8 import EXPONENTS, as_float32, powers_of_two
from moe_jax.conversion.formats.quantized_format import CodedMatrix, finite_scales, grid_shape, scale_blocks
from moe_jax.conversion.tensors import CodesOfGroups, GroupedRows, Groups, ReadRows, TensorEntry
from moe_jax.core.errors import InputError, shown

NVFP4_GROUP, MXFP4_GROUP = 16, 32
"""Numbers that share a scale."""

FP4_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""The numbers that are not negative, by code; a negative one has the fourth bit, too."""

_NUMBERS = np.concatenate([FP4_LEVELS, -FP4_LEVELS])
# The two numbers of every byte: one look-up for both.
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=-1)


def fp4_numbers(stored: np.ndarray) -> np.ndarray:
    """Returns the numbers of bytes, UInt8[..., n], as Float32[..., 2 n], new."""
    return _PAIRS[stored].reshape(*stored.shape[:-1], -1)


def fp4_codes(stored: np.ndarray) -> np.ndarray:
    """Returns the codes of bytes, UInt8[n, m], as UInt8[n, 2 m]."""
    return np.stack([stored & 15, stored >> 4], axis=-1).reshape(len(stored), -1)


def fp4_groups(size: int) -> Groups:
    """Returns the description of codes of which so many share a scale."""
    return Groups(4, size, tuple(map(float, _NUMBERS)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP4Rows(GroupedRows):
    """A matrix [out, in] of numbers of four bits, with a scale for every group in a row.

    Attributes:
      name: of the tensor with the scales.
      numbers: UInt8[out, in / 2].
      scales: [out, in / group] in e4m3, or exponents.
      group: numbers that share a scale.
      whole: one more scale, of the whole matrix; None: there is none.
      divides: whether scales are divided by `whole`, and not multiplied.
    """

    name: str
    numbers: TensorEntry
    scales: TensorEntry
    group: int
    whole: TensorEntry | None = None
    divides: bool = False

    def decoded(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        values = fp4_numbers(read(self.numbers, start, stop))
        scale_blocks(values, self._scales(read, start, stop), self.group)
        return values

    @property
    def groups(self) -> Groups:
        return fp4_groups(self.group)

    def codes_of_groups(self, read: ReadRows, start: int, stop: int) -> CodesOfGroups:
        return CodesOfGroups(fp4_codes(read(self.numbers, start, stop)), self._scales(read, start, stop))

    def _scales(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        scales = read(self.scales, start, stop)
        scales = powers_of_two(scales) if self.scales.dtype in EXPONENTS else as_float32(scales)
        if self.whole is not None:
            with np.errstate(all="ignore"):  # those that are not finite are found below
                whole = as_float32(read(self.whole, 0, 1))
                scales = scales / whole if self.divides else scales * whole
        return finite_scales(scales, self.name)


def nvfp4_matrix(matrix: CodedMatrix, numbers: str, whole: str, *, divides: bool) -> CodedMatrix:
    """Returns a matrix in NVFP4, whose bytes and whose scale for all of it have these names.

    Raises:
      InputError: if a tensor is missing, or does not fit.
    """
    stored, shape = _stored(matrix, numbers)
    name = f"{matrix.name}_scale"
    return matrix.made(
        shape,
        FP4Rows(
            name=name,
            numbers=stored,
            scales=matrix.take(name, "F8_E4M3", shape=[grid_shape(shape, (1, NVFP4_GROUP))]),
            group=NVFP4_GROUP,
            whole=matrix.take(whole, "F32", shape=[(), (1,)]),
            divides=divides,
        ),
        "nvfp4",
    )


def mxfp4_matrix(matrix: CodedMatrix, numbers: str) -> CodedMatrix:
    """Returns a matrix in MXFP4, whose bytes have this name.

    Raises:
      InputError: if a tensor is missing, or does not fit.
    """
    stored, shape = _stored(matrix, numbers)
    name = f"{matrix.name}_scale"
    scales = matrix.take(name, *EXPONENTS, shape=[grid_shape(shape, (1, MXFP4_GROUP))])
    return matrix.made(shape, FP4Rows(name=name, numbers=stored, scales=scales, group=MXFP4_GROUP), "mxfp4")


def _stored(matrix: CodedMatrix, name: str) -> tuple[TensorEntry, tuple[int, int]]:
    """The bytes of a matrix [out, in], and its shape."""
    stored = matrix.take(name, "U8")
    if len(stored.shape) != 2:
        raise InputError(f"{name} has shape {shown(list(stored.shape))}, expected that of a matrix, [out, in / 2]")
    return stored, (stored.shape[0], 2 * stored.shape[1])
