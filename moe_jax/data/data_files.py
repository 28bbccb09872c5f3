"""Files of data on a disk or in a bucket, with random access from several threads, and never read as a whole.

From an object in a bucket only the requested bytes are read, with a request each, if positions are far apart. If
reading continues where it ended, more is read ahead and kept for a while: some megabytes per process, however many
files there are.
"""

import collections
import gzip
import hashlib
import io
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from moe_jax.core.errors import InputError, first_line
from moe_jax.data.sections import COMPRESSED
from moe_jax.files.byte_files import open_bytes, open_to_stay, size_of
from moe_jax.files.storage_path import as_path

WINDOW_BYTES, MOST_WINDOWS = 4 << 20, 16
"""Bytes that are read ahead of an object, and most such windows that a process keeps."""
_NEAR = 64 << 10  # bytes that may be skipped between two reads which follow each other
_REMEMBERED = 64  # most remembered positions where reading ended


# File, start and content of the windows of all files, the most recently used ones.
_windows: "collections.deque[tuple[DataFile, int, bytes]]" = collections.deque(maxlen=MOST_WINDOWS)
_windows_guard = threading.Lock()


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
        content = self._in_window(start, start + length)
        if content is not None or not self._follows(start, start + length):
            return self._object.bytes_at(start, length) if content is None else content
        with self._reading_ahead:  # what another thread is reading ahead just now probably contains these bytes
            content = self._in_window(start, start + length)
            if content is None:
                begin = 0 if self.size <= WINDOW_BYTES else start
                ahead = self._object.bytes_at(begin, min(WINDOW_BYTES, self.size - begin))
                with _windows_guard:
                    _windows.append((self, begin, ahead))
                content = ahead[start - begin : start - begin + length]
        return content

    def _in_window(self, start: int, stop: int) -> bytes | None:
        """Returns the bytes from `start` to `stop` if one window holds them, else None."""
        with _windows_guard:
            for window in _windows:
                file, begin, content = window
                if file is self and begin <= start and stop <= begin + len(content):
                    _windows.remove(window)
                    _windows.append(window)
                    return content[start - begin : stop - begin]
        return None

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


_BUFFER_BYTES = 32 << 20


def import_pyarrow(what: str) -> Any:
    """Imports the package pyarrow, which `what` needs; raises `InputError` if it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{what} needs the package pyarrow: pip install 'moe-jax[data]'") from None
    return pyarrow


def cached_copy(file: Path, form: str, write: Callable[[IO[bytes]], object]) -> Path:
    """Returns a copy of a file in another form; makes it unless it was made from the same file before.

    Args:
      file: identified by its path, its size and its time of change; an object in a bucket by its generation.
      form: name of the copy's form, and so of what `write` does.
      write: writes the copy. Nothing is left of it after an error.
    """
    identity = f"{file.resolve()}\n{as_path(file).version()}\n{form}"
    home = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "moe_jax" / "data"
    copy = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.{form.split()[0]}"
    if copy.is_file():
        return copy
    folder.mkdir(parents=True, exist_ok=True)
    # Other processes may be making the same copy: the last one stays, and all are equal.
    descriptor, fresh = tempfile.mkstemp(dir=folder, prefix=".", suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as handle:
            write(handle)
        os.replace(fresh, copy)
    except BaseException:
        os.unlink(fresh)
        raise
    return copy


def uncompressed(file: Path) -> Path:
    """Returns the file, or for a compressed one (`COMPRESSED`) an uncompressed copy.

    Raises:
      InputError: if its content does not have the format of its suffix.
    """
    suffix = file.suffix.lower()
    if suffix not in COMPRESSED:
        return file
    arrow = import_pyarrow(f"{file}: zstd") if suffix == ".zst" else None

    def opened(stored: IO[bytes]) -> Any:
        return gzip.open(stored, "rb") if arrow is None else arrow.CompressedInputStream(stored, "zstd")

    def write(handle: IO[bytes]) -> None:
        try:
            with read_through(file) as stored, opened(stored) as content:
                shutil.copyfileobj(content, handle, 1 << 20)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{file} is not a whole gzip file: {first_line(error)}") from None
        except OSError as error:
            if arrow is None or error.errno is not None:  # of the system, such as a full disk
                raise
            raise InputError(f"{file} is not a whole zstd file: {first_line(error)}") from None

    return cached_copy(file, "plain", write)


def read_through(file: Path) -> IO[bytes]:
    """Opens a file, or object, for reading from beginning to end in large pieces."""
    return io.BufferedReader(open_bytes(file), _BUFFER_BYTES)
