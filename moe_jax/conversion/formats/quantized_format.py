"""The interface of a format of quantised checkpoints, and helpers that all of them share.

Such a checkpoint stores a matrix as several tensors, such as codes and scales. A format finds those of every matrix,
checks that they fit together, and puts one tensor in their place, which is decoded where it is read. All that follows,
from the mapping of names to the streaming of rows, is as with a plain checkpoint.
"""

import abc
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from moe_jax.conversion.table import Ignored
from moe_jax.conversion.tensors import CodedRows, StoredRows, TensorEntry
from moe_jax.core.errors import InputError, shown

# Of activations and of the cache of keys and values, which are computed whole here.
_OF_ACTIVATIONS = re.compile(
    r".*\.(input_scale|input_global_scale|input_zero_point|activation_scale|input_amax|output_scale|"
    r"[kqv]_scale|[kv]_zero_point|kv_scale)"
)


_MAX_PATTERN, _MAX_REPEATS = 1000, 4


class QuantizedFormat(abc.ABC):
    """A format of quantised checkpoints, with the settings that config.json has for one.

    Attributes:
      methods: values of `quant_method` that name it.
    """

    methods: ClassVar[tuple[str, ...]]

    @classmethod
    @abc.abstractmethod
    def read(cls, keys: "QuantizationKeys") -> Self:
        """Returns the format with the settings of a `quantization_config`.

        Raises:
          InputError: if one is missing, or is none that this library reads.
        """

    @abc.abstractmethod
    def matrices(self, tensors: Mapping[str, TensorEntry]) -> Iterator["CodedMatrix"]:
        """Finds the matrices in codes, and checks that their tensors fit together.

        Raises:
          InputError: if a tensor is missing, or has a shape or a dtype that does not fit.
        """

    def ignored(self, tensors: Mapping[str, TensorEntry]) -> Iterable[Ignored]:
        """Finds tensors, not yet folded, that a checkpoint may have although its model does not; by default none."""
        return ()

    def folded(self, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Returns tensors in which one stands in place of all those of a matrix in codes.

        Scales of activations are left out. Raises `InputError` as `matrices` does.
        """
        weights = {name: entry for name, entry in tensors.items() if not _OF_ACTIVATIONS.fullmatch(name)}
        made: dict[str, TensorEntry] = {}
        used: set[str] = set()
        for matrix in self.matrices(weights):
            used |= matrix.uses
            made[matrix.name] = matrix.entry
        return {name: entry for name, entry in weights.items() if name not in used} | made


class CodedMatrix:
    """The tensors of one matrix in codes.

    Attributes:
      name: of the tensor that they stand for.
      uses: the names of all tensors taken.
      entry: what stands in their place, once it is `made`.
    """

    entry: TensorEntry

    def __init__(self, name: str, tensors: Mapping[str, TensorEntry]):
        self.name, self.uses = name, set[str]()
        self._tensors = tensors

    def take(self, name: str, *dtypes: str, shape: Collection[tuple[int, ...]] = ()) -> TensorEntry:
        """Returns one of its tensors, which has one of these dtypes and, if any are given, one of these shapes.

        Raises:
          InputError: if it does not, or is missing.
        """
        entry = self._tensors.get(name)
        if entry is None:
            raise InputError(f"{name} is missing, without which {self.name} cannot be decoded; fetch it")
        self.uses.add(name)
        if entry.dtype not in dtypes:
            raise InputError(f"{name} has dtype {entry.dtype}, expected {' or '.join(dtypes)}")
        if entry.strides is not None:
            raise InputError(f"{name} has strides {shown(list(entry.strides))}, expected rows; save it contiguous")
        if shape and entry.shape not in shape:
            expected = " or ".join(shown(list(one)) for one in shape)
            raise InputError(f"{name} has shape {shown(list(entry.shape))}, expected {expected}")
        return entry

    def has(self, name: str) -> bool:
        """Whether there is a tensor of a name."""
        return name in self._tensors

    def find(self, name: str, *dtypes: str, shape: Collection[tuple[int, ...]] = ()) -> TensorEntry | None:
        """Returns one of its tensors as `take` does; None if it is missing."""
        return self.take(name, *dtypes, shape=shape) if name in self._tensors else None

    def made(self, shape: tuple[int, ...], codes: CodedRows, kind: str) -> Self:
        """Completes the matrix: it has a `shape`, is decoded by `codes`, and `kind` is a word for them, such as fp8."""
        first = self._tensors[min(self.uses)]
        parts = tuple(self._tensors[name] for name in sorted(self.uses))
        stored = sum(part.nbytes for part in parts)
        self.entry = TensorEntry(first.file, "F32", shape, 0, first.identity, coded=StoredRows(codes, stored, kind))
        return self


class QuantizationKeys:
    """The keys of a `quantization_config`, each read with its type."""

    def __init__(self, data: Mapping[str, Any], where: str = "config.json: quantization_config"):
        self.data, self.where = data, where

    def choice(self, key: str, choices: Collection[Any], default: Any = None) -> Any:
        """Returns a value that is one of some; raises `InputError` if it is another."""
        value = self.data.get(key, default)
        if value not in choices or type(value) not in {type(one) for one in choices}:
            expected = ", ".join(map(repr, choices))
            raise InputError(f"{self.where}: {key!r} is {shown(value)}, expected one of {expected}")
        return value

    def group_size(self, key: str = "group_size", default: Any = None) -> int | None:
        """Returns the number of entries that share a scale; None for -1 or null: a whole row."""
        value = self.data.get(key, default)
        if value is None or value == -1:
            return None
        if type(value) is not int or not 1 <= value <= 1 << 20:
            raise InputError(f"{self.where}: {key!r} is {shown(value)}, expected a size of groups")
        return value

    def block_size(self, key: str) -> tuple[int, int] | None:
        """Returns the rows and columns that share a scale; None if the key is null or absent."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
            raise InputError(f"{self.where}: {key!r} is {shown(value)}, expected two sizes of a block")
        return (value[0], value[1])

    def inside(self, key: str) -> "QuantizationKeys":
        """Returns the keys of an object under a key; raises `InputError` if it is none."""
        value = self.data.get(key)
        if not isinstance(value, Mapping):
            raise InputError(f"{self.where}: {key!r} is {shown(value)}, expected an object")
        return QuantizationKeys(value, f"{self.where}: {key}")


def name_pattern(text: str, where: str) -> re.Pattern[str]:
    """Compiles a regular expression for names of modules, from a file.

    Raises:
      InputError: if it is none, or one that may take very long: repeats in repeats, or many of them.
    """
    try:
        if len(text) <= _MAX_PATTERN and not _may_take_long(text):
            return re.compile(text)
    except (re.error, OverflowError, RecursionError):
        pass
    raise InputError(f"{where}: {shown(text)} is no regular expression of names, or one that repeats repeats")


def _may_take_long(pattern: str) -> bool:
    """Whether a regular expression has a repeat inside a repeated group, or more than a few repeats."""
    plain = re.sub(r"\\.|\[[^]]*\]", "x", pattern)  # escapes and sets are one character each
    repeats_inside, total = [0], 0  # of every group that is open
    for place, character in enumerate(plain):
        is_repeated = plain[place + 1 : place + 2] in ("*", "+", "{")
        if character == "(":
            repeats_inside.append(0)
        elif character == ")" and len(repeats_inside) > 1:
            inside = repeats_inside.pop()
            if is_repeated and inside:
                return True
            repeats_inside[-1] += inside
        if is_repeated:
            repeats_inside[-1] += 1
            total += 1
    return total > _MAX_REPEATS


def grid_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Returns the shape of the scales of matrices [..., out, in] whose blocks share one; the last may be cut off."""
    *stack, rows, columns = shape
    return (*stack, math.ceil(rows / block[0]), math.ceil(columns / block[1]))


def finite_scales(scales: np.ndarray, name: str) -> np.ndarray:
    """Returns scales as float32; raises `InputError` unless all are finite."""
    scales = scales.astype(np.float32)
    if not np.isfinite(scales).all():
        raise InputError(f"{name} holds scales that are not finite; fetch the checkpoint again")
    return scales


def scale_blocks(values: np.ndarray, scales: np.ndarray, width: int) -> None:
    """Multiplies values [n, in], in place, by scales [n, groups]; `width` consecutive columns share one."""
    _by_blocks(np.multiply, values, scales, width)


def shift_blocks(values: np.ndarray, zeros: np.ndarray, width: int) -> None:
    """Subtracts zero points [n, groups] from values [n, in], in place; `width` consecutive columns share one."""
    _by_blocks(np.subtract, values, zeros, width)


def _by_blocks(operation: np.ufunc, values: np.ndarray, others: np.ndarray, width: int) -> None:
    n, columns = values.shape
    whole = columns // width * width
    blocks = values[:, :whole].reshape(n, -1, width)
    with np.errstate(all="ignore"):  # numbers that are not finite are found where the leaf is written
        operation(blocks, others[:, : whole // width, None], out=blocks)
        if whole < columns:
            operation(values[:, whole:], others[:, whole // width, None], out=values[:, whole:])
