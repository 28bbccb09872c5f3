"""Positions of tensors in files, runs of their elements read without the rest, and fast transposed copies."""

import abc
import math
import threading
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from moe_jax.core.errors import InputError, shown
from moe_jax.files import regular_files
from moe_jax.files.byte_files import ByteFile, open_bytes

# Dtypes in which parameters may be stored, by their names in safetensors.
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
DTYPES_BY_NAME = {str(dtype): dtype for dtype in DTYPES.values()}

# Bits per element of all safetensors dtypes, to check the offsets of tensors that we do not read.
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

# What codes and scales are stored as.
STORED_DTYPES = DTYPES | {
    "U8": np.dtype(np.uint8), "I8": np.dtype(np.int8), "I32": np.dtype("<i4"), "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}  # fmt: skip

MAX_RANK = 64  # of NumPy and of PyTorch
_MAX_NAME = 1000
_CRC_BYTES = 8 << 20  # that are read at a time


class Checksum(NamedTuple):
    """A run of bytes in a file, and their CRC-32."""

    start: int
    size: int
    crc: int


class Blocks(NamedTuple):
    """A type of quantised blocks. They are read as float32."""

    name: str  # as in the `gguf` package, such as `Q4_K`
    elements: int  # number of elements in a block, all of one row
    nbytes: int  # bytes of a block


ReadRows = Callable[["TensorEntry", int, int], np.ndarray]
"""`read(entry, start, stop)`: some rows [stop - start, n] of a stored tensor, whose axes but the last are one."""


class Groups(NamedTuple):
    """Codes of whose consecutive ones in a row `size` share a scale, and perhaps a zero point.

    Attributes:
      bits: of a code.
      size: number of codes in a group; that of a row, or more: a row is one group.
      levels: what the codes 0, 1, ... stand for, times their scale; None: themselves, less their zero point.
    """

    bits: int
    size: int
    levels: tuple[float, ...] | None = None


class CodesOfGroups(NamedTuple):
    """Rows of codes, UInt8[n, in], with scales Float32[n, groups] and zero points Int[n, groups], which may be None."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None


class CodedRows(abc.ABC):
    """How a tensor is decoded that several stored ones stand for, such as codes and scales.

    Attributes:
      is_by_rows: whether some of its rows can be decoded without reading the rest.
    """

    is_by_rows: bool = True

    @abc.abstractmethod
    def decoded(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        """Returns rows of it, Float32[stop - start, n], new; its axes but the last are one.

        Raises:
          InputError: if what is stored makes no sense, such as scales that are not finite.
        """


class GroupedRows(CodedRows):
    """Codes that may lie in groups of consecutive ones in a row, and can then be moved as they are.

    Attributes:
      is_transposed: whether the codes are those of the tensor whose last two axes are swapped; their rows are meant
        where rows of codes are spoken of.
    """

    is_transposed: bool = False

    @property
    @abc.abstractmethod
    def groups(self) -> Groups | None:
        """A description of the codes; None: they do not lie in groups."""

    @abc.abstractmethod
    def codes_of_groups(self, read: ReadRows, start: int, stop: int) -> CodesOfGroups:
        """Returns rows of its codes; only if it has `groups`. Raises `InputError` as `decoded` does."""


class StoredRows(NamedTuple):
    """A tensor in codes: how it is decoded, the bytes that all of it takes in its files, and a word for its codes."""

    codes: CodedRows
    nbytes: int
    kind: str


class TensorEntry(NamedTuple):
    """The position of a tensor.

    Attributes:
      file: the file it is in.
      dtype: name as in safetensors, such as `BF16`; for a tensor in blocks `F32`.
      shape: its shape.
      start: bytes of the file before its first element.
      identity: of the file in which the position was found; see `ByteFile`.
      strides: in elements, if it is not contiguous (PyTorch files only); None: row-major.
      checksum: of the bytes that it is a part of, to be verified before they are used; None: the format has none.
      blocks: the type of the quantised blocks that it is stored in (GGUF files only); None: elements are stored as they
        are.
      interleaved: number of heads in its rows, if the two halves of a head's rotary dimensions alternate row by row
        (GGUF files only) and the reader of rows has to reorder them; None: the rows are in order.
      added: what was added to each of its elements when it was written (GGUF files only).
      coded: of a tensor that other ones stand for, which has no position: how it is decoded, as float32.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    identity: Hashable
    strides: tuple[int, ...] | None = None
    checksum: Checksum | None = None
    blocks: Blocks | None = None
    interleaved: int | None = None
    added: float = 0.0
    coded: StoredRows | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether it is decoded to float32 when it is read."""
        return self.coded is not None or self.blocks is not None

    @property
    def nbytes(self) -> int:
        return self.stored_bytes(math.prod(self.shape))

    def stored_bytes(self, elements: int) -> int:
        """Number of bytes that this many of its elements take in the file; in blocks, whole ones."""
        if self.coded is not None:
            return self.coded.nbytes * elements // max(1, math.prod(self.shape))
        if self.blocks is not None:
            return elements // self.blocks.elements * self.blocks.nbytes
        return elements * DTYPE_BITS[self.dtype] // 8


class TensorFiles:
    """Open files, read by position and by several threads. Without memory maps, only requested bytes are in memory."""

    def __init__(self) -> None:
        self._files: dict[Path, ByteFile] = {}
        self._verified: set[tuple[Path, Checksum]] = set()
        self._opening, self._verifying = threading.Lock(), threading.Lock()
        weakref.finalize(self, lambda files: [file.close() for file in files.values()], self._files)

    def read_into(self, entry: TensorEntry, offset: int, out: np.ndarray) -> None:
        """Fills a contiguous array with the elements of a row-major tensor that begin at element `offset`.

        For a tensor in blocks, these are whole blocks, and the array is float32.

        Raises:
          InputError: if the file ends too early, is not the one in which the position was found, or the checksum of its
            bytes is wrong.
        """
        assert entry.strides is None and out.flags.c_contiguous
        position = entry.start + entry.stored_bytes(offset)
        if entry.blocks is None:
            self._fill(entry, position, out.reshape(-1).view(np.uint8).data)
            return
        assert offset % entry.blocks.elements == 0 and out.size % entry.blocks.elements == 0
        stored = np.empty((out.size // entry.blocks.elements, entry.blocks.nbytes), np.uint8)
        self._fill(entry, position, stored.reshape(-1).data)
        out.reshape(-1)[:] = dequantized(stored, entry.blocks).reshape(-1)

    def rows(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        """Reads rows [stop - start, n] of a tensor as they are stored, or decoded; all axes but the last are one.

        Raises:
          InputError: as `read_into` does, or if what is decoded makes no sense.
        """
        if entry.coded is not None:
            return entry.coded.codes.decoded(self.rows, start, stop)
        width = entry.shape[-1] if entry.shape else 1
        out = np.empty((stop - start, width), STORED_DTYPES[entry.dtype])
        self.read_into(entry, start * width, out)
        return out

    def codes(self, entry: TensorEntry, start: int, stop: int) -> CodesOfGroups:
        """Reads rows of the codes of a tensor that has groups of them; raises `InputError` as `rows` does."""
        assert entry.coded is not None and isinstance(entry.coded.codes, GroupedRows)
        return entry.coded.codes.codes_of_groups(self.rows, start, stop)

    def read_strided(self, entry: TensorEntry) -> np.ndarray:
        """Reads a whole tensor of any strides; returns it with those strides."""
        dtype, strides = DTYPES[entry.dtype], entry.strides or row_major(entry.shape)
        if 0 in entry.shape:
            return np.empty(entry.shape, dtype)
        extent = 1 + sum((n - 1) * stride for n, stride in zip(entry.shape, strides, strict=True))
        flat = np.empty(extent, dtype)
        self._fill(entry, entry.start, flat.view(np.uint8).data)
        return np.lib.stride_tricks.as_strided(flat, entry.shape, [stride * dtype.itemsize for stride in strides])

    def _fill(self, entry: TensorEntry, position: int, out: memoryview) -> None:
        file = self._opened(entry)
        if entry.checksum is not None:
            with self._verifying:
                if (entry.file, entry.checksum) not in self._verified:
                    check_crc(file, entry.checksum)
                    self._verified.add((entry.file, entry.checksum))
        _read_at(file, position, out)

    def _opened(self, entry: TensorEntry) -> ByteFile:
        with self._opening:
            if entry.file not in self._files:
                file = open_bytes(entry.file)
                if file.identity != entry.identity:
                    file.close()
                    raise InputError(f"{entry.file} was replaced while it was read; start again")
                self._files[entry.file] = file
            return self._files[entry.file]


def dequantized(stored: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Decodes blocks, UInt8[n, blocks.nbytes], to Float32[n, blocks.elements]."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind: Any = GGMLQuantizationType[blocks.name]
    with np.errstate(all="ignore"):  # scales that are not finite are found where the leaf is used
        return dequantize(stored, kind)


def check_crc(file: ByteFile, expected: Checksum) -> None:
    """Raises `InputError` unless the bytes of a file have this checksum."""
    crc, buffer = 0, memoryview(bytearray(min(_CRC_BYTES, expected.size)))
    for position in range(0, expected.size, _CRC_BYTES):
        piece = buffer[: min(_CRC_BYTES, expected.size - position)]
        _read_at(file, expected.start + position, piece)
        crc = zlib.crc32(piece, crc)
    if crc != expected.crc:
        raise InputError(
            f"{file.path} is damaged: the checksum of its bytes {expected.start} to {expected.start + expected.size} "
            f"is {crc:08x}, the file says {expected.crc:08x}; fetch it again, or, if it was saved without checksums "
            "(`set_crc32_options`), save it with them"
        )


def _read_at(file: ByteFile, position: int, out: memoryview) -> None:
    got = file.read_at(position, out)
    regular_files.count_traffic(read=got)
    if got < len(out):
        raise InputError(f"{file.path} ended while it was read; it is truncated, fetch it again")


def check_tensor_name(file: Path, name: str) -> None:
    """Raises `InputError` unless a tensor's name can be printed as it is."""
    if not name.isprintable() or len(name) > _MAX_NAME:
        raise InputError(f"{file} holds a tensor named {shown(name)}, which is no name that a model's tensors have")


def check_cover(
    tensors: Mapping[str, TensorEntry],
    start: int,
    size: int,
    bad: Callable[[str], InputError],
    *,
    alignment: int = 1,
    cut: str = "",
) -> None:
    """Raises what `bad` makes of a problem unless tensors fill a file from `start` on, without a gap or an overlap.

    Each begins at the next aligned byte; `cut` ends the message if the file ends before they do.
    """
    position, previous = start, "the header"
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        stop = entry.start + entry.nbytes
        if stop > size:
            raise bad(f"{shown(name)} ends {shown(stop - size)} bytes after the end of the file{cut}")
        if entry.start != position:
            fault = "overlaps" if entry.start < position else "leaves a gap after"
            raise bad(f"{shown(name)} {fault} {shown(previous)}")
        position, previous = -(-stop // alignment) * alignment, name
    if size > position:
        raise bad(f"{size - position} bytes at its end belong to no tensor")


def row_major(shape: Iterable[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a contiguous array."""
    strides: list[int] = []
    step = 1
    for n in reversed(tuple(shape)):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


# --- transposed copies ----------------------------------------------------------------------------

TILE = 256  # best of 64..512, for 2- and 4-byte elements, tall and wide matrices
_CACHE_LINE = 64
_BITS = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


def copy_transposed(source: np.ndarray, out: np.ndarray) -> None:
    """Writes `source.T` [m, n] into `out`, casting if the dtypes differ.

    `out[:] = source.T` runs at 0.3 GB/s on the machine this was written on: it misses the cache at every element, and
    if rows are a multiple of 4 KiB apart, as in most models, all rows of a column compete for the same cache lines.
    Copying through a small tile whose rows are an odd number of cache lines apart reaches 2-3 GB/s.
    """
    if source.dtype == out.dtype:
        source, out = as_bits(source), as_bits(out)
    n, m = source.shape
    tile = np.empty((min(n, TILE), TILE + _CACHE_LINE // source.itemsize), source.dtype)
    for i in range(0, n, TILE):
        for j in range(0, m, TILE):
            block = source[i : i + TILE, j : j + TILE]
            staged = tile[: block.shape[0], : block.shape[1]]
            staged[...] = block
            out[j : j + TILE, i : i + TILE] = staged.T


def as_bits(array: np.ndarray) -> np.ndarray:
    """Views numbers as unsigned integers of the same size, which NumPy copies fast."""
    return array.view(_BITS[array.itemsize]) if array.itemsize in _BITS else array
