"""A folder of arrays that can be made again: bounded in bytes, shared by runs, and never in the way of the work."""

import contextlib
import hashlib
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

_UNFINISHED = ".part"
# A run that was killed left what is so many seconds old and not finished.
_ABANDONED = 3600
# The folder is measured each time so many bytes were added, as a share of what it may hold.
_MEASURED_EVERY = 1 / 16
# What is deleted makes room for more than one array.
_KEPT = 7 / 8
_HASH_BYTES = 32


class BoundedFolder:
    """A folder of arrays by their keys; several runs may share it, at the same time.

    An array is there whole or not at all, and what was damaged counts as not there. Those that were not used for
    longest are deleted when the folder is full. A folder that cannot be written to, as on a full disk, stops nothing:
    what is in it is still found.
    """

    def __init__(self, folder: Path, suffix: str, *, max_bytes: int, note: Callable[[str], object] = lambda line: None):
        """Makes the folder.

        Args:
          folder: on a disk.
          suffix: of the names of its files, with a dot.
          max_bytes: what all of them may take together.
          note: called with a remark, once if the folder cannot be written to, and once if it is full.
        """
        self._folder, self._suffix, self._max_bytes, self._note = folder, suffix, max_bytes, note
        # The first array is measured: runs that each add less than is measured after would fill the folder together.
        self._added, self._said, self._said_full = max_bytes, False, False
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._say_unwritable(error)

    def find(self, key: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
        """Returns the array of a key, which cannot be written to; None: there is none of this shape that is whole."""
        file = self._folder / f"{key}{self._suffix}"
        try:
            content = file.read_bytes()
        except OSError:
            return None
        hashed, data = content[:_HASH_BYTES], content[_HASH_BYTES:]
        if len(data) != math.prod(shape) * dtype.itemsize or hashlib.sha256(data).digest() != hashed:
            return None
        with contextlib.suppress(OSError):  # of a folder that can only be read
            os.utime(file)
        return np.frombuffer(data, dtype).reshape(shape)

    def keep(self, key: str, array: np.ndarray) -> None:
        """Puts an array there, where that is possible; what is larger than a share of the folder is not kept."""
        data = np.ascontiguousarray(array).tobytes()
        if _HASH_BYTES + len(data) > self._max_bytes * _KEPT:
            return
        try:
            self._write(self._folder / f"{key}{self._suffix}", hashlib.sha256(data).digest() + data)
        except OSError as error:
            self._say_unwritable(error)

    def keys(self) -> list[str]:
        """Returns the keys of the arrays that are there, in no order."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        return [name.removesuffix(self._suffix) for name in names if name.endswith(self._suffix)]

    def _write(self, file: Path, content: bytes) -> None:
        descriptor, temporary = tempfile.mkstemp(_UNFINISHED, dir=self._folder)
        try:
            with os.fdopen(descriptor, "wb") as out:
                out.write(content)
            os.replace(temporary, file)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._added += len(content)
        if self._added >= self._max_bytes * _MEASURED_EVERY:
            self._added = 0
            self._make_room()

    def _make_room(self) -> None:
        used: list[tuple[float, int, Path]] = []
        for file in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another run made room
                found = file.stat()
                if file.suffix == self._suffix:
                    used.append((found.st_mtime, found.st_size, file))
                elif file.suffix == _UNFINISHED and found.st_mtime < time.time() - _ABANDONED:
                    file.unlink()
        total = sum(size for _, size, _ in used)
        if total <= self._max_bytes:
            return
        if not self._said_full:
            self._said_full = True
            self._note(
                f"{self._folder} is full ({self._max_bytes / 2**30:,.3g} GiB): what was not used for longest is deleted"
            )
        for _, size, file in sorted(used):
            if total <= self._max_bytes * _KEPT:
                return
            file.unlink(missing_ok=True)
            total -= size

    def _say_unwritable(self, error: OSError) -> None:
        if not self._said:
            self._said = True
            self._note(f"{self._folder} cannot be written to ({error.strerror or error}): nothing more is kept there")
