"""array_record files in buckets: reads each record by its range, and the index of records at the end of the file.

The library array_record reads files on disks only, so its format is read here. A file is one of Riegeli's: chunks, each
with a header, in blocks of 64 KiB. Every block begins with a header of its own, wherever in a chunk that falls. The
last block gives the position of the footer, a chunk whose first record counts the following ones; these give the
position of each chunk of data. Hashes are not verified. Sources: https://github.com/google/array_record
(`layout.proto`), and https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md.
"""

import itertools
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moe_jax.data.sources.data_files import DataFile, import_pyarrow

_BLOCK, _BLOCK_HEADER = 1 << 16, 24
# Hash of the header, bytes of the data, hash of the data, kind and number of records, uncompressed bytes.
_CHUNK_HEADER = struct.Struct("<QQQQQ")
_MAGIC = 0x71930E704FDAE05E  # of the last block
_SIMPLE = ord("r")
_CODECS = {ord("z"): "zstd", ord("b"): "brotli"}
_MAX_BYTES = 1 << 30  # of a record, and of the footer: that of a hundred million records has less


class _Chunk(NamedTuple):
    """The stored records of a chunk: their number, their uncompressed bytes, and the data."""

    count: int
    decoded: int
    data: bytes


class ArrayRecords:
    """The records of a file, one in each chunk, as `moe-jax data tokenize` writes them.

    Raises:
      ValueError: if it is no such file.
    """

    def __init__(self, file: DataFile):
        self._file = file
        self._edges = self._read_edges()

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, index: int) -> bytes:
        start, stop = (int(edge) for edge in self._edges[index : index + 2])
        (record,) = self._records(start, stop)
        return record

    def _read_edges(self) -> np.ndarray:
        """Returns the positions of the chunks of all records, and the end of the last one: Int64."""
        end = self._file.size - _BLOCK
        if end < _BLOCK or self._file.size % _BLOCK:
            raise ValueError("it does not consist of blocks of 64 KiB")
        postscript = dict(_fields(self._records(end, self._file.size)[0]))
        footer = postscript.get(1, 0)
        if postscript.get(2) != _MAGIC or not 0 < footer < end:
            raise ValueError("its last block does not say where the list of records is")
        _, *places = self._records(footer, end)
        found = [dict(_fields(place)) for place in places]
        if any(place.get(3) != 1 for place in found):
            raise ValueError("its chunks have more than one record; write it with group_size:1")
        edges = np.array([*(place.get(1, 0) for place in found), footer], np.int64)
        if np.any(np.diff(edges) <= 0) or edges[0] < 0:
            raise ValueError("its list of records is out of order")
        return edges

    def _records(self, start: int, stop: int) -> list[bytes]:
        """Returns the records of the chunk from `start` to `stop` in the file."""
        chunk = self._chunk(start, stop)
        kind, data = chunk.data[0], chunk.data[1:]
        length, data = _varint(data)
        sizes = self._uncompressed(kind, data[:length], most=min(10 * chunk.count, _MAX_BYTES))
        values = self._uncompressed(kind, data[length:], most=chunk.decoded)
        lengths = list(_varints(sizes))
        ends = list(itertools.accumulate(lengths))
        if len(ends) != chunk.count or ends[-1] != len(values):
            raise ValueError("the sizes of its records are not those of its chunk")
        return [values[end - size : end] for size, end in zip(lengths, ends, strict=True)]

    def _chunk(self, start: int, stop: int) -> _Chunk:
        if stop - start > _MAX_BYTES:
            raise ValueError(f"it has a chunk of {stop - start:,} bytes, more than {_MAX_BYTES:,}")
        stored = _without_block_headers(self._file.read(start, stop - start), start)
        _, size, _, kind, decoded = _CHUNK_HEADER.unpack_from(stored)
        data = stored[_CHUNK_HEADER.size : _CHUNK_HEADER.size + size]
        count = kind >> 8
        if kind & 0xFF != _SIMPLE or not count or max(decoded, count) > _MAX_BYTES or len(data) < max(size, 2):
            raise ValueError("a chunk of it is not what its header says, or of another kind")
        return _Chunk(count, decoded, data)

    def _uncompressed(self, kind: int, data: bytes, *, most: int) -> bytes:
        if kind == 0:
            return data
        if kind not in _CODECS:
            raise ValueError(f"it is compressed in the unknown way {kind}")
        size, data = _varint(data)
        if size > most:
            raise ValueError(f"it has {size:,} bytes where there can be {most:,}")
        arrow = import_pyarrow(f"{self._file.path}: {_CODECS[kind]}")
        return arrow.decompress(data, size, _CODECS[kind], asbytes=True)


def _without_block_headers(data: bytes, start: int) -> bytes:
    """Removes the headers of blocks from the bytes that begin at `start` in the file."""
    parts, at = [], 0
    while at < len(data):
        if (start + at) % _BLOCK == 0:
            at += _BLOCK_HEADER
        end = at + _BLOCK - (start + at) % _BLOCK
        parts.append(data[at:end])
        at = end
    return b"".join(parts)


def _varint(data: bytes) -> tuple[int, bytes]:
    """Returns the number at the beginning, seven bits per byte, and the remaining bytes."""
    value = 0
    for place, byte in enumerate(data[:10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, data[place + 1 :]
    raise ValueError("a number in it does not end")


def _varints(data: bytes) -> Iterator[int]:
    """Yields all numbers of a sequence."""
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield value
            value = shift = 0
    if shift:
        raise ValueError("a number in it does not end")


def _fields(message: bytes) -> Iterator[tuple[int, int]]:
    """Yields the fields of a protocol buffer that holds only numbers."""
    numbers = list(_varints(message))
    if len(numbers) % 2 or any(key & 7 for key in numbers[::2]):
        raise ValueError("its list of records is damaged")
    return ((key >> 3, value) for key, value in zip(numbers[::2], numbers[1::2], strict=True))
