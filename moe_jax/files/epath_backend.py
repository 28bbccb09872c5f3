"""Gives Orbax addresses of buckets as paths of `etils.epath`, with our requests and no second client.

Etils itself would use gcsfs, which caches listings for as long as the process lives and has a login of its own.
"""

import io
import posixpath
from typing import Any

from etils import epath
from etils.epath import backend, stat_utils
from etils.epath.gpath import PosixGPath

from moe_jax.files.storage_path import BucketPath, as_path

_ITEM = "state"  # Orbax's name for the only item of a checkpoint


class _Writing(io.BytesIO):
    """A file that becomes an object when it is closed without an error."""

    def __init__(self, path: BucketPath, before: bytes = b""):
        super().__init__(before)
        self.seek(0, io.SEEK_END)
        self._path = path

    def close(self) -> None:
        if not self.closed:
            self._path.write_bytes(self.getvalue())
        super().close()

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            super().close()


class _Buckets(backend.Backend):
    """Our buckets as a file system of `epath`.

    Orbax expects to find the folders that it made, whatever listings show: they are objects whose names end with "/".
    """

    def open(self, path: Any, mode: str) -> Any:
        place = _place(path)
        binary: Any
        if "r" in mode:
            binary = io.BytesIO(place.read_bytes())
        else:
            binary = _Writing(place, place.read_bytes() if "a" in mode and place.is_file() else b"")
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding="utf-8")

    def exists(self, path: Any) -> bool:
        return _place(path).is_file() or self.isdir(path)

    def isdir(self, path: Any) -> bool:
        place = _place(path)
        known = (f"{place.key}/", f"{place.key}/zarr.json")  # of an array TensorStore makes the folder
        return any(place.objects.read(name) is not None for name in known) or place.is_dir()

    def listdir(self, path: Any) -> list[str]:
        place = _place(path)
        names = {child.name for child in place.iterdir()}
        if place.objects.read(f"{place.key}/{_ITEM}/") is not None:  # whatever the listing shows
            names.add(_ITEM)
        return sorted(names)

    def glob(self, path: Any) -> list[str]:
        folder, pattern = posixpath.split(str(path))
        return [str(child) for child in _place(folder).glob(pattern)]

    def mkdir(self, path: Any, *, exist_ok: bool = False, mode: int | None = None) -> None:
        _place(path).mark_folder()

    makedirs = mkdir

    def rmtree(self, path: Any) -> None:
        _place(path).remove_tree()

    def remove(self, path: Any) -> None:
        _place(path).unlink()

    def rename(self, path: Any, dst: Any) -> None:
        raise OSError(f"{path} is in a bucket, where nothing is renamed")

    replace = rename

    def walk(self, top: Any, **_: Any) -> Any:
        raise OSError(f"{top} is in a bucket, whose folders are not walked")

    def copy(self, path: Any, dst: Any, overwrite: bool) -> None:
        _place(dst).write_bytes(_place(path).read_bytes())

    def stat(self, path: Any) -> stat_utils.StatResult:
        place = _place(path)
        found = place.objects.read(place.key)
        if found is None and not place.is_dir():
            raise FileNotFoundError(f"{place} does not exist")
        length = 0 if found is None else len(found.content)
        return stat_utils.StatResult(found is None, length, mtime=0, owner=None, group=None, mode=None)


_BACKEND = _Buckets()


class BucketGPath(PosixGPath):
    """An address as a path of `epath`."""

    @property
    def _backend(self) -> backend.Backend:
        return _BACKEND


def register() -> None:
    """Makes `epath.Path("gs://...")` use these requests from now on."""
    epath.register_path_cls("gs://")(BucketGPath)


def _place(path: Any) -> BucketPath:
    place = as_path(str(path))
    assert isinstance(place, BucketPath), path
    return place
