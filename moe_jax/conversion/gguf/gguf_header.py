"""The header of a GGUF file: metadata, and the names and positions of its tensors.

    "GGUF", version, number of tensors, number of metadata
    metadata: key, type, value
    tensors: name, axes (the fastest first), type, offset from the end of the header, which is aligned
    the tensors' bytes, each aligned

The header is read and checked here, and not by the reader of the `gguf` package: that one trusts every count, length
and offset, so a file of a few bytes can make it allocate any amount. Here every number is compared with the bytes that
the file has left before anything is read by it, and all tensors with the file before any is read. Source:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import struct
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_jax.conversion.tensors import Blocks, TensorEntry, check_cover, check_tensor_name
from moe_jax.core.errors import InputError, shown
from moe_jax.files.byte_files import ByteFile, open_bytes
from moe_jax.files.storage_path import as_path

# Types that are stored element by element: number in the file -> name of the dtype in safetensors.
PLAIN = {0: "F32", 1: "F16", 30: "BF16"}

BLOCKS = {
    2: Blocks("Q4_0", 32, 18),
    3: Blocks("Q4_1", 32, 20),
    6: Blocks("Q5_0", 32, 22),
    7: Blocks("Q5_1", 32, 24),
    8: Blocks("Q8_0", 32, 34),
    10: Blocks("Q2_K", 256, 84),
    11: Blocks("Q3_K", 256, 110),
    12: Blocks("Q4_K", 256, 144),
    13: Blocks("Q5_K", 256, 176),
    14: Blocks("Q6_K", 256, 210),
    16: Blocks("IQ2_XXS", 256, 66),
    17: Blocks("IQ2_XS", 256, 74),
    18: Blocks("IQ3_XXS", 256, 98),
    19: Blocks("IQ1_S", 256, 50),
    20: Blocks("IQ4_NL", 32, 18),
    21: Blocks("IQ3_S", 256, 110),
    22: Blocks("IQ2_S", 256, 82),
    23: Blocks("IQ4_XS", 256, 136),
    29: Blocks("IQ1_M", 256, 56),
    34: Blocks("TQ1_0", 256, 54),
    35: Blocks("TQ2_0", 256, 66),
    39: Blocks("MXFP4", 32, 17),
}

# Types that are known by name only.
OTHERS = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4",
}  # fmt: skip
NAMES = (*PLAIN.values(), *(blocks.name for blocks in BLOCKS.values()))


MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
MAX_HEADER = 64 << 20  # bytes; the header of 260,000 tokens with their merges has 12 million
MAX_STRINGS = 2_000_000  # in all arrays of the metadata
MAX_METADATA = 10_000
MAX_TENSORS = 100_000
_MAX_KEY = 1000
_MAX_TEXT = 16 << 20
_MAX_AXES = 4
_MAX_ALIGNMENT = 1 << 20
_LENGTH = struct.Struct("<Q")
_STEP = 1 << 20  # bytes that are read at a time

# Type of a value -> dtype of a number, or of true and false.
_NUMBERS = {
    kind: np.dtype(code)
    for kind, code in {
        0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8", 11: "<i8", 12: "<f8"
    }.items()
}  # fmt: skip
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9


class GGUFHeader(NamedTuple):
    """The content of a GGUF file's header."""

    metadata: dict[str, Any]  # key -> int, float, bool, str, array of numbers, or list of strings
    tensors: dict[str, TensorEntry]  # by name; those in blocks are read as float32
    identity: Hashable  # of the file


def is_gguf(path: Path | str) -> bool:
    """Whether there is a file at a path that is called `*.gguf` or begins as one."""
    path = as_path(path)
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with open_bytes(path) as file:
            return file.bytes_at(0, len(MAGIC)) == MAGIC
    except (OSError, InputError):
        return False


def read_gguf_header(path: Path) -> GGUFHeader:
    """Reads and checks the header of a GGUF file.

    Raises:
      InputError: if it is none, is truncated, holds a key or a tensor twice, types that are not read, impossible
        numbers, or tensors that overlap, leave gaps, or lie outside the file.
    """
    with open_bytes(path) as file:
        header = _Header(file)
        if header.take(len(MAGIC)) != MAGIC:
            raise header.bad(f"it does not begin with {MAGIC.decode()}")
        version = header.integer()
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            raise InputError(
                f"{path} is a GGUF file of {'a big-endian machine' if swapped else f'version {version}'}; versions "
                f"{' and '.join(map(str, VERSIONS))}, little-endian, are read"
            )
        num_tensors = header.count("tensors", MAX_TENSORS, at_least=24)
        num_metadata = header.count("metadata", MAX_METADATA, at_least=13)
        metadata = header.metadata(num_metadata)
        infos = header.infos(num_tensors)
        alignment = metadata.get(ALIGNMENT, 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise header.bad(f"its {ALIGNMENT} is {shown(alignment)}, expected a power of two")
        start = -(-header.position // alignment) * alignment
        entries = {name: _entry(header, file.identity, alignment, name, info) for name, info in infos.items()}
        tensors = {name: entry._replace(start=start + entry.start) for name, entry in entries.items()}
        check_cover(tensors, start, file.size, header.bad, alignment=alignment)
    return GGUFHeader(metadata, tensors, file.identity)


class _Header:
    """Reads a header from its first byte on, and never beyond the end of the file."""

    def __init__(self, file: ByteFile):
        self.path, self._file = file.path, file
        self._size, self._is_cut = min(file.size, MAX_HEADER), file.size > MAX_HEADER
        self._data = bytearray()  # of the file, from its first byte on
        self.position = 0
        self._num_strings = 0

    def bad(self, problem: str) -> InputError:
        """Returns an error about this file."""
        return InputError(f"{self.path} is not a valid GGUF file: {problem}; fetch it again")

    def take(self, count: int) -> bytes:
        """Returns the next `count` bytes."""
        start, stop = self.position, self.position + count
        if stop > len(self._data):
            self._read_to(stop)
        self.position = stop
        return bytes(self._data[start:stop])

    def _read_to(self, stop: int) -> None:
        if stop > self._size:
            if self._is_cut:
                raise self.bad(f"its header takes more than the {MAX_HEADER:,} bytes that are read of one")
            raise self.bad(f"it ends in its header, at byte {self._size}; the file is truncated")
        while stop > len(self._data):
            piece = self._file.read(min(_STEP, self._size - len(self._data)))
            if not piece:
                raise self.bad("it ended while it was read")
            self._data += piece

    def integer(self, nbytes: int = 4) -> int:
        """Reads an unsigned integer of `nbytes` bytes."""
        return int.from_bytes(self.take(nbytes), "little")

    def count(self, what: str, at_most: int, *, at_least: int) -> int:
        """Reads a number of things that take `at_least` bytes each."""
        count = self.integer(8)
        if count > at_most or count * at_least > self._size:
            raise self.bad(f"it claims to hold {shown(count)} {what}, in {self._size:,} bytes")
        return count

    def text(self, what: str, longest: int) -> str:
        """Reads a string of at most `longest` bytes."""
        length = self.integer(8)
        if length > longest:
            raise self.bad(f"{what} has {shown(length)} bytes, at most {longest:,} are read")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.bad(f"{what} is not UTF-8") from None

    def metadata(self, count: int) -> dict[str, Any]:
        """Reads `count` keys with their values."""
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.text("a key of its metadata", _MAX_KEY)
            if not key.isprintable():
                raise self.bad(f"a key of its metadata is {shown(key)}")
            if key in found:
                raise self.bad(f"it holds the key {shown(key)} twice")
            found[key] = self._value(shown(key))
        return found

    def _value(self, key: str) -> Any:
        kind = self.integer()
        if kind == _STRING:
            return self.text(key, _MAX_TEXT)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _NUMBERS:
            raise self.bad(f"{key} has the unknown type {kind}")
        (value,) = self._numbers(key, kind, 1)
        # The shortest number that is the same in 32 bits: 1e-05, and not its long form in 64 bits.
        return float(str(value)) if kind == _FLOAT32 else value.item()

    def _array(self, key: str) -> Any:
        kind, count = self.integer(), self.integer(8)
        if kind == _STRING:
            return self._strings(key, count)
        if kind not in _NUMBERS:
            raise self.bad(f"{key} is an array of the type {kind}, which is not read")
        return self._numbers(key, kind, count)

    def _numbers(self, key: str, kind: int, count: int) -> np.ndarray:
        dtype = _NUMBERS[kind]
        if count * dtype.itemsize > self._size - self.position:
            raise self.bad(f"{key} claims to hold {shown(count)} numbers, after which the file would end")
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind != _BOOL:
            return values
        if np.any(values > 1):
            raise self.bad(f"{key} is neither true nor false")
        return values.astype(bool)

    def _strings(self, key: str, count: int) -> list[str]:
        self._num_strings += count
        if self._num_strings > MAX_STRINGS or count * 8 > self._size - self.position:
            raise self.bad(f"{key} claims to hold {shown(count)} strings")
        data, position, found = self._data, self.position, []
        try:
            # There are hundreds of thousands, so this does without calls wherever it can.
            for _ in range(count):
                if position + 8 > len(data):
                    self._read_to(position + 8)
                (length,) = _LENGTH.unpack_from(data, position)
                position += 8
                if position + length > len(data):
                    self._read_to(position + length)
                found.append(data[position : position + length].decode())
                position += length
        except UnicodeDecodeError:
            raise self.bad(f"a string of {key} is not UTF-8") from None
        self.position = position
        return found

    def infos(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Reads shape, type and offset of every tensor, by name, as stored in the file."""
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self.text("the name of a tensor", _MAX_KEY)
            check_tensor_name(self.path, name)
            if name in found:
                raise self.bad(f"it holds the tensor {shown(name)} twice")
            axes = self.integer()
            if axes > _MAX_AXES:
                raise self.bad(f"{shown(name)} has {axes} axes, at most {_MAX_AXES} are read")
            shape = tuple(self.integer(8) for _ in range(axes))[::-1]
            found[name] = (shape, self.integer(), self.integer(8))
        return found


def _entry(
    header: _Header, identity: Hashable, alignment: int, name: str, info: tuple[tuple[int, ...], int, int]
) -> TensorEntry:
    """Checks the stored numbers of a tensor and returns its entry; its start is counted from the end of the header."""
    shape, kind, offset = info
    if kind not in PLAIN and kind not in BLOCKS:
        raise InputError(
            f"{header.path}: {shown(name)} is stored as {OTHERS.get(kind, f'type {kind}')}, expected one of "
            f"{', '.join(NAMES)}"
        )
    if 0 in shape or offset % alignment:
        raise header.bad(f"{shown(name)} has shape {shown(list(shape))} and begins at byte {shown(offset)}")
    blocks = BLOCKS.get(kind)
    if blocks is not None and (not shape or shape[-1] % blocks.elements):
        raise header.bad(
            f"{shown(name)} has shape {shown(list(shape))}, rows of {blocks.name} are multiples of {blocks.elements}"
        )
    return TensorEntry(header.path, PLAIN.get(kind, "F32"), shape, offset, identity, blocks=blocks)
