"""Reads the files of pictures; those of data by names inside a folder, which they cannot leave."""

import os
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import UInt8

from moe_jax.core.errors import InputError, shown
from moe_jax.files.regular_files import BucketDirectory, HeldDirectory, hold, read_regular
from moe_jax.images.decoding import MAX_BYTES, decode_picture

_LONGEST_NAME = 4096


def read_picture(path: str | os.PathLike[str]) -> UInt8[np.ndarray, "H W 3"]:
    """Decodes the picture at a path, which a user gives.

    Raises:
      FileNotFoundError: if there is none.
      InputError: if it is no regular file, larger than `MAX_BYTES`, in which case nothing of it is read, or no picture.
    """
    name = os.fspath(path)
    return decode_picture(_bytes_of(name, name, None), name)


class PictureFolder:
    """A folder of pictures that data name: no name leads out of it, not by `..`, an absolute path or a link.

    It is held open: names are of this folder, even if another takes its path.

    Attributes:
      path: of the folder; for messages.
    """

    def __init__(self, path: Path | str):
        """Opens the folder, on a disk or in a bucket; raises `FileNotFoundError` or `NotADirectoryError` as `hold`."""
        self.path = path
        self._directory = hold(path)

    def read(self, name: str) -> bytes:
        """Returns the bytes of a picture, which may lie in a folder inside of this one.

        Raises:
          FileNotFoundError: if there is none.
          InputError: for a name that leads out of the folder; or as `read_picture`.
        """
        parts = _parts(name, self.path)
        where = f"{self.path}/{name}"
        if isinstance(self._directory, BucketDirectory):
            return _bytes_of("/".join(parts), where, self._directory)
        return _bytes_of(*self._without_links(parts, where))

    def picture(self, name: str) -> UInt8[np.ndarray, "H W 3"]:
        """Returns a picture, decoded; raises errors as `read` and `decode_picture` do."""
        return decode_picture(self.read(name), f"{self.path}/{name}")

    def _without_links(self, parts: list[str], where: str) -> tuple[str, str, HeldDirectory]:
        """Returns a name, `where`, and the directory that it is in, behind links that stay inside of the folder."""
        assert isinstance(self._directory, HeldDirectory)
        # Of the folder that is held open, wherever that is by now.
        root = os.path.realpath(f"/proc/self/fd/{self._directory.descriptor}")
        if root.startswith("/proc/"):  # no Linux
            self._directory.check_in_place()
            root = os.path.realpath(self.path)
        real = os.path.realpath(os.path.join(root, *parts))
        if os.path.commonpath([root, real]) != root:
            raise InputError(f"{where} is a link out of the folder; pictures of data lie inside of it")
        *folders, name = Path(real).relative_to(root).parts or (".",)
        directory = self._directory
        try:
            for folder in folders:
                # Whatever has become a link since then is not followed.
                directory = HeldDirectory(folder, inside=directory, links=False)
        except OSError as error:
            raise _unreadable(where, error) from None
        return name, where, directory


def _parts(name: str, folder: Path | str) -> list[str]:
    if not isinstance(name, str) or not name or "\0" in name or len(name) > _LONGEST_NAME:
        raise InputError(f"{folder}: {shown(name)} is no name of a picture; expected one inside of the folder")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        what = "an absolute path" if path.is_absolute() else "a path with '..'"
        raise InputError(f"{folder}: {shown(name)} is {what}; expected the name of a picture inside of the folder")
    return list(path.parts)


def _bytes_of(path: str, where: str, inside: HeldDirectory | BucketDirectory | None) -> bytes:
    try:
        return read_regular(path, max_bytes=MAX_BYTES, inside=inside, links=inside is None)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise _unreadable(where, error) from None


def _unreadable(where: str, error: OSError | ValueError) -> Exception:
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"no picture at {where}")
    return InputError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}")
