"""Files of bytes that are read at any place, by the same calls on a disk and in a bucket; and their fingerprints.

An object is opened by reading its beginning; after that only the ranges that are asked for are read. If another object
takes its name meanwhile, reading is an error. Fingerprints are fast enough for checkpoints of any size.
"""

import abc
import errno
import hashlib
import io
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moe_jax.core.errors import InputError
from moe_jax.files.objects import AT_ONCE, Found, TooShort
from moe_jax.files.regular_files import open_regular, pread_into
from moe_jax.files.storage_path import BucketPath, as_path

HEAD_BYTES = 64 << 10
"""Number of bytes of an object that are read when it is opened: enough for headers and small files."""
PIECE_BYTES = 8 << 20
"""Number of bytes of an object that one request asks for."""


class ByteFile(io.RawIOBase, abc.ABC):
    """An open file: read from its beginning on, as files of Python are, or at any place. A context manager.

    `read_at` may be called by several threads at once.

    Attributes:
      path: path of the file.
      identity: equal for the same file with the same content, as far as can be told without reading it.
    """

    path: Path
    identity: Hashable

    def __init__(self) -> None:
        self._position = 0

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Returns the number of bytes. For a large object this takes some requests, since no answer contains it."""

    @abc.abstractmethod
    def read_at(self, position: int, out: Any) -> int:
        """Fills contiguous bytes from a position on; returns the number of bytes that the file had there.

        Raises:
          InputError: if the file was replaced since it was opened, or cannot be read.
          OSError: if the bucket does not answer.
        """

    def ends_at(self, size: int) -> bool:
        """Whether the file has exactly this number of bytes."""
        return self.size == size

    def bytes_at(self, position: int, length: int) -> bytes:
        """Returns at most `length` bytes from a position on; fewer where the file ends."""
        out = np.empty(length, np.uint8)
        return out[: self.read_at(position, out)].tobytes()

    def readable(self) -> bool:
        return True

    seekable = readable

    def readinto(self, buffer: Any) -> int:
        got = self.read_at(self._position, memoryview(buffer).cast("B"))
        self._position += got
        return got

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}
        position = (self.size if whence == os.SEEK_END else begin[whence]) + offset
        if position < 0:
            raise OSError(errno.EINVAL, f"there is no byte {position}", str(self.path))
        self._position = position
        return position

    def tell(self) -> int:
        return self._position


class DiskFile(ByteFile):
    """A file of a disk."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self._file = open_regular(path)
        found = os.fstat(self._file.fileno())
        self._size = found.st_size
        # It changes when another file takes the place of this one, or when this one is written to.
        self.identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    @property
    def size(self) -> int:
        return self._size

    def read_at(self, position: int, out: Any) -> int:
        return pread_into(self._file.fileno(), position, np.frombuffer(out, np.uint8)) if len(out) else 0

    def close(self) -> None:
        # Before the constructor has ended there is no file.
        if "_file" in self.__dict__:
            self._file.close()
        super().close()


class ObjectFile(ByteFile):
    """An object of a bucket. Its beginning is kept in memory; for a small object, that is all of it."""

    def __init__(self, path: BucketPath, *, head_bytes: int | None = None):
        """Opens an object, as `open_bytes` does, and keeps its first `head_bytes`; None: `HEAD_BYTES`."""
        super().__init__()
        self.path = path
        self._objects, self._key = path.objects, path.key
        self._size: int | None = None
        found = self._begin(HEAD_BYTES if head_bytes is None else head_bytes)
        if found is None:
            raise FileNotFoundError(f"{path} does not exist")
        self._head, self.identity = found.content, found.generation

    @property
    def size(self) -> int:
        if self._size is None:
            found = self._objects.size(self._key, at_least=len(self._head))
            if found is None or found[1] != self.identity:
                raise self._replaced()
            self._size = found[0]
        return self._size

    def ends_at(self, size: int) -> bool:
        if self._size is not None or size <= len(self._head):
            return self.size == size
        if self._has(size) or not self._has(size - 1):
            return False
        self._size = size
        return True

    def read_at(self, position: int, out: Any) -> int:
        view = memoryview(out)
        stop = position + len(view)
        if stop <= len(self._head) or self._size is not None and self._size <= len(self._head):
            part = self._head[position:stop]
            view[: len(part)] = part
            return len(part)
        stop = stop if self._size is None else min(stop, self._size)
        pieces = [(at, min(at + PIECE_BYTES, stop)) for at in range(position, stop, PIECE_BYTES)]
        try:
            if len(pieces) < 2:
                return sum(self._read(view, position, *piece) for piece in pieces)
            with ThreadPoolExecutor(min(AT_ONCE, len(pieces))) as pool:
                return sum(pool.map(lambda piece: self._read(view, position, *piece), pieces))
        except TooShort:
            if self._size is not None:
                raise
            return self.read_at(position, view[: max(0, self.size - position)])

    def _begin(self, head_bytes: int) -> Found | None:
        try:
            return self._objects.read(self._key, 0, head_bytes)  # of no bytes it says whether there is an object
        except TooShort:
            found = self._objects.read(self._key)
            if found is not None:
                self._size = len(found.content)
            return found

    def _has(self, position: int) -> bool:
        try:
            return bool(self._check(self._objects.read(self._key, position, position + 1)))
        except TooShort:
            return False

    def _read(self, view: memoryview, begin: int, start: int, stop: int) -> int:
        content = self._check(self._objects.read(self._key, start, stop)).content
        view[start - begin : stop - begin] = content
        return len(content)

    def _check(self, found: Found | None) -> Found:
        if found is None or found.generation != self.identity:
            raise self._replaced()
        return found

    def _replaced(self) -> InputError:
        return InputError(f"{self.path} was replaced while it was read; start again")


def open_bytes(path: Path | str) -> ByteFile:
    """Opens a file of a disk, or an object, to read from it.

    Raises:
      FileNotFoundError: if there is none.
      InputError: if it is not a regular file, or may not be read.
      OSError: if the bucket does not answer.
    """
    place = as_path(path)
    return ObjectFile(place) if isinstance(place, BucketPath) else DiskFile(place)


def open_to_stay(path: Path | str) -> ByteFile | None:
    """Opens an object for as long as it is used, and reads nothing of it yet; raises errors as `open_bytes` does.

    Returns None for a file of a disk: it is opened anew whenever it is read, since there may be more files than a
    process can hold open.
    """
    place = as_path(path)
    return ObjectFile(place, head_bytes=0) if isinstance(place, BucketPath) else None


def size_of(path: Path | str) -> int:
    """Returns the number of bytes of a file, or of an object; raises `FileNotFoundError` if there is none."""
    place = as_path(path)
    if not isinstance(place, BucketPath):
        return place.stat().st_size
    with ObjectFile(place) as file:
        return file.size


_PIECE = 1 << 16
_PIECES = 16
_AT_ONCE = 8


def sample_array(array: np.ndarray) -> bytes:
    """Returns the same bytes as `sample_bytes` for a file that holds only this array in C order."""
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return sample_bytes(array.nbytes, lambda start, length: content[start : start + length].tobytes())


def fingerprint_leaves(specs: Mapping[str, jax.ShapeDtypeStruct], sample: Callable[[str], bytes]) -> str:
    """Returns a SHA-256 of the names, shapes and dtypes of leaves, and of their contents as sampled by `sample`."""
    digest = hashlib.sha256()
    for path, spec in sorted(specs.items()):
        digest.update(f"{path} {spec.shape} {spec.dtype}\n".encode())
        digest.update(sample(path))
    return digest.hexdigest()


def fingerprint_files(files: Iterable[Path]) -> str:
    """Returns a SHA-256 of the names, sizes and samples of files, whatever their order and folder."""
    files = sorted(files, key=lambda file: file.name)
    named = (f"{file.name}\n".encode() + one for file, one in zip(files, _hashed_samples(files), strict=True))
    return hashlib.sha256(b"".join(named)).hexdigest()


def fingerprint_contents(files: Iterable[Path]) -> str:
    """Returns a SHA-256 of the sizes and samples of files in their order, whatever they are called."""
    return hashlib.sha256(b"".join(_hashed_samples(files))).hexdigest()


def _hashed_samples(files: Iterable[Path]) -> list[bytes]:
    """Returns the hashed samples of files. Reads several at the same time: those in buckets take many requests."""

    def hashed(file: Path) -> bytes:
        with open_bytes(file) as handle:
            return hashlib.sha256(sample_bytes(handle.size, handle.bytes_at)).digest()

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(hashed, files))


def sample_bytes(size: int, read: Callable[[int, int], bytes]) -> bytes:
    """Returns the size of a file and its content: all of it up to 1 MiB, else 16 evenly spread pieces of 64 KiB.

    `read` returns bytes of it by their start and length.
    """
    header = f"{size}\n".encode()
    if size <= _PIECE * _PIECES:
        return header + read(0, size)
    starts = ((size - _PIECE) * piece // (_PIECES - 1) for piece in range(_PIECES))
    return b"".join([header, *(read(start, _PIECE) for start in starts)])
