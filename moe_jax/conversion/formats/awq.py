"""AWQ checkpoints, as AutoAWQ writes them (https://pypi.org/project/autoawq), in four bits.

In place of the `weight` [out, in] of a module are, in the version `gemm`:

- `qweight` Int32[in, out / 8]: codes along the outputs. From the lowest bits of a word on, they are those of the
  outputs 0, 2, 4, 6, 1, 3, 5, 7.
- `qzeros` Int32[groups, out / 8]: zero points in the same order.
- `scales` [groups, out].

In the version `gemv` they are not transposed, and their order is plain: `qweight` Int32[out, in / 8], `qzeros`
Int32[out, n] and `scales` [out, 8 * n], where n words have place for the groups, and perhaps for some more.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

from moe_jax.conversion.formats.grouped_codes import CODES, SCALES, ZEROS, GroupedCodes, module_of
from moe_jax.conversion.formats.integer_rows import WORD, unpacked
from moe_jax.conversion.formats.quantized_format import CodedMatrix, QuantizationKeys, QuantizedFormat
from moe_jax.conversion.tensors import DTYPES, ReadRows, TensorEntry
from moe_jax.core.errors import InputError, shown

_BITS = 4
_PER_WORD = WORD // _BITS
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, in the version `gemm`, of the code of each of its outputs."""

_VERSIONS = ("gemm", "gemv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransposedAWQCodes(GroupedCodes):
    """A matrix in the version `gemm`, whose transpose is stored, packed along the outputs."""

    is_by_rows = False

    def codes_of(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        return self._unpacked(read, self.codes, start, stop)

    def zeros_of(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        return self._unpacked(read, self.zeros, start, stop)

    def scales_of(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        return read(self.scales, 0, self.scales.shape[0])[:, start:stop].T

    def _unpacked(self, read: ReadRows, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        first, last = start // _PER_WORD, math.ceil(stop / _PER_WORD)
        words = read(entry, 0, entry.shape[0])[:, first:last]
        stored = unpacked(words, self.bits, words.shape[1] * _PER_WORD)
        codes = stored.reshape(*words.shape, _PER_WORD)[..., _PLACES].reshape(stored.shape)
        return codes[:, start - first * _PER_WORD : stop - first * _PER_WORD].T


@dataclasses.dataclass(frozen=True, kw_only=True)
class AWQCodes(GroupedCodes):
    """A matrix in the version `gemv`, packed along the inputs."""

    def codes_of(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        return unpacked(read(self.codes, start, stop), self.bits, self.inputs)

    def zeros_of(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        return unpacked(read(self.zeros, start, stop), self.bits, self.inputs // self.group)

    def scales_of(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        return read(self.scales, start, stop)[:, : self.inputs // self.group]


@dataclasses.dataclass(frozen=True)
class AWQ(QuantizedFormat):
    """Attributes:
    version: of the order of codes.
    group: inputs that share a scale; None: all of them.
    """

    methods = ("awq",)
    version: str
    group: int | None

    @classmethod
    def read(cls, keys: QuantizationKeys) -> "AWQ":
        keys.choice("bits", (_BITS,), default=_BITS)
        # Zero points are stored with and without it.
        keys.choice("zero_point", (True, False), default=True)
        if keys.data.get("backend") == "llm-awq":
            raise InputError(f"{keys.where}: the 'backend' 'llm-awq' orders codes as none that is read")
        key = next((key for key in ("version", "checkpoint_format", "format") if keys.data.get(key)), "version")
        name = keys.data.get(key, "gemm")
        lower = QuantizationKeys({key: name.lower() if isinstance(name, str) else name}, keys.where)
        return cls(lower.choice(key, _VERSIONS), keys.group_size(default=128))

    def matrices(self, tensors: Mapping[str, TensorEntry]) -> Iterator[CodedMatrix]:
        for name in tensors:
            module, _, part = name.rpartition(".")
            if part == CODES:
                yield self._matrix(name, CodedMatrix(f"{module}.weight", tensors))

    def _matrix(self, name: str, matrix: CodedMatrix) -> CodedMatrix:
        module = module_of(name, matrix)
        codes = matrix.take(name, "I32")
        if len(codes.shape) != 2:
            raise InputError(f"{name} has shape {shown(list(codes.shape))}, expected that of codes of a matrix")
        is_transposed = self.version == "gemm"
        inputs, outputs = codes.shape[0], codes.shape[1] * _PER_WORD
        if not is_transposed:
            inputs, outputs = outputs, inputs
        group = min(self.group or inputs, inputs) or 1
        if inputs % group:
            raise InputError(f"{module} has {inputs} inputs, expected a multiple of the 'group_size' {group}")
        groups = inputs // group
        if is_transposed:
            zeros, scales = (groups, outputs // _PER_WORD), (groups, outputs)
        else:
            words = _words(groups, group)
            zeros, scales = (outputs, words), (outputs, words * _PER_WORD)
        rows = (TransposedAWQCodes if is_transposed else AWQCodes)(
            module=module,
            bits=_BITS,
            inputs=inputs,
            group=group,
            codes=codes,
            zeros=matrix.take(f"{module}.{ZEROS}", "I32", shape=[zeros]),
            scales=matrix.take(f"{module}.{SCALES}", *DTYPES, shape=[scales]),
        )
        return matrix.made((outputs, inputs), rows, f"awq{_BITS}")


def _words(groups: int, group: int) -> int:
    """Returns the number of words with place for zero points in the version `gemv`, whose kernels read more at once."""
    at_once = {64: 2, 32: 4}.get(group, 1)
    return math.ceil(math.ceil(groups / _PER_WORD) / at_once) * at_once
