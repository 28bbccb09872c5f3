"""Formats of numbers in which compressed-tensors stores a matrix [out, in], and the tensors of each.

- whole numbers, `pack-quantized`: `weight_packed` int32, the codes of a row one after another from the lowest bits on;
  `weight_scale` [out, in / group_size], or [out, 1]; and `weight_shape`. Entry = (code - 2^(bits-1)) * scale; with
  `weight_zero_point`, int32, packed along the outputs, it is the code that stands for zero.
- FP8, `float-quantized`: `weight` in e4m3, and `weight_scale` of a row or of a block.
- NVFP4, `nvfp4-pack-quantized`: `weight_packed` uint8, two e2m1 numbers in a byte, the first in the low bits;
  `weight_scale` in e4m3 for 16 numbers; and `weight_global_scale`, by which they are divided.
- MXFP4, `mxfp4-pack-quantized`: the same, with `weight_scale` uint8 for 32 numbers, exponents of two from 127 on.

Source: the package compressed-tensors. Numbers are rounded to the nearest; whole ones with scales of the least error.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moe_jax.conversion.formats.fp4 import FP4_LEVELS, MXFP4_GROUP, NVFP4_GROUP
from moe_jax.conversion.formats.integer_rows import unpacked
from moe_jax.conversion.safetensors_file import PlannedTensor
from moe_jax.conversion.tensors import DTYPE_NAMES
from moe_jax.core.errors import InputError
from moe_jax.functional.codes import pack

GROUP_SIZES = (128, 64, 32)
"""Inputs to a scale that vLLM has kernels for; the first that fits is taken."""
_FP8_MOST, _FP4_MOST = 448.0, 6.0


class Codes(NamedTuple):
    """A kernel [i, o] in whole numbers: codes [i * bits / 8, o], packed along i, and scales [groups, o].

    Without `zeros`, codes are on the even grid, and scales are never above 0. `zeros` UInt8[groups, o] are the codes
    that stand for zero. Scales are half a step, as in `functional.codes`.
    """

    packed: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None


class Quantise(Protocol):
    """Rounds kernels to whole numbers."""

    def __call__(
        self,
        kernel: np.ndarray,
        bits: int,
        group_size: int,
        *,
        moment: np.ndarray | None = None,
        zero_points: bool = False,
    ) -> Codes:
        """Returns the codes of a kernel float32[i, o], with `zero_points` or without.

        Given the second moment float32[i, i] of its inputs, outputs change least; without it, the kernel does.
        """
        ...


class Encoded(NamedTuple):
    """The tensors of a matrix, by their endings, and what they stand for, Float32[out, in]."""

    tensors: dict[str, np.ndarray]
    decoded: np.ndarray


class Encoder(abc.ABC):
    """A format of numbers.

    Attributes:
      format: its name in compressed-tensors.
      word: for messages and tables.
      activations: how activations are rounded where that belongs to it, as a group in config.json says; None: never.
    """

    format: ClassVar[str]
    activations: ClassVar[dict[str, Any] | None] = None

    @property
    @abc.abstractmethod
    def word(self) -> str: ...

    @property
    @abc.abstractmethod
    def weights(self) -> dict[str, Any]:
        """The description of weights in a group of config.json."""

    def name_of(self, tensor: str, ending: str) -> str:
        """Returns the name of one of the tensors in place of a `tensor`, the weight of a module."""
        return f"{tensor}{ending}"

    @abc.abstractmethod
    def planned(self, shape: tuple[int, int], scales: np.dtype) -> dict[str, PlannedTensor]:
        """Returns the tensors of a matrix [out, in], by their endings; `scales` is the dtype of those of whole numbers.

        Raises:
          InputError: if the format has no such matrix.
        """

    def doubt(self, shape: tuple[int, int]) -> str | None:
        """Returns who cannot read a matrix [out, in] in this format, and why; None: all who know the format can."""
        return None

    @abc.abstractmethod
    def encoded(self, matrix: np.ndarray, scales: np.dtype, moment: np.ndarray | None = None) -> Encoded:
        """Rounds a matrix, Float32[out, in], of finite numbers.

        Only whole numbers are chosen by the second moment of its inputs, Float32[in, in]; None: it is not known.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeNumbers(Encoder):
    """Attributes:
    bits: of a code.
    group_size: number of inputs that share a scale; None: all of an output.
    symmetric: whether no group has a zero point.
    quantise: rounds a kernel.
    """

    format = "pack-quantized"
    bits: int
    group_size: int | None
    symmetric: bool = True
    quantise: Quantise = dataclasses.field(compare=False)

    @property
    def word(self) -> str:
        size = "all" if self.group_size is None else self.group_size
        return f"{self.bits} bits, {size} inputs to a scale{'' if self.symmetric else ' and zero point'}"

    @property
    def weights(self) -> dict[str, Any]:
        by = (
            {"strategy": "channel"} if self.group_size is None else {"strategy": "group", "group_size": self.group_size}
        )
        return {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, **by, "dynamic": False}

    def planned(self, shape: tuple[int, int], scales: np.dtype) -> dict[str, PlannedTensor]:
        (rows, columns), groups = shape, 1
        if self.group_size is not None:
            if columns % self.group_size:
                raise InputError(f"{self.group_size} inputs to a scale do not divide {columns}")
            groups = columns // self.group_size
        zeros = {"_zero_point": PlannedTensor("I32", (math.ceil(rows * self.bits / 32), groups))}
        return {
            "_packed": PlannedTensor("I32", (rows, math.ceil(columns * self.bits / 32))),
            "_scale": PlannedTensor(DTYPE_NAMES[scales], (rows, groups)),
            "_shape": PlannedTensor("I64", (2,)),
            **({} if self.symmetric else zeros),
        }

    def encoded(self, matrix: np.ndarray, scales: np.dtype, moment: np.ndarray | None = None) -> Encoded:
        size = self.group_size or _multiple(matrix.shape[1])
        kernel = np.ascontiguousarray(matrix.T)
        codes = self.quantise(kernel, self.bits, size, moment=moment, zero_points=not self.symmetric)
        tensors = self.tensors(codes, matrix.shape, scales)
        words, steps = self.stored(tensors)
        steps = np.repeat(steps.astype(np.float32), self.group_size or matrix.shape[1], axis=1)
        numbers = unpacked(words, self.bits, matrix.shape[1]).astype(np.float32)
        if codes.zeros is not None:
            zeros = codes.zeros.T.astype(np.float32) - (1 << (self.bits - 1))
            numbers -= np.repeat(zeros, self.group_size or matrix.shape[1], axis=1)
        return Encoded(tensors, numbers * steps)

    def stored(self, tensors: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the codes in words, a row for every output, and scales [out, groups]."""
        return tensors["_packed"], tensors["_scale"]

    def tensors(self, codes: Codes, shape: tuple[int, ...], scales: np.dtype) -> dict[str, np.ndarray]:
        """Returns the tensors of a matrix of this shape, given its codes."""
        made = {
            "_packed": in_words(codes.packed),
            "_scale": np.ascontiguousarray(2 * codes.scales.astype(np.float32).T).astype(scales),
            "_shape": np.asarray(shape, np.int64),
        }
        if not self.symmetric:
            assert codes.zeros is not None
            made["_zero_point"] = in_words(np.asarray(pack(jnp.asarray(codes.zeros.T), self.bits))).T
        return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8(Encoder):
    """FP8, for which activations are rounded too, every token by a scale of its own: vLLM has no experts without that.

    Attributes:
      block: rows and columns that share a scale; None: a row has one.
    """

    format = "float-quantized"
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    block: tuple[int, int] | None = None

    @property
    def word(self) -> str:
        return "FP8, a scale for every output" if self.block is None else "FP8, a scale for {} x {}".format(*self.block)

    @property
    def weights(self) -> dict[str, Any]:
        by: dict[str, Any] = {"strategy": "channel"}
        if self.block is not None:
            by = {"strategy": "block", "block_structure": list(self.block)}
        return {"num_bits": 8, "type": "float", "symmetric": True, **by, "dynamic": False}

    def planned(self, shape: tuple[int, int], scales: np.dtype) -> dict[str, PlannedTensor]:
        rows, columns = self.block or (1, shape[1])
        grid = (math.ceil(shape[0] / rows), math.ceil(shape[1] / columns))
        return {"": PlannedTensor("F8_E4M3", shape), "_scale": PlannedTensor("F32", grid)}

    def encoded(self, matrix: np.ndarray, scales: np.dtype, moment: np.ndarray | None = None) -> Encoded:
        rows, columns = self.block or (1, matrix.shape[1])
        most = _most(matrix, rows, columns)
        steps = np.where(most > 0, most / _FP8_MOST, 1).astype(np.float32)
        spread = np.repeat(np.repeat(steps, rows, axis=0), columns, axis=1)[: matrix.shape[0], : matrix.shape[1]]
        codes = np.clip(matrix / spread, -_FP8_MOST, _FP8_MOST).astype(ml_dtypes.float8_e4m3fn)
        return Encoded({"": codes, "_scale": steps}, codes.astype(np.float32) * spread)


class FP8Blocks(FP8):
    """FP8 in blocks, for which vLLM rounds activations too, in groups of 128."""

    activations = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": True
    }  # fmt: skip

    def doubt(self, shape: tuple[int, int]) -> str | None:
        assert self.block is not None
        if not any(size % side for size, side in zip(shape, self.block, strict=True)):
            return None
        return f"vLLM refuses {list(shape)} in blocks of {list(self.block)}, which do not divide it"


class _FP4(Encoder):
    """e2m1 numbers, two in a byte.

    Attributes:
      group: numbers that share a scale.
      strategy, scale_dtype: as a group in config.json says.
    """

    group: ClassVar[int]
    strategy: ClassVar[str]
    scale_dtype: ClassVar[str]

    @property
    def word(self) -> str:
        return type(self).__name__

    @property
    def weights(self) -> dict[str, Any]:
        return {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": self.strategy,
            "group_size": self.group,
            "dynamic": False,
            "scale_dtype": self.scale_dtype,
        }

    def _packed(self, shape: tuple[int, int]) -> PlannedTensor:
        if shape[1] % self.group:
            raise InputError(f"{self.word} has a scale for {self.group} inputs, which do not divide {shape[1]}")
        return PlannedTensor("U8", (shape[0], shape[1] // 2))

    def _rounded(self, matrix: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns packed codes and what they stand for; `steps` Float32[out, groups]."""
        spread = np.repeat(steps, self.group, axis=1)
        scaled = matrix / spread
        codes = np.searchsorted((FP4_LEVELS[1:] + FP4_LEVELS[:-1]) / 2, np.abs(scaled)).astype(np.uint8)
        decoded = np.copysign(FP4_LEVELS[codes], scaled) * spread
        codes |= np.signbit(scaled).astype(np.uint8) << 3
        return codes[:, ::2] | codes[:, 1::2] << 4, decoded


@dataclasses.dataclass(frozen=True)
class NVFP4(_FP4):
    """e2m1 with a scale in e4m3 for 16 inputs, and one for the matrix.

    Attributes:
      largest: magnitude in the matrices that share this scale; None: in the matrix itself.
    """

    format = "nvfp4-pack-quantized"
    group, strategy, scale_dtype = NVFP4_GROUP, "tensor_group", "torch.float8_e4m3fn"
    largest: float | None = None

    def planned(self, shape: tuple[int, int], scales: np.dtype) -> dict[str, PlannedTensor]:
        steps = PlannedTensor("F8_E4M3", (shape[0], shape[1] // self.group))
        return {"_packed": self._packed(shape), "_scale": steps, "_global_scale": PlannedTensor("F32", (1,))}

    def encoded(self, matrix: np.ndarray, scales: np.dtype, moment: np.ndarray | None = None) -> Encoded:
        most = float(np.abs(matrix).max(initial=0)) if self.largest is None else self.largest
        whole = np.float32(_FP8_MOST * _FP4_MOST / most if most > 0 else 1)
        local = np.clip(_most(matrix, 1, self.group) / _FP4_MOST * whole, 0, _FP8_MOST)
        local = local.astype(ml_dtypes.float8_e4m3fn)
        steps = local.astype(np.float32) / whole
        packed, decoded = self._rounded(matrix, np.where(steps > 0, steps, np.float32(1)))
        decoded = np.where(np.repeat(steps, self.group, axis=1) > 0, decoded, np.float32(0))
        return Encoded({"_packed": packed, "_scale": local, "_global_scale": np.array([whole], np.float32)}, decoded)


@dataclasses.dataclass(frozen=True)
class MXFP4(_FP4):
    """e2m1 with a power of two for 32 inputs."""

    format = "mxfp4-pack-quantized"
    group, strategy, scale_dtype = MXFP4_GROUP, "group", "torch.uint8"

    def planned(self, shape: tuple[int, int], scales: np.dtype) -> dict[str, PlannedTensor]:
        return {"_packed": self._packed(shape), "_scale": PlannedTensor("U8", (shape[0], shape[1] // self.group))}

    def encoded(self, matrix: np.ndarray, scales: np.dtype, moment: np.ndarray | None = None) -> Encoded:
        # The largest number of a group is to be below 6 steps after rounding: 2^2 is the highest power of two in e2m1.
        _, exponents = np.frexp(_most(matrix, 1, self.group) * np.float32(8 / 7))
        exponents = np.clip(exponents - 3, -127, 127)
        packed, decoded = self._rounded(matrix, np.ldexp(np.float32(1), exponents))
        return Encoded({"_packed": packed, "_scale": (exponents + 127).astype(np.uint8)}, decoded)


ENCODERS: dict[str, Callable[[], Encoder]] = {
    "fp8": FP8,
    "fp8-block": lambda: FP8Blocks(block=(128, 128)),
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
}
"""The formats that have no options, by their names on the command line."""


def _multiple(columns: int) -> int:
    """The smallest multiple of 8 that is not below: a group of it is a whole row."""
    return 8 * math.ceil(columns / 8)


def _most(matrix: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Returns the largest magnitude of every block; blocks at the ends may be cut off."""
    n, m = matrix.shape
    padded = np.pad(np.abs(matrix), ((0, -n % rows), (0, -m % columns)))
    return padded.reshape(-(-n // rows), rows, -(-m // columns), columns).max((1, 3))


def in_words(packed: np.ndarray) -> np.ndarray:
    """Returns packed codes UInt8[b, o] as words Int32[o, b / 4], the last filled up with zeros."""
    whole = np.pad(packed, ((0, -len(packed) % 4), (0, 0)))
    return np.ascontiguousarray(whole.T).view("<i4")
