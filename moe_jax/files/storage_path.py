"""Paths of files on a disk or in a bucket, with the same methods.

Both are paths of `pathlib` with further methods: writes that are atomic, or stored when they return; files of lines
that grow; listings; versions; copies on this machine. Code outside of `moe_jax.files` never asks which of the two a
path is.

A bucket has no folders: a folder exists if the name of an object begins with it. Reading an object by its name gives
its present content; a listing may be some time old.
"""

import contextlib
import errno
import fnmatch
import glob
import io
import itertools
import os
import posixpath
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PosixPath
from typing import IO, Any, NoReturn, Self, TextIO, TypeVar

from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.files import objects as buckets
from moe_jax.files.large_writes import write_at
from moe_jax.files.objects import AT_ONCE, Found, GrowingObjects

T = TypeVar("T")
U = TypeVar("U")

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


class StoragePath(PosixPath):
    """A place on a disk, with more methods than `pathlib` has. `as_path` makes one of a text, or of another path.

    Attributes:
      renames: whether finished files can be renamed at once, and files can grow. If not, a file is written as a whole,
        and the file without which the others count for nothing is written last.
      at_once: number of files, or parts of one, that are best requested at the same time.
      absence: text added to the message that there is no model here.
      on_disk: the path for programs that open files by themselves; None if they cannot.
    """

    renames = True
    at_once = 1
    absence = ""

    @property
    def on_disk(self) -> Path | None:
        return self

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> list[U]:
        """Calls a function that reads or writes files here, for several items at the same time if that is quicker."""
        if self.at_once == 1:
            return list(map(function, items))
        with ThreadPoolExecutor(self.at_once) as pool:
            return list(pool.map(function, items))

    def write_durably(self, content: bytes | memoryview) -> None:
        """Writes a file; its content is stored on return."""
        with open(self, "wb", buffering=0) as handle:
            write_at(handle.fileno(), content, 0)
            os.fsync(handle.fileno())

    def replace_content(self, content: bytes) -> None:
        """Replaces the content of a file atomically: at any time there is either the old one or all of the new one."""
        with self.replacing() as handle:
            handle.write(content)

    @contextlib.contextmanager
    def replacing(self) -> Iterator[IO[bytes]]:
        """Yields a file to write to, which replaces this one atomically when the block ends without an error."""
        fresh = self.beside("new")
        try:
            with open(fresh, "wb") as handle:
                yield handle
                handle.flush()
                os.fsync(handle.fileno())
            fresh.replace(self)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        self.parent.sync()

    def sync(self) -> None:
        """Waits until a file, or the list of files in a folder, is stored."""
        descriptor = os.open(self, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove_tree(self) -> None:
        """Removes a folder, even if threads of a failed write are still writing into it."""
        for _ in range(100):
            shutil.rmtree(self, ignore_errors=True)
            if not self.exists():
                return
            time.sleep(0.05)
        shutil.rmtree(self)

    def beside(self, suffix: str) -> Self:
        """Returns the hidden name `.NAME.SUFFIX` in the same folder."""
        return self.with_name(f".{self.name}.{suffix}")

    def files_below(self) -> list[str]:
        """Returns all files in a folder and below, relative to it, sorted; in a bucket, as far as listings show."""
        return sorted(file.relative_to(self).as_posix() for file in self.rglob("*") if file.is_file())

    def matching(self) -> list["StoragePath"]:
        """Returns the files that match this path as a pattern (`**` for any depth), sorted.

        The beginning of it that is the path of a folder is not a pattern, whatever its characters: `run[1]/*.txt`.
        """
        folder = next(parent for parent in self.parents if parent.is_dir())
        below = _bounded(self.relative_to(folder).parts)
        found = (folder / name for name in glob.glob(below, root_dir=folder, recursive=True))
        return sorted(path for path in found if path.is_file())

    def looked_from(self) -> str:
        """Says how a file was looked for, for the message that there is none."""
        return f"looked from {Path.cwd()}"

    def version(self) -> str:
        """Returns a text that changes with the content of a file."""
        stat = self.stat()
        return f"{stat.st_size}\n{stat.st_mtime_ns}"

    def mark_folder(self) -> None:
        """Lets Orbax find a folder that may have no files yet."""
        self.mkdir(parents=True, exist_ok=True)

    def check_parent(self) -> None:
        """Raises `FileNotFoundError` if the folder of this file does not exist."""
        if not self.parent.is_dir():
            raise FileNotFoundError(f"no directory {self.parent} to write {self.name} to")

    def way_to(self, place: "StoragePath") -> str | None:
        """Returns the relative path to another place from this folder, both without links; None if there is none."""
        return os.path.relpath(place, self) if place.on_disk else None

    def follow(self, way: str) -> "StoragePath":
        """Returns the place that a relative path names from this folder; an absolute path is returned as it is."""
        there = as_path(way)
        return there if there.is_absolute() else (self / way).resolve()

    def kvstore(self) -> dict[str, Any]:
        """Returns the folder as a key-value store of TensorStore, which takes no path with `..` in it."""
        return {"driver": "file", "path": f"{self.resolve()}/"}

    def storage_error(self, text: str) -> Exception | None:
        """Returns the disk or bucket error that a library's message speaks of; None: it speaks of none."""
        found = next((code for code in _DISK_ERRORS if os.strerror(code) in text), None)
        return None if found is None else OSError(found, os.strerror(found), str(self))

    def local_folder(self) -> "LocalFolder":
        """Returns a folder on this machine's disk, for programs that write files bit by bit."""
        self.mkdir(parents=True, exist_ok=True)
        return LocalFolder(self)

    def growing(self, kept: Sequence[str]) -> "GrowingLines":
        """Opens a file of lines that grows, which `read_grown` reads; it begins with the lines `kept` and no others."""
        if self.exists():  # if the process is killed here, the lines so far are not lost
            self.replace_content("".join(kept).encode())
        return open(self, "a", buffering=1, encoding="utf-8")

    def read_grown(self) -> bytes:
        """Returns the content of a file of lines; nothing if there is no file."""
        return self.read_bytes() if self.exists() else b""

    def write_grown(self, content: bytes) -> None:
        """Writes a file of lines as a whole."""
        if content:
            self.write_durably(content)


class BucketPath(StoragePath):
    """An address such as `gs://bucket/models/moe`. Parts and names work as in `pathlib`, files by requests.

    Links, renaming and whatever else a bucket does not have are not supported; functions of `os` find nothing at it.
    """

    renames = False
    at_once = AT_ONCE
    absence = ": there is no config.json, or no such bucket"

    def __str__(self) -> str:
        return buckets.written_out(super().__str__()) or super().__str__()

    def __repr__(self) -> str:
        return f"BucketPath({str(self)!r})"

    def __fspath__(self) -> str:
        return str(self)

    def __hash__(self) -> int:
        return hash(str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketPath) and str(self) == str(other)

    @property
    def on_disk(self) -> None:
        return None

    @property
    def address(self) -> buckets.Address:
        """The scheme, the bucket and the key of this address."""
        return buckets.parse_address(str(self))

    @property
    def objects(self) -> buckets.Objects:
        """The bucket of this address."""
        address = self.address
        return buckets.objects_of(address.scheme, address.bucket)

    @property
    def key(self) -> str:
        """The name of the object, or of the folder, in its bucket."""
        return self.address.key

    def resolve(self, strict: bool = False) -> "BucketPath":
        return self

    def absolute(self) -> "BucketPath":
        return self

    def is_absolute(self) -> bool:
        return True

    def is_symlink(self) -> bool:
        return False

    def is_file(self, **_: Any) -> bool:
        return bool(self.key) and self.objects.generation(self.key) is not None

    def is_dir(self, **_: Any) -> bool:
        """Whether the folder has a finished model, even if listings do not show it yet, or an object that they show."""
        return not self.key or (self / "config.json").is_file() or bool(self.objects.names(self.key))

    def exists(self, **_: Any) -> bool:
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator["BucketPath"]:
        names = {name.split("/")[0] for name in self.objects.names(self.key)} - {""}
        return (self / name for name in sorted(names))

    def glob(self, pattern: str, **_: Any) -> Iterator["BucketPath"]:
        """Yields the entries of the folder whose names match a pattern; not entries of folders in it."""
        return (child for child in self.iterdir() if fnmatch.fnmatchcase(child.name, pattern))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: a folder exists as soon as it has an object."""

    def read_bytes(self) -> bytes:
        return self._found(None).content

    def _found(self, stop: int | None) -> Found:
        found = self.objects.read(self.key, 0, stop)
        if found is None:
            raise FileNotFoundError(f"{self} does not exist")
        return found

    def read_text(self, encoding: str | None = None, *_: Any, **__: Any) -> str:
        return self.read_bytes().decode(encoding or "utf-8")

    def write_bytes(self, data: Any) -> int:
        self.objects.write(self.key, bytes(data))
        return len(data)

    def write_text(self, data: str, encoding: str | None = None, *_: Any, **__: Any) -> int:
        return self.write_bytes(data.encode(encoding or "utf-8"))

    def unlink(self, missing_ok: bool = False) -> None:
        self.objects.remove(self.key)

    def open(self, mode: str = "r", *_: Any, **__: Any) -> Any:
        if mode not in ("r", "rb"):
            raise InputError(f"{self} is in a bucket, where no file is written bit by bit; choose a local place")
        content = io.BytesIO(self.read_bytes())
        return content if mode == "rb" else io.TextIOWrapper(content, encoding="utf-8")

    def write_durably(self, content: bytes | memoryview) -> None:
        self.write_bytes(content)

    replace_content = write_durably

    def sync(self) -> None:
        """Does nothing: written objects are stored."""

    def remove_tree(self) -> None:
        self.objects.remove_all(self.key)
        self.objects.remove(f"{self.key}/")  # with which Orbax marks a folder

    def files_below(self) -> list[str]:
        return sorted(name for name in self.objects.names(self.key) if name and not name.endswith("/"))

    def matching(self) -> list[StoragePath]:
        parts = self.key.split("/")
        plain = list(itertools.takewhile(lambda part: not any(character in part for character in "*?["), parts[:-1]))
        scheme, bucket, _ = self.address
        folder = as_path(f"{scheme}://{bucket}") / "/".join(plain)
        pattern = _bounded(parts[len(plain) :]).split("/")
        names = self.objects.names("/".join(plain))
        return [folder / name for name in names if _matches(name.split("/"), pattern)]

    def looked_from(self) -> str:
        return "by what listings show"

    def version(self) -> str:
        return self._found(0).generation.hex()

    def mark_folder(self) -> None:
        self.objects.write(f"{self.key}/", b"")

    def check_parent(self) -> None:
        """Does nothing: an object needs no folder."""

    def way_to(self, place: StoragePath) -> str | None:
        if not isinstance(place, BucketPath) or place.address[:2] != self.address[:2]:
            return None
        return posixpath.relpath(f"/{place.key}", f"/{self.key}")

    def follow(self, way: str) -> StoragePath:
        there = as_path(way)
        scheme, bucket, key = self.address
        if there.is_absolute():
            return there
        return as_path(f"{scheme}://{bucket}{posixpath.normpath(posixpath.join('/', key, way))}")

    def kvstore(self) -> dict[str, Any]:
        scheme, bucket, key = self.address
        return {"driver": buckets.DRIVERS[scheme], "bucket": bucket, "path": f"{key}/"}

    def storage_error(self, text: str) -> Exception | None:
        return buckets.explained(str(self), self.objects.where, text)

    def local_folder(self) -> "LocalFolder":
        return _CopiedFolder(self)

    def growing(self, kept: Sequence[str]) -> "GrowingLines":
        return GrowingObjects(self.objects, self.key, kept)

    def read_grown(self) -> bytes:
        parts = (self.objects.read(buckets.part_name(self.key, number)) for number in itertools.count())
        return b"".join(found.content for found in itertools.takewhile(lambda found: found is not None, parts) if found)

    def write_grown(self, content: bytes) -> None:
        self.growing([line.decode() for line in content.splitlines(keepends=True)])


GrowingLines = TextIO | GrowingObjects
"""A file of lines that are appended, each with its end: `write`, `flush`, after which all are there, and `close`."""


class LocalFolder:
    """A folder on this machine's disk whose files belong to a place: it is that place, or they are copied there."""

    def __init__(self, path: Path):
        self.path = path

    def flush(self) -> None:
        """Returns when all files are in their place."""

    def close(self) -> None:
        """Puts all files in their place, and ends the use of the folder."""


class _CopiedFolder(LocalFolder):
    """A temporary folder whose files are copied to a bucket, all but hidden ones."""

    def __init__(self, place: BucketPath):
        self._place = place
        self._temporary = tempfile.TemporaryDirectory(prefix="moe-jax-")
        super().__init__(Path(self._temporary.name))

    def flush(self) -> None:
        for file in sorted(self.path.rglob("*")):
            if file.is_file() and not file.name.startswith("."):
                (self._place / file.relative_to(self.path)).write_durably(file.read_bytes())

    def close(self) -> None:
        self.flush()
        self._temporary.cleanup()


def as_path(path: str | os.PathLike[str]) -> StoragePath:
    """Returns a text or another path as a `StoragePath`; raises `InputError` for an address without a bucket.

    An address is recognised even if `Path` has turned its two slashes into one.
    """
    if isinstance(path, StoragePath):
        return path
    return BucketPath(str(buckets.parse_address(path))) if buckets.is_in_bucket(path) else StoragePath(path)


def read_generation(path: StoragePath) -> Found | None:
    """Returns the object at a path in a bucket, with its generation; None if there is none."""
    assert isinstance(path, BucketPath)
    return path.objects.read(path.key)


def write_over(path: StoragePath, content: bytes, generation: bytes) -> bytes | None:
    """Writes an object if it still has this generation; returns the new one, None if another process has written it."""
    assert isinstance(path, BucketPath)
    return path.objects.write(path.key, content, over=generation)


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether the parts of a path match those of a pattern, where `**` stands for any number of parts.

    A hidden part matches only a pattern that begins with a dot.
    """
    if not patterns or not names:
        return not names and all(pattern == "**" for pattern in patterns)
    hidden = names[0].startswith(".") and not patterns[0].startswith(".")
    if patterns[0] == "**":
        return _matches(names, patterns[1:]) or (not hidden and _matches(names[1:], patterns))
    return not hidden and fnmatch.fnmatchcase(names[0], patterns[0]) and _matches(names[1:], patterns[1:])


_MOST_DEPTHS = 4


def _bounded(parts: Sequence[str]) -> str:
    """Returns a pattern without one `**` after another, which match the same files, in a time that doubles with each.

    Raises:
      InputError: for more `**` than anybody needs.
    """
    kept = [part for part, before in zip(parts, ("", *parts), strict=False) if not part == before == "**"]
    if kept.count("**") > _MOST_DEPTHS:
        raise InputError(f"a pattern has at most {_MOST_DEPTHS} parts **, got {shown('/'.join(parts))}")
    return "/".join(kept)


_MOST_NAMES = 1000


def raise_no_file(what: str, path: str | os.PathLike[str]) -> NoReturn:
    """Says that there is no file of a kind at a path.

    Raises:
      InputError: if it is a directory.
      FileNotFoundError: if it is absent.
    """
    if as_path(path).is_dir():
        raise InputError(f"{path} is a directory, expected a file: {what}")
    raise FileNotFoundError(f"no {what} at {path}{nearest_path(path)}")


def nearest_path(path: str | os.PathLike[str]) -> str:
    """Returns ` (did you mean 'x'?)` for the name beside an absent path that is closest to its own.

    If the folder that it would be in is absent too, the name is that of a folder. Empty for a path that exists.
    """
    path = Path(path)
    with contextlib.suppress(OSError):
        if as_path(path).on_disk is not None and not path.exists():
            while not path.parent.exists():
                path = path.parent
            names = (entry.name for entry in itertools.islice(os.scandir(path.parent), _MOST_NAMES))
            return nearest(path.name, names, cutoff=0.8)
    return ""
