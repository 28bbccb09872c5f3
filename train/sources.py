"""Text and JSONL files as random-access records, read piece by piece: no file is ever in memory as a whole.

Records are what is shuffled: a record is a piece of a text file, or a line of a JSONL file.
"""

import bisect
import glob
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from moe_jax.errors import InputError, clipped, shown
from moe_jax.json_toml import ANYTHING, is_unicode, parse_json

# This much of every file is checked before training starts; the rest is checked when it is read.
CHECKED_BYTES = 64 << 20
_CHUNK = 16 << 20

PAIR_KEYS = (("prompt", "response"), ("input", "target"))
"""Keys of the lines that are pairs: what is given, and what is to be said."""


class Example(NamedTuple):
    """A document, or a part of one.

    Attributes:
      text: the text.
      prompt_chars: characters at its beginning that are not scored.
      begins, ends: whether the document begins and ends here; otherwise it continues in a neighbouring record.
      is_response: whether it is an answer to a prompt.
    """

    text: str
    prompt_chars: int = 0
    begins: bool = True
    ends: bool = True
    is_response: bool = False


class Records(Protocol):
    """Random access to the records of a file."""

    path: Path

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> list[Example]: ...


class TextFile:
    """A text file in pieces of about `piece` bytes, cut after a separator, else a line end, else a character.

    Piece k begins at the first such boundary at or after byte `k * piece`, so that it is found without an index.
    """

    def __init__(self, path: Path, *, piece: int, separator: str | None = None):
        self.path = path
        self._piece = piece
        self._separator = separator
        self._size = path.stat().st_size

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
            raise InputError(f"{self.path} is not UTF-8 text at byte {start + error.start}") from None
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

    Lines are texts, `{"text": ...}`, or pairs: `{"input": ..., "target": ...}` and `{"prompt": ..., "response": ...}`
    mean the same.

    Args:
      path: the file.
      only_pairs: texts are refused: for models with an encoder.
    """

    def __init__(self, path: Path, *, only_pairs: bool = False):
        self.path = path
        self._kinds = PAIR_KEYS if only_pairs else (("text",), *PAIR_KEYS)
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

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> list[Example]:
        with self.path.open("rb") as file:
            file.seek(int(self._starts[index]))
            line = file.read(int(self._lengths[index]))
        return [] if line.isspace() else [self._example(line, index)]

    def _example(self, line: bytes, index: int) -> Example:
        try:
            # A text may have any number of commas.
            value = parse_json(line, where="a line that", allow=ANYTHING, max_values=len(line))
        except InputError as error:
            raise self._wrong(index, str(error)) from None
        if not isinstance(value, dict):
            raise self._wrong(index, f"a JSON {type(value).__name__}")
        known = {"text", *itertools.chain(*PAIR_KEYS)} & value.keys()
        keys = next((keys for keys in self._kinds if known == set(keys)), None)
        if keys is None:
            raise self._wrong(index, f"an object with the keys {clipped(', '.join(map(shown, value))) or '(none)'}")
        for key in sorted(keys):
            if not isinstance(value[key], str):
                raise self._wrong(index, f"{key!r} holding a {type(value[key]).__name__} that should be a string")
            if not is_unicode(value[key]):
                raise self._wrong(index, f"{key!r} holding one half of a character in UTF-16")
        if keys == ("text",):
            return Example(value["text"])
        first, second = (value[key] for key in keys)
        return Example(first + second, len(first), is_response=True)

    def _wrong(self, index: int, got: str) -> InputError:
        start = int(self._starts[index])
        number = 1
        with self.path.open("rb") as file:
            while start > 0 and (chunk := file.read(min(_CHUNK, start))):
                number += chunk.count(b"\n")
                start -= len(chunk)
        expected = " or ".join("{" + ", ".join(f'"{key}": "..."' for key in keys) + "}" for keys in self._kinds)
        return InputError(f"{self.path}, line {number}: expected {expected}, got {got}")


class Files:
    """The records of several files, one file after the other."""

    def __init__(self, files: Sequence[Records]):
        self._files = files
        self._ends = list(itertools.accumulate(len(file) for file in files))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> list[Example]:
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
    """Reads the first `CHECKED_BYTES` of every file, so that most mistakes are found before anything starts.

    Raises:
      InputError: for the first mistake found.
    """
    for file in files:
        read = 0
        for index in range(len(file)):
            read += sum(len(example.text) for example in file[index])
            if read >= CHECKED_BYTES:
                break
