"""Reads files safely: only regular files, none larger than its kind of content can be, and boxes of arrays in them.

A path that somebody else wrote may be a pipe, which waits for ever, a device without an end, or a link to one.
"""

import contextlib
import dataclasses
import math
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from moe_jax.core.errors import InputError
from moe_jax.files.storage_path import BucketPath, as_path


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes read and written since the process began; the difference of two is the traffic between them."""

    read: int = 0
    written: int = 0

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.read - other.read, self.written - other.written)


_lock = threading.Lock()
_total = Traffic()


def count_traffic(*, read: int = 0, written: int = 0) -> None:
    """Adds bytes to the total."""
    global _total
    with _lock:
        _total = Traffic(_total.read + read, _total.written + written)


def traffic_so_far() -> Traffic:
    """Returns the total so far."""
    return _total


_KINDS = {
    **dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device"),
    **{stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"},
}


class HeldDirectory:
    """A directory that is held open: all files read through it are of this directory, even if another takes its path.

    Attributes:
      path: where the directory was when it was opened; for messages.
    """

    def __init__(self, path: Path | str, *, inside: "HeldDirectory | None" = None, links: bool = True):
        """Opens a directory; a relative path begins at `inside`, or at the current one.

        `links`: whether the last part of the path may be a link.

        Raises:
          FileNotFoundError, NotADirectoryError: if there is none.
        """
        self.path = inside.path / path if inside else Path(path)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
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

    def within(self, parts: Sequence[str]) -> "tuple[HeldDirectory, str]":
        """Returns the directory that holds a file below this one, and its name, behind links that stay below.

        What becomes a link after this look is not followed where the result is read with `links=False`.

        Args:
          parts: of the path below this directory, none of them `..`.

        Raises:
          InputError: if a link leads out of this directory.
          OSError: if a directory cannot be opened.
        """
        # Of the directory that is held open, wherever that is by now.
        root = os.path.realpath(f"/proc/self/fd/{self.descriptor}")
        if not os.path.isdir(root):  # no Linux
            self.check_in_place()
            root = os.path.realpath(self.path)
        real = os.path.realpath(os.path.join(root, *parts))
        if os.path.commonpath([root, real]) != root:
            raise InputError(f"{self.path.joinpath(*parts)} is a link that leads out of {self.path}")
        *folders, name = Path(real).relative_to(root).parts or (".",)
        directory = self
        for folder in folders:
            directory = HeldDirectory(folder, inside=directory, links=False)
        return directory, name

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
        """Fills contiguous bytes with parts of a file, given by where they begin, and counts them.

        Raises:
          FileNotFoundError: if there is no such file.
          InputError: if it is not a regular file, or ends before a part does.
        """
        with open_regular(name, inside=self) as file:
            for start, out in ranges:
                got = pread_into(file.fileno(), start, out)
                count_traffic(read=got)
                if got < out.size:
                    raise InputError(f"{self.path / name} was cut while it was read")


class BucketDirectory:
    """A folder of a bucket to read from, with the reading methods of `HeldDirectory`."""

    def __init__(self, path: BucketPath):
        self.path = path

    def check_in_place(self) -> None:
        """Does nothing: objects are not replaced together, and of each that is read, the size is checked."""

    def within(self, parts: Sequence[str]) -> "tuple[BucketDirectory, str]":
        """Returns this folder and the name of an object in it, as `HeldDirectory.within` does; there are no links."""
        return self, "/".join(parts)

    def is_file(self, name: str) -> bool:
        """Whether the folder has an object of this name."""
        return (self.path / name).is_file()

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Returns the content of an object, of at most `max_bytes`; raises errors as `read_regular` does."""
        file = self.path / name
        if file.objects.has(file.key, max_bytes):
            raise InputError(f"{file} has more than {max_bytes:,} bytes, which is more than it can need")
        return file.read_bytes()

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, np.ndarray]]) -> None:
        """Fills bytes with parts of an object, all at the same time, as `HeldDirectory.read_ranges` does."""
        file = self.path / name
        key = file.key

        def read(part: tuple[int, np.ndarray]) -> None:
            start, out = part
            found = file.objects.read(key, start, start + out.size)
            if found is None:
                raise FileNotFoundError(f"{file} does not exist")
            out[...] = np.frombuffer(found.content, np.uint8)
            count_traffic(read=out.size)

        self.path.map(read, ranges)


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


def open_regular(path: Path | str, *, inside: HeldDirectory | None = None, links: bool = True) -> BinaryIO:
    """Opens a file to read its bytes. A relative path begins at `inside`, or the current directory.

    `links`: whether a link at the end of the path is followed.

    Raises:
      FileNotFoundError: if there is none.
      InputError: if it is not a regular file, which may never end or never begin, or cannot be read.
    """
    directory = inside.descriptor if inside else None
    shown = inside.path / path if inside else path
    try:
        mode = os.stat(path, dir_fd=directory, follow_symlinks=links).st_mode
        if not stat.S_ISREG(mode):
            raise InputError(f"{shown} is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, expected a regular file")
        # If the file has become a pipe since then, opening does not wait until somebody writes into it.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
        descriptor = os.open(path, flags, dir_fd=directory)
    except OSError as error:
        error.filename = str(shown)
        raise
    try:
        os.pread(descriptor, 1, 0)  # a file of the system (`/proc`) can be regular, and yet wait or give errors
    except OSError as error:
        os.close(descriptor)
        raise InputError(f"{shown} cannot be read: {error.strerror}") from None
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path | str, *, max_bytes: int, inside: Directory | None = None, links: bool = True) -> bytes:
    """Returns the whole content of a file, or of an object in a bucket, found as in `open_regular`.

    Raises:
      FileNotFoundError: if there is none.
      InputError: if it is not a regular file, or larger than `max_bytes`; it is not read then.
    """
    whole = None if inside is not None else as_path(path)
    if isinstance(whole, BucketPath):
        inside, path = BucketDirectory(whole.parent), whole.name
    if isinstance(inside, BucketDirectory):
        return inside.read(str(path), max_bytes=max_bytes)
    with open_regular(path, inside=inside, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        # Files of the system (`/proc`) say that they have no bytes.
        content = file.read(max_bytes + 1) if size <= max_bytes else b""
    if max(size, len(content)) > max_bytes:
        shown = inside.path / path if inside else path
        raise InputError(f"{shown} has more than {max_bytes:,} bytes, which is more than it can need")
    return content


_GAP = 256 << 10  # bytes that a bucket sends in the time that it takes to ask it once more
_BLOCK = 8 << 20
_OWN_MEMORY = 1 << 20


def read_box(directory: Directory, file: str, shape: Sequence[int], box: Sequence[slice], out: np.ndarray) -> None:
    """Reads a box of an array of this `shape` to `out`, which has the shape of the box and the dtype of the array.

    The `file` in the directory holds the array's bytes in C order and nothing else; the box has a slice with both ends
    for each axis.
    """
    content = out if out.flags.c_contiguous else fresh(out.shape, out.dtype)
    itemsize = out.dtype.itemsize
    target = content.reshape(-1).view(np.uint8)
    run, starts = _runs(shape, box)
    run, starts = run * itemsize, [start * itemsize for start in starts]
    if isinstance(directory, BucketDirectory) and len(starts) > 1 and starts[1] - starts[0] - run <= _GAP:
        _read_spans(directory, file, starts, run, target)
    else:
        parts = [(start, target[i * run : (i + 1) * run]) for i, start in enumerate(starts)]
        directory.read_ranges(file, parts)
    if content is not out:
        out[...] = content


def fresh(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an array to be filled. A large one has memory of its own, which returns to the system with it.

    The allocator would keep memory for every size that it has seen, hundreds of megabytes.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _OWN_MEMORY:
        return np.empty(shape, dtype)
    # Private, for memory that processes share has no huge pages: filling it would cost a fault for every 4 KiB.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


def _runs(shape: Sequence[int], box: Sequence[slice]) -> tuple[int, list[int]]:
    """Returns the length of the contiguous runs of a box, the same for all, and where each begins, in elements."""
    axis, run = len(shape), 1
    while axis > 0:
        axis -= 1
        run *= box[axis].stop - box[axis].start
        if box[axis].stop - box[axis].start < shape[axis]:
            break
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    first = sum(part.start * stride for part, stride in zip(box[axis:], strides[axis:], strict=True))
    outer = np.array([first])
    for part, stride in zip(reversed(box[:axis]), reversed(strides[:axis]), strict=True):
        outer = (np.arange(part.start, part.stop)[:, None] * stride + outer).reshape(-1)
    return run, outer.tolist()


def _read_spans(directory: Directory, file: str, starts: list[int], run: int, target: np.ndarray) -> None:
    """Reads runs and the bytes between them, in blocks."""
    for first, last in _blocks(starts, run):
        begin = starts[first]
        span = np.empty(starts[last - 1] + run - begin, np.uint8)
        directory.read_ranges(file, [(begin, span)])
        for i in range(first, last):
            target[i * run : (i + 1) * run] = span[starts[i] - begin : starts[i] - begin + run]


def _blocks(starts: list[int], run: int) -> Iterator[tuple[int, int]]:
    """Cuts a list of runs where a span would become too long or has a gap."""
    first = 0
    for i in range(1, len(starts) + 1):
        if i == len(starts) or starts[i] + run - starts[first] > _BLOCK or starts[i] - starts[i - 1] - run > _GAP:
            yield first, i
            first = i


def taken_bytes(path: str | os.PathLike[str]) -> int | None:
    """Returns the bytes of a file, or of a folder and all in it, folders included, as `du -sbL` counts them.

    None: there is nothing at the path, or it is in a bucket.
    """
    place = as_path(path).on_disk
    if place is None or not place.exists():
        return None
    every = (place, *(place.rglob("*") if place.is_dir() else ()))
    return sum(one.stat().st_size for one in every if one.exists())
