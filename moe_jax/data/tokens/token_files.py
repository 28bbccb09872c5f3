"""Documents that were tokenised in advance: array_record files, with a list of them in tokens.json.

A record corresponds to a record of the source: its documents as ids, and for each id whether it is scored. Training on
such files uses the same batches as training on their sources, without the tokenizer's work.

The library array_record reads files on disks only, so for files in buckets its format is read here: each record by its
range, and the index of records at the end. A file is one of Riegeli's: chunks, each with a header, in blocks of 64 KiB.
Every block begins with a header of its own, wherever in a chunk that falls. The last block gives the position of the
footer, a chunk whose first record counts the following ones; these give the position of each chunk of data. Hashes are
not verified. Sources: https://github.com/google/array_record (`layout.proto`), and
https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md.
"""

import dataclasses
import functools
import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.core.errors import InputError, first_sentence
from moe_jax.data.data_files import DataFile, import_pyarrow
from moe_jax.data.tokenizer import Document
from moe_jax.files.json_toml import parse, read_json_object, without_format
from moe_jax.files.storage_path import as_path

_BLOCK, _BLOCK_HEADER = 1 << 16, 24
# Hash of the header, bytes of the data, hash of the data, kind and number of records, uncompressed bytes.
_CHUNK_HEADER = struct.Struct("<QQQQQ")
_MAGIC = 0x71930E704FDAE05E  # of the last block
_SIMPLE = ord("r")
_CODECS = {ord("z"): "zstd", ord("b"): "brotli"}
_MAX_BYTES = 1 << 30  # of a record, and of the footer: that of a hundred million records has less


class ArrayRecords:
    """The records of a file, one in each chunk, as `moe-jax data tokenize` writes them, or `ValueError`."""

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
        if stop - start > _MAX_BYTES:
            raise ValueError(f"it has a chunk of {stop - start:,} bytes, more than {_MAX_BYTES:,}")
        stored = _without_block_headers(self._file.read(start, stop - start), start)
        _, size, _, kind, decoded = _CHUNK_HEADER.unpack_from(stored)
        data = stored[_CHUNK_HEADER.size : _CHUNK_HEADER.size + size]
        count = kind >> 8
        if kind & 0xFF != _SIMPLE or not count or max(decoded, count) > _MAX_BYTES or len(data) < max(size, 2):
            raise ValueError("a chunk of it is not what its header says, or of another kind")
        compression, (length, data) = data[0], _varint(data[1:])
        sizes = self._uncompressed(compression, data[:length], most=min(10 * count, _MAX_BYTES))
        values = self._uncompressed(compression, data[length:], most=decoded)
        lengths = list(_varints(sizes))
        ends = list(itertools.accumulate(lengths))
        if len(ends) != count or ends[-1] != len(values):
            raise ValueError("the sizes of its records are not those of its chunk")
        return [values[end - size : end] for size, end in zip(lengths, ends, strict=True)]

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


INDEX = "tokens.json"
SUFFIX = ".array_record"
FORMAT, VERSION = "moe_jax.tokens", 1

# Bytes of an id, whether all is scored, and the number of documents; then their lengths, ids, and, unless all is
# scored, bits for what is.
_HEADER = struct.Struct("<BBxxI")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFile:
    """The entry of a file in tokens.json: the index of its source, counts, and the bytes of text it was made from."""

    source: int
    records: int
    documents: int
    tokens: int
    scored: int
    source_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """The content of tokens.json.

    Attributes:
      tokenizer: a SHA-256 of everything that ids depend on; see `tokenizer.tokenizer_identity`.
      bos, eos: as in the recipe.
      vocab_size: of the model; no id is larger.
      files: by name.
    """

    tokenizer: str
    bos: str
    eos: str
    vocab_size: int
    files: Mapping[str, Any]

    def file(self, name: str, where: object) -> TokenFile:
        """Returns the entry of a file; raises `InputError` if there is none."""
        if not isinstance(self.files.get(name), Mapping):
            raise InputError(f"{where} does not list {name}")
        return parse(TokenFile, self.files[name], where=f"{where}: {name}", language="JSON")


def read_index(folder: Path) -> TokenIndex:
    """Reads the tokens.json in a folder; raises `InputError` if there is none, or it cannot be read."""
    file = folder / INDEX
    if not file.is_file():
        raise InputError(f"{folder} has no {INDEX}: files of tokens are made by moe-jax data tokenize")
    fields = without_format(read_json_object(file), FORMAT, VERSION, where=str(file))
    return parse(TokenIndex, fields, where=str(file), language="JSON")


class TokenRecords:
    """The records of one file of tokens, which lies beside its tokens.json.

    `expected` are required values in tokens.json: `tokenizer`, `bos` and `eos`. Raises `InputError` if it was made with
    another tokenizer, or is incomplete.
    """

    def __init__(self, file: DataFile, expected: Mapping[str, str], vocab_size: int):
        self._file, self._vocab_size, self.path = file, vocab_size, file.path
        path, where = file.path, file.path.parent / INDEX
        index = read_index(path.parent)
        self._about = index.file(path.name, where)
        if index.tokenizer != expected["tokenizer"]:
            raise InputError(f"{where}: the tokens were made with another tokenizer, or another chat template")
        for edge in ("bos", "eos"):
            if (made := getattr(index, edge)) != (wanted := expected[edge]):
                raise InputError(f'{where}: the tokens were made with data.{edge} = "{made}", and not "{wanted}"')
        if len(self._records) != self._about.records:
            raise InputError(f"{path} has {len(self._records):,} records, {where} says {self._about.records:,}")

    @property
    def size(self) -> int:
        """Number of bytes of the text that the tokens were made from."""
        return self._about.source_bytes

    def __len__(self) -> int:
        return self._about.records

    def __getitem__(self, index: int) -> list[Document]:
        try:
            documents = unpack(self._records[index])
        except (ValueError, struct.error, RuntimeError) as error:
            raise InputError(f"{self.where(index)}: {first_sentence(error)}") from None
        if any(len(document.ids) and document.ids.max() >= self._vocab_size for document in documents):
            raise InputError(f"{self.where(index)}: an id is outside of the vocabulary of {self._vocab_size}")
        return documents

    def where(self, index: int) -> str:
        """Returns the path of the file, and the number of a record."""
        return f"{self.path}, record {index}"

    @functools.cached_property
    def _records(self) -> Any:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        try:
            on_disk = as_path(self.path).on_disk
            return ArrayRecords(self._file) if on_disk is None else ArrayRecordDataSource([str(on_disk)])
        except (ValueError, struct.error, RuntimeError) as error:
            raise InputError(f"{self.path} is not an array_record file: {first_sentence(error)}") from None


def pack(documents: Sequence[Document]) -> bytes:
    """Encodes the documents of a record as bytes."""
    lengths = np.array([len(document.ids) for document in documents], "<u4")
    ids = np.concatenate([np.zeros(0, np.int32), *(document.ids for document in documents)])
    scored = np.concatenate([np.zeros(0, bool), *(document.scored > 0 for document in documents)])
    small = not len(ids) or ids.max() < 1 << 16
    parts = [_HEADER.pack(2 if small else 4, int(scored.all()), len(lengths)), lengths.tobytes()]
    parts.append(ids.astype("<u2" if small else "<u4").tobytes())
    return b"".join(parts if scored.all() else [*parts, np.packbits(scored).tobytes()])


def unpack(record: bytes) -> list[Document]:
    """Decodes the documents of a record; raises `ValueError` or `struct.error` if the bytes are none."""
    size, all_scored, count = _HEADER.unpack_from(record)
    if size not in (2, 4) or all_scored > 1:
        raise ValueError("it does not begin as records of tokens do")
    lengths = np.frombuffer(record, "<u4", count, _HEADER.size)
    total, begin = int(lengths.sum()), _HEADER.size + 4 * count
    ids = np.frombuffer(record, f"<u{size}", total, begin).astype(np.int32)
    begin += size * total
    if len(record) != begin + (0 if all_scored else -(-total // 8)):
        raise ValueError("it has not the length that it should have")
    scored = np.ones(total, np.float32)
    if not all_scored:
        scored = np.unpackbits(np.frombuffer(record, np.uint8, offset=begin), count=total).astype(np.float32)
    ends = np.cumsum(lengths, dtype=np.int64)[:-1]
    return [Document(*parts) for parts in zip(np.split(ids, ends), np.split(scored, ends), strict=True)][:count]
