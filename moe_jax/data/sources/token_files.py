"""Documents that were tokenised in advance: array_record files, with a list of them in tokens.json.

A record corresponds to a record of the source: its documents as ids, and for each id whether it is scored. Training on
such files uses the same batches as training on their sources, without the tokenizer's work.
"""

import dataclasses
import functools
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.core.errors import InputError, first_sentence
from moe_jax.data.examples import Document
from moe_jax.data.sources.array_records import ArrayRecords
from moe_jax.data.sources.data_files import DataFile
from moe_jax.files.json_toml import read_json_object
from moe_jax.files.storage_path import as_path
from moe_jax.files.strict import parse, without_format

INDEX = "tokens.json"
SUFFIX = ".array_record"
FORMAT, VERSION = "moe_jax.tokens", 1

# Bytes of an id, whether all is scored, and the number of documents; then their lengths, ids, and, unless all is
# scored, bits for what is.
_HEADER = struct.Struct("<BBxxI")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFile:
    """The entry of a file in tokens.json.

    Attributes:
      source: index, from 0, of the source in the recipe.
      records, documents, tokens, scored: their numbers.
      source_bytes: of the text that it was made from.
    """

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
    """Reads tokens.json.

    Raises:
      InputError: if there is none, or it cannot be read.
    """
    file = folder / INDEX
    if not file.is_file():
        raise InputError(f"{folder} has no {INDEX}: files of tokens are made by moe-jax data tokenize")
    return parse(
        TokenIndex, without_format(read_json_object(file), FORMAT, VERSION, where=str(file)), where=str(file),
        language="JSON",
    )  # fmt: skip


class TokenRecords:
    """The records of one file.

    Args:
      file: the file, beside its tokens.json.
      expected: required values in tokens.json: `tokenizer`, `bos` and `eos`.
      vocab_size: of the model.

    Raises:
      InputError: if it was made with another tokenizer, or is incomplete.
    """

    def __init__(self, file: Path | DataFile, expected: Mapping[str, str], vocab_size: int):
        self._file = DataFile.of(file)
        path = self._file.path
        index = read_index(path.parent)
        where = path.parent / INDEX
        self.path = path
        self._about = index.file(path.name, where)
        self._vocab_size = vocab_size
        if index.tokenizer != expected["tokenizer"]:
            raise InputError(f"{where}: the tokens were made with another tokenizer, or another chat template")
        for edge in ("bos", "eos"):
            if getattr(index, edge) != expected[edge]:
                raise InputError(
                    f'{where}: the tokens were made with data.{edge} = "{getattr(index, edge)}", and not '
                    f'"{expected[edge]}"'
                )
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
            raise InputError(f"{self.path}, record {index}: {first_sentence(error)}") from None
        if any(len(document.ids) and document.ids.max() >= self._vocab_size for document in documents):
            raise InputError(f"{self.path}, record {index}: an id is outside of the vocabulary of {self._vocab_size}")
        return documents

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
    """Decodes the documents of a record.

    Raises:
      ValueError, struct.error: if the bytes are no record.
    """
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
