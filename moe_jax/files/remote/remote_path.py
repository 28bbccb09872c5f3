"""An address in a bucket as a path, and a folder of a bucket to read from.

A bucket has no folders: there is one where the name of an object goes on after it. What is known by its name is read as
it is now; what a listing shows may be some time old.
"""

import fnmatch
import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PosixPath
from typing import Any

import numpy as np

from moe_jax.core.errors import InputError
from moe_jax.files.remote.address import Address, is_in_bucket, parse_address, written_out
from moe_jax.files.remote.objects import AT_ONCE, Objects, objects_of
from moe_jax.files.remote.traffic import count


class BucketPath(PosixPath):
    """An address such as `gs://bucket/models/moe`, for code that takes a `Path`: names as ever, files by requests.

    What a bucket does not have, such as links and renaming, is not here; functions of `os` find nothing at it.
    """

    def __str__(self) -> str:
        return written_out(super().__str__()) or super().__str__()

    def __repr__(self) -> str:
        return f"BucketPath({str(self)!r})"

    def __fspath__(self) -> str:
        return str(self)

    def __hash__(self) -> int:
        return hash(str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketPath) and str(self) == str(other)

    @property
    def address(self) -> Address:
        """Its parts."""
        return parse_address(str(self))

    @property
    def objects(self) -> Objects:
        """The bucket."""
        address = self.address
        return objects_of(address.scheme, address.bucket)

    @property
    def key(self) -> str:
        """The name of the object, or of the folder."""
        return self.address.key

    def absolute(self) -> "BucketPath":
        return self

    def resolve(self, strict: bool = False) -> "BucketPath":
        return self

    def is_symlink(self) -> bool:
        return False

    def is_file(self, **_: Any) -> bool:
        return bool(self.key) and self.objects.generation(self.key) is not None

    def is_dir(self, **_: Any) -> bool:
        """Whether there is anything in the folder: a finished model, whatever listings show, or what they show."""
        return not self.key or (self / "config.json").is_file() or bool(self.objects.names(self.key))

    def exists(self, **_: Any) -> bool:
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator["BucketPath"]:
        for name in sorted({name.split("/")[0] for name in self.objects.names(self.key)} - {""}):
            yield self / name

    def glob(self, pattern: str, **_: Any) -> Iterator["BucketPath"]:
        """What is in the folder and has a name of this pattern; not below."""
        return (child for child in self.iterdir() if fnmatch.fnmatchcase(child.name, pattern))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: a folder is there with what is in it."""

    def read_bytes(self) -> bytes:
        found = self.objects.read(self.key)
        if found is None:
            raise FileNotFoundError(f"{self} does not exist")
        return found.content

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


def as_path(path: str | os.PathLike[str]) -> Path:
    """The path that a text, or another path, stands for: a `BucketPath` for an address, also for one that `Path` has
    made one slash of two in."""
    if isinstance(path, BucketPath):
        return path
    if is_in_bucket(path):
        return BucketPath(str(parse_address(path)))
    return Path(path)


class BucketDirectory:
    """A folder of a bucket that is read; it has what is read of a `HeldDirectory`.

    Attributes:
      path: of the folder.
    """

    def __init__(self, path: BucketPath):
        self.path = path
        self._objects, self._folder = path.objects, path.key

    def check_in_place(self) -> None:
        """Does nothing: objects are not replaced together, and of each that is read, the size is checked."""

    def is_file(self, name: str) -> bool:
        """Whether it has an object of this name."""
        return self._objects.generation(self._key(name)) is not None

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """An object.

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
        """Bytes of an object; see `Objects.size`."""
        found = self._objects.size(self._key(name))
        if found is None:
            raise FileNotFoundError(f"{self.path / name} does not exist")
        return found.size

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, np.ndarray]]) -> None:
        """Reads parts of an object at the same time, and counts their bytes.

        Args:
          name: of the object, relative to the folder.
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

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(read, ranges))

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name
