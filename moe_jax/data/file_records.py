"""Files of text and of JSON lines as random-access records: pieces of about the same size, and lines."""

from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from moe_jax.core.bad_documents import BadDocument
from moe_jax.core.errors import InputError
from moe_jax.data.data_files import DataFile, cached_copy
from moe_jax.data.rows import Example, RowReader
from moe_jax.data.tokenizer import Document
from moe_jax.files.json_toml import ANYTHING, parse_json
from moe_jax.files.storage_path import as_path

_MOST_OF_RUN = 4 << 10
_CHUNK = 16 << 20


class Records(Protocol):
    """Random access to the records of a file; `size` is their number of bytes of data."""

    path: Path

    @property
    def size(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sequence[Example | Document]: ...

    def where(self, index: int) -> str:
        """Returns where a record is, for messages."""
        ...


class _DataFileRecords:
    """Records of a file, which has a name of its own in messages: it may be an uncompressed copy."""

    def __init__(self, file: Path | DataFile, name: Path | None):
        self._file = DataFile.of(file)
        self.path = self._file.path
        self._name = name or self.path

    @property
    def size(self) -> int:
        """Number of bytes of the file."""
        return self._file.size


class TextFile(_DataFileRecords):
    """A text file in pieces of about `piece` bytes, cut after a separator, else a line end, else a character.

    Piece k begins at the first such boundary at or after byte `k * piece`, so that it is found without an index. Where
    separators could overlap, as line ends in a row do, they are those that `str.split` finds from the first of the row
    on, if that is at most `_MOST_OF_RUN` bytes before.
    """

    def __init__(self, file: Path | DataFile, *, piece: int, separator: str | None = None, name: Path | None = None):
        super().__init__(file, name)
        self._piece, self._separator = piece, separator
        self._bytes = bytes_ = (separator or "").encode()
        self._may_overlap = any(bytes_.endswith(bytes_[:size]) for size in range(1, len(bytes_)))
        # How far before the byte where a piece may begin a search for the separator before it begins at most.
        self._back = max(_MOST_OF_RUN, 2 * len(bytes_)) if self._may_overlap else len(bytes_)

    def __len__(self) -> int:
        return -(-self.size // self._piece)

    def where(self, index: int) -> str:
        """Returns the name of the file, and where a piece begins in it, about."""
        return f"{self._name}, from byte {index * self._piece:,}" if index else str(self._name)

    def __getitem__(self, index: int) -> list[Example]:
        begin, end = index * self._piece, (index + 1) * self._piece
        # A separator may end at `begin`, or extend across it.
        first = max(0, begin - self._back)
        # The end of the piece is found in the next piece, or after a separator that begins there.
        content = self._file.read(first, end + self._piece + len(self._bytes) - first)
        start, begins = self._cut(content, first, begin)
        stop, ends = self._cut(content, first, end)
        try:
            text = content[start - first : stop - first].decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{self._name} is not UTF-8 text at byte {start + error.start}") from None
        documents = text.split(self._separator) if self._separator else [text]
        last = len(documents) - 1
        return [
            Example(document, begins=begins or i > 0, ends=ends or i < last)
            for i, document in enumerate(documents)
            if document or not (begins or i > 0)
        ]

    def _cut(self, content: bytes, first: int, begin: int) -> tuple[int, bool]:
        """Returns the byte of the file at which the piece for `begin` begins, and whether a document begins there.

        `content` are bytes of the file from `first` on.
        """
        if begin == 0:
            return len(BOM_UTF8) if content.startswith(BOM_UTF8) else 0, True  # it says the encoding, and is no text
        if begin >= self.size:
            return self.size, True
        here = begin - first
        stop = min(here + self._piece, len(content))
        if self._bytes:
            size = len(self._bytes)
            at = self._search_from(content, first, begin) - first - size
            while True:
                # One that begins before `stop` counts, or a line end within it could be taken for a boundary.
                at = content.find(self._bytes, at + size, stop + size - 1)
                if at < 0 or at + size >= here:
                    break
            if at >= 0:
                return first + at + size, True
        at = content.find(b"\n", here, stop)
        if at >= 0:
            return first + at + 1, False
        # Bytes 0b10xxxxxx continue a character.
        later = (i for i in range(here, stop) if content[i] & 0xC0 != 0x80)
        return first + next(later, stop), False

    def _search_from(self, content: bytes, first: int, begin: int) -> int:
        """Returns the byte from which separators are looked for, so that one that ends at `begin` is found.

        No separator extends across it, so that those found are the ones that a search of the whole file finds.
        """
        size, least = len(self._bytes), max(0, begin - self._back)
        at = nearest = max(0, begin - size)
        while self._may_overlap and at > 0:
            if at - size + 1 < least and least > 0:
                return nearest  # the row of separators is too long; the answer must depend on `begin` alone
            found = content.find(self._bytes, max(0, at - size + 1 - first), at + size - 1 - first)
            if found < 0:
                break
            at = first + found
        return at


class JsonLines(_DataFileRecords):
    """A JSONL file; blank lines are skipped. Keeps one offset per line in memory (8 bytes).

    The reader makes examples from the objects on the lines; None: from texts, pairs and conversations with the usual
    keys.
    """

    def __init__(
        self,
        file: Path | DataFile,
        reader: RowReader | None = None,
        *,
        name: Path | None = None,
        unit: Literal["line", "entry"] = "line",
    ):
        super().__init__(file, name)
        self._reader, self._unit = reader or RowReader(), unit
        self._bounds = line_bounds(self._file)
        lengths = np.diff(self._bounds)
        self._lines = None if np.all(lengths > 1) else np.flatnonzero(lengths > 1)  # lines that are not empty

    def __len__(self) -> int:
        return len(self._bounds) - 1 if self._lines is None else len(self._lines)

    def __getitem__(self, index: int) -> list[Example]:
        start, stop = (int(bound) for bound in self._bounds[self._number(index) :][:2])
        line, is_json = self._file.read(start, stop - start), False
        if line.isspace():
            return []
        try:
            # A text may have any number of commas.
            row = parse_json(line, where="a line that", allow=ANYTHING, max_values=len(line))
            is_json = True
            return [example.at(self.where(index), self._name.parent) for example in self._reader(row)]
        except InputError as error:
            problem = error if is_json else f"expected {self._reader.expected}, got {error}"
            raise BadDocument(f"{self.where(index)}: {problem}") from None

    def where(self, index: int) -> str:
        """Returns the name of the file, and the number of a line or entry."""
        return f"{self._name}, {self._unit} {self._number(index) + 1}"

    def _number(self, index: int) -> int:
        """Returns the number of the line of a record in the file, from 0."""
        return index if self._lines is None else int(self._lines[index])


def line_bounds(file: DataFile) -> np.ndarray:
    """Returns the positions where the lines of a file begin, and its end; see `DataFile.line_bounds`.

    For a large object in a bucket they are kept on the disk: finding them again would take reading the whole object.
    """
    if as_path(file.path).at_once == 1 or file.size <= _CHUNK:
        return file.line_bounds(_CHUNK)
    kept = cached_copy(file.path, "lines", lambda handle: np.save(handle, file.line_bounds(_CHUNK)))
    return np.load(kept, mmap_mode="r")
