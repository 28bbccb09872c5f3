"""Text and JSONL files as random-access records, read piece by piece: no file is ever in memory as a whole.

Records are what is shuffled: a record is a piece of a text file, or a line of a JSONL file.
"""

import bisect
import glob
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from moe_jax.errors import InputError
from moe_jax.json_toml import ANYTHING, parse_json
from moe_jax.train.examples import Document, Example, RowReader

# This much of every file is checked before training starts; the rest is checked when it is read.
CHECKED_BYTES = 64 << 20
_CHUNK = 16 << 20

class Records(Protocol):
    """Random access to the records of a file; `size` is how many bytes of data they are."""

    path: Path

    @property
    def size(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sequence[Example | Document]: ...


class TextFile:
    """A text file in pieces of about `piece` bytes, cut after a separator, else a line end, else a character.

    Piece k begins at the first such boundary at or after byte `k * piece`, so that it is found without an index.
    """

    def __init__(self, path: Path, *, piece: int, separator: str | None = None, name: Path | None = None):
        self.path = path
        self._name = name or path  # in messages: `path` may be an uncompressed copy
        self._piece = piece
        self._separator = separator
        self._size = path.stat().st_size

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def __len__(self) -> int:
        return -(-self._size // self._piece)

    def __getitem__(self, index: int) -> list[Example]:
        with self.path.open("rb") as file:
            start, begins = self._cut(file, index)
            stop, ends = self._cut(file, index + 1)
            file.seek(start)
            content = file.read(stop - start)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{self._name} is not UTF-8 text at byte {start + error.start}") from None
        documents = text.split(self._separator) if self._separator else [text]
        last = len(documents) - 1
        return [
            Example(document, begins=begins or i > 0, ends=ends or i < last)
            for i, document in enumerate(documents)
            if document or not (begins or i > 0)
        ]

    def _cut(self, file: BinaryIO, index: int) -> tuple[int, bool]:
        """The byte at which piece `index` begins, and whether a document begins there."""
        begin = index * self._piece
        if index == 0 or begin >= self._size:
            return min(begin, self._size), True
        separator = (self._separator or "").encode()
        # A separator may end at `begin`, or extend across it.
        back = min(begin, len(separator))
        file.seek(begin - back)
        window = file.read(back + self._piece)
        at = window.find(separator) if separator else -1
        if at >= 0:
            return begin - back + at + len(separator), True
        at = window.find(b"\n", back)
        if at >= 0:
            return begin - back + at + 1, False
        # Bytes 0b10xxxxxx continue a character.
        later = (i for i in range(back, len(window)) if window[i] & 0xC0 != 0x80)
        return begin - back + next(later, len(window)), False


class JsonLines:
    """A JSONL file; blank lines are skipped. Keeps one offset per line in memory (8 bytes).

    Args:
      path: the file.
      reader: makes examples of the objects on the lines; None: of texts, pairs and conversations with the usual keys.
      name: what the file is called in messages.
    """

    def __init__(self, path: Path, reader: RowReader | None = None, *, name: Path | None = None):
        self.path = path
        self._name = name or path
        self._reader = reader or RowReader()
        ends = [np.zeros(1, np.int64)]
        offset = 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (offset + 1))
                offset += len(chunk)
        bounds = np.unique(np.concatenate([*ends, np.array([offset])]))
        lengths = np.diff(bounds)
        self._starts = bounds[:-1][lengths > 1]
        self._lengths = lengths[lengths > 1]
        self._size = offset

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> list[Example]:
        with self.path.open("rb") as file:
            file.seek(int(self._starts[index]))
            line = file.read(int(self._lengths[index]))
        return [] if line.isspace() else self._examples(line, index)

    def _examples(self, line: bytes, index: int) -> list[Example]:
        try:
            # A text may have any number of commas.
            row = parse_json(line, where="a line that", allow=ANYTHING, max_values=len(line))
        except InputError as error:
            raise self._wrong(index, f"expected {self._reader.expected}, got {error}") from None
        try:
            return self._reader(row)
        except InputError as error:
            raise self._wrong(index, str(error)) from None

    def _wrong(self, index: int, problem: str) -> InputError:
        start = int(self._starts[index])
        number = 1
        with self.path.open("rb") as file:
            while start > 0 and (chunk := file.read(min(_CHUNK, start))):
                number += chunk.count(b"\n")
                start -= len(chunk)
        return InputError(f"{self._name}, line {number}: {problem}")


class Files:
    """The records of several files, one file after the other."""

    def __init__(self, files: Sequence[Records]):
        self._files = files
        self._ends = list(itertools.accumulate(len(file) for file in files))

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(file.size for file in self._files)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Sequence[Example | Document]:
        which = bisect.bisect_right(self._ends, index)
        return self._files[which][index - (self._ends[which - 1] if which else 0)]

    def __repr__(self) -> str:
        return f"Files({len(self._files)} files, {len(self)} records)"


def find_files(pattern: str) -> list[Path]:
    """Files that match a path or glob pattern (`**` for any depth), sorted by name.

    As much of its beginning as is the path of a folder is no pattern, whatever characters it has: `run[1]/*.txt`.

    Raises:
      FileNotFoundError: if there are none.
    """
    if Path(pattern).is_file():
        return [Path(pattern)]
    folder = next(parent for parent in Path(pattern).parents if parent.is_dir())
    below = str(Path(pattern).relative_to(folder))
    found = (folder / name for name in glob.glob(below, root_dir=folder, recursive=True))
    paths = sorted(path for path in found if path.is_file())
    if not paths:
        raise FileNotFoundError(f"no file matches {pattern} (looked from {Path.cwd()})")
    return paths


def check_beginning(files: Sequence[Records]) -> None:
    """Reads the first `CHECKED_BYTES` of every file of texts, so that most mistakes are found before anything starts.

    Raises:
      InputError: for the first mistake found.
    """
    for file in files:
        read = 0
        for index in range(len(file)):
            read += sum(len(example.text) for example in file[index] if isinstance(example, Example))
            if read >= CHECKED_BYTES:
                break
