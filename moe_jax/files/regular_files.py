"""Reads files safely: only regular files, and none larger than its kind of content can be.

A path that somebody else wrote may be a pipe, which waits for ever, a device without an end, or a link to one.
"""

import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from moe_jax.core.errors import InputError
from moe_jax.files.remote.traffic import count
from moe_jax.files.storage_path import BucketPath, as_path

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class HeldDirectory:
    """A directory that is held open: all files read through it are of this directory, even if another takes its path.

    Attributes:
      path: where the directory was when it was opened; for messages.
      descriptor: file descriptor of the open directory.
    """

    def __init__(self, path: Path | str, *, inside: "HeldDirectory | None" = None):
        """Opens the directory.

        Args:
          path: path of the directory.
          inside: the directory that a relative path begins at; None: the current one.

        Raises:
          FileNotFoundError, NotADirectoryError: if there is none.
        """
        self.path = inside.path / path if inside else Path(path)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            self.descriptor = os.open(path, flags, dir_fd=inside.descriptor if inside else None)
        except OSError as error:
            error.filename = str(self.path)
            raise
        weakref.finalize(self, os.close, self.descriptor)

    def check_in_place(self) -> None:
        """Raises `InputError` if there is now another directory at `path`, or none."""
        try:
            same = os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except FileNotFoundError:
            same = False
        if not same:
            raise InputError(f"{self.path} was replaced while it was read; start again")

    def is_file(self, name: str) -> bool:
        """Whether the directory has a regular file of this name, relative to it, or a link to one."""
        try:
            return stat.S_ISREG(os.stat(name, dir_fd=self.descriptor).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def size(self, name: str) -> int:
        """Returns the number of bytes of a file."""
        return os.stat(name, dir_fd=self.descriptor).st_size

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, np.ndarray]]) -> None:
        """Reads parts of a file, and counts their bytes.

        Args:
          name: name of the file, relative to the directory.
          ranges: where each part begins, and contiguous bytes to fill with it.

        Raises:
          FileNotFoundError: if there is no such file.
          InputError: if it is not a regular file, or ends before a part does.
        """
        with open_regular(name, inside=self) as file:
            for start, out in ranges:
                got = pread_into(file.fileno(), start, out)
                count(read=got)
                if got < out.size:
                    raise InputError(f"{self.path / name} was cut while it was read")


class BucketDirectory:
    """A folder of a bucket to read from, with the reading methods of `HeldDirectory`.

    Attributes:
      path: path of the folder.
    """

    def __init__(self, path: BucketPath):
        self.path = path
        self._objects, self._folder = path.objects, path.key

    def check_in_place(self) -> None:
        """Does nothing: objects are not replaced together, and of each that is read, the size is checked."""

    def is_file(self, name: str) -> bool:
        """Whether the folder has an object of this name."""
        return self._objects.generation(self._key(name)) is not None

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Returns the content of an object.

        Raises:
          FileNotFoundError: if there is none.
          InputError: if it has more than `max_bytes` bytes.
        """
        if self._objects.has(self._key(name), max_bytes):
            raise InputError(f"{self.path / name} has more than {max_bytes:,} bytes, which is more than it can need")
        found = self._objects.read(self._key(name))
        if found is None:
            raise FileNotFoundError(f"{self.path / name} does not exist")
        return found.content

    def size(self, name: str) -> int:
        """Returns the number of bytes of an object."""
        found = self._objects.size(self._key(name))
        if found is None:
            raise FileNotFoundError(f"{self.path / name} does not exist")
        return found.size

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, np.ndarray]]) -> None:
        """Reads parts of an object at the same time, and counts their bytes.

        Args:
          name: name of the object, relative to the folder.
          ranges: where each part begins, and bytes to fill with it.

        Raises:
          FileNotFoundError: if there is no such object.
          InputError: if it ends before a part does.
        """

        def read(part: tuple[int, np.ndarray]) -> None:
            start, out = part
            found = self._objects.read(self._key(name), start, start + out.size)
            if found is None:
                raise FileNotFoundError(f"{self.path / name} does not exist")
            out[...] = np.frombuffer(found.content, np.uint8)
            count(read=out.size)

        self.path.map(read, ranges)

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name


Directory = HeldDirectory | BucketDirectory


def hold(path: Path | str, *, inside: Directory | None = None) -> Directory:
    """Opens a directory of a disk (a `HeldDirectory`), or of a bucket, to read from it.

    Raises:
      FileNotFoundError, NotADirectoryError: if there is none on the disk.
    """
    if isinstance(inside, BucketDirectory):
        return BucketDirectory(inside.path / path)
    place = None if inside is not None else as_path(path)
    return BucketDirectory(place) if isinstance(place, BucketPath) else HeldDirectory(path, inside=inside)


def pread_into(descriptor: int, start: int, out: np.ndarray) -> int:
    """Fills contiguous bytes from a place in an open file; returns the number of bytes that the file had there."""
    buffer: Any = out
    view, done = memoryview(buffer), 0
    while done < out.size:
        got = os.preadv(descriptor, [view[done:]], start + done)
        if got == 0:
            break
        done += got
    return done


def open_regular(path: Path | str, *, inside: HeldDirectory | None = None) -> BinaryIO:
    """Opens a file to read its bytes; links are followed.

    Args:
      path: path of the file.
      inside: the directory that a relative path begins at; None: the current one.

    Raises:
      FileNotFoundError: if there is none.
      InputError: if it is not a regular file, which may never end or never begin, or cannot be read.
    """
    directory = inside.descriptor if inside else None
    shown = inside.path / path if inside else path
    try:
        mode = os.stat(path, dir_fd=directory).st_mode
        if not stat.S_ISREG(mode):
            raise InputError(f"{shown} is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, expected a regular file")
        # If the file has become a pipe since then, opening does not wait until somebody writes into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        error.filename = str(shown)
        raise
    try:
        os.pread(descriptor, 1, 0)  # a file of the system (`/proc`) can be regular, and yet wait or give errors
    except OSError as error:
        os.close(descriptor)
        raise InputError(f"{shown} cannot be read: {error.strerror}") from None
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path | str, *, max_bytes: int, inside: Directory | None = None) -> bytes:
    """Returns the whole content of a file, or of an object in a bucket.

    Args:
      path: path of the file; links are followed.
      max_bytes: a larger file is refused before it is read.
      inside: as in `open_regular`.

    Raises:
      FileNotFoundError: if there is none.
      InputError: if it is not a regular file, or larger.
    """
    whole = None if inside is not None else as_path(path)
    if isinstance(whole, BucketPath):
        inside, path = BucketDirectory(whole.parent), whole.name
    if isinstance(inside, BucketDirectory):
        return inside.read(str(path), max_bytes=max_bytes)
    with open_regular(path, inside=inside) as file:
        size = os.fstat(file.fileno()).st_size
        # Files of the system (`/proc`) say that they have no bytes.
        content = file.read(max_bytes + 1) if size <= max_bytes else b""
    if max(size, len(content)) > max_bytes:
        shown = inside.path / path if inside else path
        raise InputError(f"{shown} has more than {max_bytes:,} bytes, which is more than it can need")
    return content
