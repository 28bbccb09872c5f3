"""Files of data on a disk or in a bucket, with random access from several threads, and never read as a whole.

From an object in a bucket only the requested bytes are read, with a request each, if positions are far apart. If
reading continues where it ended, more is read ahead and kept for a while: some megabytes per process, however many
files there are.
"""

import collections
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_jax.files.byte_files import open_bytes, open_to_stay, size_of
from moe_jax.files.storage_path import as_path

WINDOW_BYTES, MOST_WINDOWS = 4 << 20, 16
"""Bytes that are read ahead of an object, and most such windows that a process keeps."""
_NEAR = 64 << 10  # bytes that may be skipped between two reads which follow each other
_REMEMBERED = 64  # most remembered positions where reading ended


class _Window(NamedTuple):
    file: "DataFile"
    start: int
    content: bytes


class _Windows:
    """The windows of all files; the most recently used ones are kept."""

    def __init__(self) -> None:
        self._kept: collections.deque[_Window] = collections.deque(maxlen=MOST_WINDOWS)
        self._guard = threading.Lock()

    def find(self, file: "DataFile", start: int, stop: int) -> bytes | None:
        """Returns the bytes from `start` to `stop` of a file if one window holds them, else None."""
        with self._guard:
            for window in self._kept:
                if window.file is file and window.start <= start and stop <= window.start + len(window.content):
                    self._kept.remove(window)
                    self._kept.append(window)
                    return window.content[start - window.start : stop - window.start]
        return None

    def add(self, window: _Window) -> None:
        """Keeps a window, and drops the one that was used least recently if there are too many."""
        with self._guard:
            self._kept.append(window)


_windows = _Windows()


class DataFile:
    """A file of data. An object in a bucket stays the same one; if another takes its name, reading raises an error.

    Attributes:
      path: of the file.
      size: its bytes.
    """

    def __init__(self, path: Path):
        self.path = path
        self._object = open_to_stay(path)
        self.size = size_of(path) if self._object is None else self._object.size
        self._ends: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        self._reading_ahead = threading.Lock()

    @classmethod
    def of(cls, file: "Path | DataFile") -> "DataFile":
        """Returns the file itself, or opens the one at a path."""
        return file if isinstance(file, DataFile) else cls(file)

    def read(self, start: int, length: int) -> bytes:
        """Returns bytes from a position on; fewer where the file ends.

        Raises:
          InputError, OSError: see `ByteFile.read_at`.
        """
        start, length = min(start, self.size), max(0, min(length, self.size - start))
        if self._object is None:
            with open_bytes(self.path) as file:
                return file.bytes_at(start, length)
        if length == 0 or length >= WINDOW_BYTES:
            return self._object.bytes_at(start, length)
        content = _windows.find(self, start, start + length)
        if content is not None or not self._follows(start, start + length):
            return self._object.bytes_at(start, length) if content is None else content
        with self._reading_ahead:  # what another thread is reading ahead just now probably contains these bytes
            content = _windows.find(self, start, start + length)
            if content is None:
                begin = 0 if self.size <= WINDOW_BYTES else start
                ahead = self._object.bytes_at(begin, min(WINDOW_BYTES, self.size - begin))
                _windows.add(_Window(self, begin, ahead))
                content = ahead[start - begin : start - begin + length]
        return content

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yields the whole file, in pieces of this many bytes."""
        for start in range(0, self.size, size):
            yield self.read(start, size)

    def line_bounds(self, chunk: int) -> np.ndarray:
        """Returns the positions where lines begin, and the end of the file: Int64, ascending.

        Reads the whole file, `chunk` bytes at a time; several chunks of an object in a bucket are read at the same
        time.
        """

        def ends(start: int) -> np.ndarray:
            content = np.frombuffer(self.read(start, chunk), np.uint8)
            return np.flatnonzero(content == ord("\n")) + (start + 1)

        found = as_path(self.path).map(ends, range(0, self.size, chunk))
        return np.unique(np.concatenate([np.zeros(1, np.int64), *found, np.array([self.size])]))

    def _follows(self, start: int, stop: int) -> bool:
        """Whether the previous read ended shortly before this one; or the file is small and best read whole."""
        follows = self.size <= WINDOW_BYTES or any(0 <= start - end <= _NEAR for end in list(self._ends))
        self._ends.append(stop)
        return follows
