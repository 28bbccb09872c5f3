"""Checkpoints of `bitsandbytes` (https://pypi.org/project/bitsandbytes), in four bits or eight.

Of four bits, the entries of a matrix `NAME.weight` are numbers of a table with 16 entries, NF4 or FP4. Blocks of
consecutive ones share a scale, whatever rows they are in.

- `NAME.weight`, most often UInt8[n, 1]: the places of two entries in a byte, the first in the higher bits. It may be
  stored as numbers of more bytes, which mean nothing.
- `NAME.weight.quant_map` Float32[16]: the table.
- `NAME.weight.absmax`: the scales; or, if they are nested, UInt8 places in `NAME.weight.nested_quant_map` Float32[256],
  whose numbers have scales `NAME.weight.nested_absmax` and an offset in common.
- `NAME.weight.quant_state.bitsandbytes__nf4`, or `fp4`: UInt8, an object in JSON with the matrix' shape, the sizes of
  blocks, and the offset.

Of eight bits, as in LLM.int8(), `NAME.weight` is Int8[out, in], and the entry is code * `NAME.SCB` / 127, by row.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from moe_jax.conversion.formats.quantized_format import (
    CodedMatrix,
    QuantizationKeys,
    QuantizedFormat,
    finite_scales,
    scale_blocks,
)
from moe_jax.conversion.tensors import DTYPE_BITS, DTYPES, CodedRows, ReadRows, TensorEntry, TensorFiles
from moe_jax.core.errors import MAX_SIZE, InputError, is_finite, shown
from moe_jax.files.json_toml import parse_json

_TYPES = ("nf4", "fp4")
_STORAGE = ("U8", "I8", "F16", "BF16", "F32")
_STATE = ".quant_state.bitsandbytes__"
_MAX_STATE = 4096  # bytes, of an object with some ten keys
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_MAX_RANK = 4
_ROW_MAJOR = 0
_STEP = np.float32(7.874015718698502e-3)  # as it is written in bitsandbytes, for 1 / 127


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nested:
    """How scales are decoded: entry = table[code] * scale of its block + offset.

    Attributes:
      name: of the tensor with the scales.
      table: Float32[256].
      scales: [blocks].
      block: codes that share a scale.
      offset: in float32.
    """

    name: str
    table: TensorEntry
    scales: TensorEntry
    block: int
    offset: float

    def decoded(self, read: ReadRows, codes: np.ndarray, start: int) -> np.ndarray:
        """Returns Float32[n], of codes UInt8[n] of which the first is number `start`."""
        block = (start + np.arange(len(codes))) // self.block
        scales = finite_scales(read(self.scales, 0, 1)[0], self.name)
        with np.errstate(all="ignore"):  # what is not finite is found with the scales that it makes
            return read(self.table, 0, 1)[0].astype(np.float32)[codes] * scales[block] + np.float32(self.offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseRows(CodedRows):
    """A matrix [..., columns] of entries of a table, times the scale of a block of consecutive ones.

    Attributes:
      name: of the matrix.
      codes: of two entries in a byte.
      shape: of the matrix.
      table: Float32[16].
      scales: [blocks], or codes of them.
      block: entries that share a scale.
      nested: how the scales are decoded; None: they are stored as they are.
    """

    name: str
    codes: TensorEntry
    shape: tuple[int, ...]
    table: TensorEntry
    scales: TensorEntry
    block: int
    nested: Nested | None

    def decoded(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        columns = self.shape[-1]
        first, last = start * columns // self.block, math.ceil(stop * columns / self.block)
        before, after = first * self.block, min(last * self.block, math.prod(self.shape))
        scales = _column(read, self.scales, first, last)
        if self.nested is not None:
            scales = self.nested.decoded(read, scales, first)
        table = finite_scales(read(self.table, 0, 1)[0], f"{self.name}.quant_map")
        # A block begins with an item, as it is a power of two, and not smaller.
        per_item = DTYPE_BITS[self.codes.dtype] // 4
        items = _column(read, self.codes, before // per_item, math.ceil(after / per_item))
        both = np.ascontiguousarray(items).view(np.uint8)
        codes = np.stack([both >> 4, both & 15], axis=-1).reshape(-1)[: after - before]
        values = table[codes][None]
        scale_blocks(values, finite_scales(scales, f"{self.name}.absmax")[None], self.block)
        return values[0, start * columns - before : stop * columns - before].reshape(stop - start, columns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseInt8(CodedRows):
    """A matrix [out, in]: entry = code * scale of its row / 127.

    Attributes:
      name: of the tensor with the scales.
      codes: Int8[out, in].
      scales: [out].
    """

    name: str
    codes: TensorEntry
    scales: TensorEntry

    def decoded(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        values = read(self.codes, start, stop).astype(np.float32)
        with np.errstate(all="ignore"):  # products that are not finite are found where the leaf is written
            values *= finite_scales(_column(read, self.scales, start, stop), self.name)[:, None]
            values *= _STEP
        return values


@dataclasses.dataclass(frozen=True)
class BitsAndBytes(QuantizedFormat):
    """Has no settings: what is stored says all."""

    methods = ("bitsandbytes",)

    @classmethod
    def read(cls, keys: QuantizationKeys) -> "BitsAndBytes":
        for key in ("load_in_4bit", "load_in_8bit"):
            keys.choice(key, (True, False), default=False)
        return cls()

    def matrices(self, tensors: Mapping[str, TensorEntry]) -> Iterator[CodedMatrix]:
        files, blockwise = TensorFiles(), dict[str, None]()
        for name, entry in tensors.items():
            base = name.partition(_STATE)[0] if _STATE in name else name.removesuffix(".absmax")
            if base != name:
                blockwise[base] = None
            elif name.endswith(".weight") and entry.dtype == "I8" and not _is_blockwise(name, tensors):
                yield _rowwise(CodedMatrix(name, tensors), files)
            elif name.endswith(".weight") and entry.dtype == "U8":
                blockwise[name] = None
        for name in blockwise:
            yield _blockwise(CodedMatrix(name, tensors), files)


def _is_blockwise(name: str, tensors: Mapping[str, TensorEntry]) -> bool:
    return any(f"{name}{_STATE}{kind}" in tensors for kind in _TYPES)


def _rowwise(matrix: CodedMatrix, files: TensorFiles) -> CodedMatrix:
    module = matrix.name.removesuffix(".weight")
    codes = matrix.take(matrix.name, "I8")
    if len(codes.shape) != 2:
        raise InputError(f"{matrix.name} has shape {shown(list(codes.shape))}, expected a matrix of integers")
    order = matrix.find(f"{module}.weight_format", "U8", shape=[(), (1,)])
    if order is not None and files.rows(order, 0, 1)[0, 0] != _ROW_MAJOR:
        raise InputError(
            f"{module}.weight_format is {files.rows(order, 0, 1)[0, 0]}, expected {_ROW_MAJOR}, row by row; "
            "load it with bitsandbytes, and save it again"
        )
    scales = matrix.take(f"{module}.SCB", *DTYPES, shape=[(codes.shape[0],)])
    return matrix.made(codes.shape, RowwiseInt8(name=f"{module}.SCB", codes=codes, scales=scales), "int8")


def _blockwise(matrix: CodedMatrix, files: TensorFiles) -> CodedMatrix:
    name = matrix.name
    kind = next((kind for kind in _TYPES if matrix.has(f"{name}{_STATE}{kind}")), _TYPES[0])
    state_name = f"{name}{_STATE}{kind}"
    state = _state(matrix.take(state_name, "U8"), files, state_name)
    _one_of(state, "quant_type", (kind,), state_name)
    shape, block = _shape(state, state_name), _one_of(state, "blocksize", _BLOCKS, state_name)
    entries = math.prod(shape)
    blocks = math.ceil(entries / block)
    codes = matrix.take(name, *_STORAGE)
    if codes.nbytes != math.ceil(entries / 2):
        raise InputError(
            f"{name} has {codes.nbytes} bytes of codes, expected {math.ceil(entries / 2)} for the shape "
            f"{shown(list(shape))} that {state_name} says; fetch the checkpoint again"
        )
    nested = None
    if matrix.has(f"{name}.nested_absmax"):
        size = _one_of(state, "nested_blocksize", _BLOCKS, state_name)
        nested = Nested(
            name=f"{name}.nested_absmax",
            table=matrix.take(f"{name}.nested_quant_map", "F32", shape=[(256,)]),
            scales=matrix.take(f"{name}.nested_absmax", *DTYPES, shape=[(math.ceil(blocks / size),)]),
            block=size,
            offset=_offset(state, state_name),
        )
    rows = BlockwiseRows(
        name=name,
        codes=codes,
        shape=shape,
        table=matrix.take(f"{name}.quant_map", "F32", shape=[(16,)]),
        scales=matrix.take(f"{name}.absmax", *(DTYPES if nested is None else ("U8",)), shape=[(blocks,)]),
        block=block,
        nested=nested,
    )
    return matrix.made(shape, rows, kind)


def _state(entry: TensorEntry, files: TensorFiles, name: str) -> Mapping[str, Any]:
    """Returns the object in JSON whose bytes a tensor is."""
    if len(entry.shape) != 1 or entry.nbytes > _MAX_STATE:
        raise InputError(
            f"{name} has shape {shown(list(entry.shape))}, expected an object in JSON of at most {_MAX_STATE} bytes"
        )
    data = parse_json(files.rows(entry, 0, 1).tobytes(), where=name)
    if not isinstance(data, Mapping):
        raise InputError(f"{name} is {shown(data)}, expected an object")
    return data


def _one_of(state: Mapping[str, Any], key: str, choices: Collection[Any], name: str) -> Any:
    value = state.get(key)
    if value not in choices:
        raise InputError(
            f"{name}: {key!r} is {shown(value)}, expected {' or '.join(map(repr, choices))}; fetch the checkpoint again"
        )
    return value


def _shape(state: Mapping[str, Any], name: str) -> tuple[int, ...]:
    shape = state.get("shape")
    if not isinstance(shape, list) or not 2 <= len(shape) <= _MAX_RANK or not all(_is_size(n) for n in shape):
        raise InputError(f"{name}: 'shape' is {shown(shape)}, expected that of a matrix; fetch the checkpoint again")
    return tuple(shape)


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_SIZE


def _offset(state: Mapping[str, Any], name: str) -> float:
    offset: Any = state.get("nested_offset")
    if not is_finite(offset):
        raise InputError(
            f"{name}: 'nested_offset' is {shown(offset)}, expected a finite number; fetch the checkpoint again"
        )
    return float(offset)


def _column(read: ReadRows, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
    """Returns elements [stop - start] of a tensor of any shape, in the order of their places in the file."""
    return read(entry._replace(shape=(math.prod(entry.shape), 1)), start, stop)[:, 0]
