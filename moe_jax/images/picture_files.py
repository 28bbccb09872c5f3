"""Reads the files of pictures; those of data by names inside a folder, which they cannot leave."""

import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import UInt8

from moe_jax.core.errors import InputError, shown
from moe_jax.files.json_toml import is_unicode
from moe_jax.files.regular_files import Directory, hold, read_regular
from moe_jax.images.decoding import MAX_BYTES, decode_picture

_LONGEST_NAME = 4096
_LONGEST_SHOWN = 255  # characters of a name in messages; those of files have as many bytes at most


def read_picture(
    path: str | os.PathLike[str], *, remark: Callable[[str], None] | None = None
) -> UInt8[np.ndarray, "H W 3"]:
    """Decodes the picture at a path, which a user gives; `remark` as in `decode_picture`.

    Raises:
      FileNotFoundError: if there is none.
      InputError: if it is no regular file, larger than `MAX_BYTES`, in which case nothing of it is read, or no picture.
    """
    name = os.fspath(path)
    return decode_picture(_bytes_of(name, name, None), name, remark=remark)


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
        where, directory, file = self._place(name)
        return _bytes_of(file, where, directory)

    def check(self, name: str) -> None:
        """Raises what `read` raises for a name that leads nowhere, or out of the folder; reads nothing."""
        where, directory, file = self._place(name)
        try:
            there = directory.is_file(file)
        except OSError as error:
            raise _unreadable(where, error) from None
        if not there:
            raise FileNotFoundError(f"no picture at {where}")

    def _place(self, name: str) -> tuple[str, Directory, str]:
        """Returns a picture's place in words, its directory and its name there."""
        parts, where = _parts(name, self.path), f"{self.path}/{shown_name(name)}"
        try:
            directory, file = self._directory.within(parts)
        except OSError as error:
            raise _unreadable(where, error) from None
        return where, directory, file

    def picture(self, name: str, *, remark: Callable[[str], None] | None = None) -> UInt8[np.ndarray, "H W 3"]:
        """Returns a picture, decoded; `remark` as in `decode_picture`, and errors as of `read` and it."""
        return decode_picture(self.read(name), f"{self.path}/{shown_name(name)}", remark=remark)


def shown_name(name: str) -> str:
    """Returns the name of a picture for a message: whole, but on one line and never longer than a name of a file."""
    return name if len(name) <= _LONGEST_SHOWN and name.isprintable() else shown(name)


def _parts(name: str, folder: Path | str) -> list[str]:
    is_text = isinstance(name, str) and is_unicode(name)
    if not is_text or not name or "\0" in name or len(name) > _LONGEST_NAME:
        raise InputError(f"{folder}: {shown(name)} is no name of a picture; expected one inside of the folder")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        what = "an absolute path" if path.is_absolute() else "a path with '..'"
        raise InputError(f"{folder}: {shown(name)} is {what}; expected the name of a picture inside of the folder")
    return list(path.parts)


def _bytes_of(path: str, where: str, inside: Directory | None) -> bytes:
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
