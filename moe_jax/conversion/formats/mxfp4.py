"""Experts in MXFP4 as gpt-oss is published with them (`mxfp4` in Transformers).

The kernels of all experts of a layer, NAME [experts, in, out], are stored as `NAME_blocks` UInt8[experts, out, groups,
16], whose bytes have two numbers each, and `NAME_scales` UInt8[experts, out, groups], which are exponents of two. So
what is stored is transposed, and 32 consecutive inputs share a scale.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from moe_jax.conversion.formats.fp4 import MXFP4_GROUP, fp4_codes, fp4_groups, fp4_numbers
from moe_jax.conversion.formats.fp8 import EXPONENTS, powers_of_two
from moe_jax.conversion.formats.quantized_format import (
    CodedMatrix,
    QuantizationKeys,
    QuantizedFormat,
    finite_scales,
    scale_blocks,
)
from moe_jax.conversion.tensors import CodesOfGroups, GroupedRows, Groups, ReadRows, TensorEntry
from moe_jax.core.errors import InputError, shown

_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransposedFP4Rows(GroupedRows):
    """Kernels [experts, in, out] whose transposed numbers are stored.

    Attributes:
      name: of the tensor with the scales.
      blocks: UInt8[experts, out, in / 32, 16].
      scales: exponents [experts, out, in / 32].
    """

    name: str
    blocks: TensorEntry
    scales: TensorEntry
    is_transposed = True

    def decoded(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        _, columns, groups, _ = self.blocks.shape
        inputs = groups * MXFP4_GROUP
        values = np.empty((stop - start, columns), np.float32)
        for expert in range(start // inputs, (stop - 1) // inputs + 1):
            before = expert * inputs
            first, last = max(start - before, 0), min(stop - before, inputs)
            # All of an expert is read, but only the groups that are needed are decoded.
            needed = slice(first // MXFP4_GROUP, (last - 1) // MXFP4_GROUP + 1)
            blocks = read(self.blocks, expert * columns * groups, (expert + 1) * columns * groups)
            scales = powers_of_two(read(self.scales, expert * columns, (expert + 1) * columns)[:, needed])
            numbers = fp4_numbers(blocks.reshape(columns, groups, -1)[:, needed].reshape(columns, -1))
            scale_blocks(numbers, finite_scales(scales, self.name), MXFP4_GROUP)
            skipped = first - needed.start * MXFP4_GROUP
            values[before + first - start : before + last - start] = numbers.T[skipped : skipped + last - first]
        return values

    @property
    def groups(self) -> Groups:
        return fp4_groups(MXFP4_GROUP)

    def codes_of_groups(self, read: ReadRows, start: int, stop: int) -> CodesOfGroups:
        groups = self.blocks.shape[2]
        stored = read(self.blocks, start * groups, stop * groups).reshape(stop - start, -1)
        scales = powers_of_two(read(self.scales, start, stop))
        return CodesOfGroups(fp4_codes(stored), finite_scales(scales, self.name))


@dataclasses.dataclass(frozen=True)
class MXFP4(QuantizedFormat):
    """The format has no settings: what is not in codes is said by the tensors."""

    methods = ("mxfp4",)

    @classmethod
    def read(cls, keys: QuantizationKeys) -> "MXFP4":
        return cls()

    def matrices(self, tensors: Mapping[str, TensorEntry]) -> Iterator[CodedMatrix]:
        for name in tensors:
            if name.endswith((_BLOCKS, _SCALES)):
                matrix = CodedMatrix(name.removesuffix(_BLOCKS).removesuffix(_SCALES), tensors)
                if name.endswith(_BLOCKS) or not matrix.has(matrix.name + _BLOCKS):
                    yield _experts(matrix)


def _experts(matrix: CodedMatrix) -> CodedMatrix:
    name = matrix.name + _BLOCKS
    blocks = matrix.take(name, "U8")
    shape = blocks.shape
    if len(shape) != 4 or 2 * shape[3] != MXFP4_GROUP:
        raise InputError(f"{name} has shape {shown(list(shape))}, expected [experts, out, in / 32, 16]")
    experts, columns, groups, _ = shape
    scales = matrix.take(matrix.name + _SCALES, *EXPONENTS, shape=[shape[:3]])
    rows = TransposedFP4Rows(name=matrix.name + _SCALES, blocks=blocks, scales=scales)
    return matrix.made((experts, groups * MXFP4_GROUP, columns), rows, "mxfp4")
