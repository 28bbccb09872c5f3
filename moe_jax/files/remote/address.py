"""Addresses: names of places in a bucket, not on a disk."""

import os
import re
from pathlib import PurePath
from typing import NamedTuple

from moe_jax.core.errors import InputError, shown

DRIVERS = {"gs": "gcs"}
"""Scheme of the supported addresses -> TensorStore's driver."""

# `Path` makes one slash of two. One letter before the colon is a drive of Windows.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


class Address(NamedTuple):
    """A place in a bucket.

    Attributes:
      scheme: such as `gs`.
      bucket: its name.
      key: names joined by "/"; empty: the bucket itself.
    """

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")


def written_out(path: str | os.PathLike[str]) -> str | None:
    """Returns the address that a path stands for, with both slashes, whatever its scheme; None for any other path."""
    text = os.fspath(path)
    match = _ADDRESS.match(text)
    return f"{match[1]}://{text[match.end() :]}" if match else None


def is_in_bucket(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address of a supported scheme."""
    match = _ADDRESS.match(os.fspath(path))
    return match is not None and match[1] in DRIVERS


def parse_address(path: str | os.PathLike[str]) -> Address:
    """Returns the parts of an address of a supported scheme.

    Raises:
      InputError: if the bucket cannot be called so, or a name in it is `.` or `..`.
    """
    text = written_out(path)
    assert text is not None and is_in_bucket(path), f"{path} is no address"
    scheme, _, rest = text.partition("://")
    bucket, *names = [name for name in rest.split("/") if name] or [""]
    if not _BUCKET.fullmatch(bucket):
        raise InputError(
            f"{shown(text)}: {shown(bucket)} is not the name of a bucket; expected {scheme}://BUCKET/FOLDER"
        )
    if any(name in (".", "..") for name in PurePath("/".join(names)).parts):
        raise InputError(f"{shown(text)} has . or .. in it, which are names like any other in a bucket; write it out")
    return Address(scheme, bucket, "/".join(names))
