"""Matrices in floating-point numbers of eight bits with a scale per block, per row, or for all.

- `fp8`, as DeepSeek-V3, MiniMax-M2 and Qwen publish it and Transformers writes it (`FineGrainedFP8Config`): `weight`
  [out, in] in e4m3 and `weight_scale_inv` [out / rows, in / columns], by which it is multiplied, in spite of its name.
  Experts that are fused have another axis in front. Without `weight_block_size` there is one scale.
- `fbgemm_fp8`, as Llama 3.1 405B was published: `weight_scale` [out, 1].
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from moe_jax.conversion.formats.quantized_format import (
    CodedMatrix,
    QuantizationKeys,
    QuantizedFormat,
    finite_scales,
    grid_shape,
    scale_blocks,
)
from moe_jax.conversion.tensors import CodedRows, ReadRows, TensorEntry
from moe_jax.core.errors import InputError, shown

FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
EXPONENTS = ("U8", "F8_E8M0")
"""Dtypes of scales that are powers of two: exponents from 127 on."""

_SCALES = ("F32", "BF16", "F16", *EXPONENTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8Rows(CodedRows):
    """Matrices [..., out, in] of numbers, each multiplied by the scale of its block.

    Attributes:
      name: of the tensor with the scales.
      numbers: the numbers in FP8.
      scales: [..., out / rows, in / columns] of blocks, or one scale for all; those of `EXPONENTS` are powers of
        two.
      block: rows and columns that share a scale.
    """

    name: str
    numbers: TensorEntry
    scales: TensorEntry
    block: tuple[int, int]

    def decoded(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        values = as_float32(read(self.numbers, start, stop))
        if math.prod(self.scales.shape) == 1:
            values *= finite_scales(read(self.scales, 0, 1), self.name)
            return values
        # Blocks begin anew in every matrix of a stack.
        matrix, row = np.divmod(np.arange(start, stop), self.numbers.shape[-2])
        places = matrix * self.scales.shape[-2] + row // self.block[0]
        first, last = int(places[0]), int(places[-1])
        scales = read(self.scales, first, last + 1)
        scales = powers_of_two(scales) if self.scales.dtype in EXPONENTS else as_float32(scales)
        scale_blocks(values, finite_scales(scales, self.name)[places - first], self.block[1])
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8(QuantizedFormat):
    """Attributes:
    block: rows and columns that share a scale; None: a row has one, or all have.
    """

    methods = ("fp8", "fbgemm_fp8")
    block: tuple[int, int] | None

    @classmethod
    def read(cls, keys: QuantizationKeys) -> "FP8":
        return cls(block=keys.block_size("weight_block_size"))

    def matrices(self, tensors: Mapping[str, TensorEntry]) -> Iterator[CodedMatrix]:
        for name, entry in tensors.items():
            if entry.dtype in FP8_DTYPES:
                yield fp8_matrix(CodedMatrix(name, tensors), self.block)


def fp8_matrix(matrix: CodedMatrix, block: tuple[int, int] | None) -> CodedMatrix:
    """Returns the matrix, or the stack of them, whose numbers have its name.

    Its scales are those of a `block`; None: of a row, or one for all.

    Raises:
      InputError: if the scales are missing, or do not fit.
    """
    name = matrix.name
    numbers = matrix.take(name, *FP8_DTYPES)
    shape = numbers.shape
    if len(shape) < 2:
        raise InputError(f"{name} has shape {shown(list(shape))}, expected a matrix in {numbers.dtype}")
    block = block or (1, shape[-1])
    grid = grid_shape(shape, block)
    scales_name = f"{name}_scale_inv" if matrix.has(f"{name}_scale_inv") else f"{name}_scale"
    scales = matrix.take(scales_name, *_SCALES, shape=[grid] if block[0] > 1 else [grid, (), (1,), (1, 1)])
    return matrix.made(shape, FP8Rows(name=scales_name, numbers=numbers, scales=scales, block=block), "fp8")


@functools.cache
def _pairs(dtype: np.dtype) -> np.ndarray:
    """The float32 numbers, two in an element, that two numbers of a byte stand for."""
    return np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32).view(np.uint64)


def as_float32(values: np.ndarray) -> np.ndarray:
    """Returns numbers of any dtype as float32, new; those of a byte from a table, several times as fast as a cast."""
    if values.itemsize > 1 or values.size % 2 or not values.flags.c_contiguous:
        return values.astype(np.float32, order="C")
    # Without the check of bounds that no two bytes can leave.
    found = np.take(_pairs(values.dtype), values.reshape(-1).view(np.uint16), mode="wrap")
    return found.view(np.float32).reshape(values.shape)


def powers_of_two(exponents: np.ndarray) -> np.ndarray:
    """Returns the numbers that exponents, of any dtype of a byte, stand for, as float32; 255 is NaN."""
    return as_float32(exponents.view(ml_dtypes.float8_e8m0fnu))
