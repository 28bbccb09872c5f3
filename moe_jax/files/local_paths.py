"""Checks of paths before anything is opened: whether one is local or in a bucket, and not inside its own source."""

import os
from collections.abc import Iterable
from pathlib import Path

from moe_jax.core.errors import InputError, shown
from moe_jax.files.remote.address import is_in_bucket, parse_address, written_out
from moe_jax.files.storage_path import as_path

_LONGEST = 4096


def check_local(path: Path | str, *, buckets: bool = False) -> None:
    """Raises `InputError` for a text that cannot be a path, and for an address such as `gs://bucket/model`.

    With `buckets`, addresses of buckets are accepted.
    """
    text = os.fspath(path)
    if buckets and is_in_bucket(path):
        parse_address(path)
        return
    if len(text) > _LONGEST:
        raise InputError(f"{shown(text)} has {len(text):,} characters, more than a path can have")
    address = written_out(text)
    if address is not None:
        raise InputError(
            f"{shown(address)} is an address and not a path; models, runs, data and reports can be in buckets "
            "(gs://BUCKET/NAME), but this has to be on a local or mounted disk: give a path there"
        )
    if "\0" in text:
        raise InputError(f"{shown(text)} holds a zero byte, which no path can")


def check_model_path(path: Path | str) -> None:
    """Raises `InputError` unless a model can lie at `path`: a UTF-8 path in a bucket, or on a disk (`check_local`)."""
    check_local(path, buckets=True)
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise InputError(f"{shown(os.fspath(path))} is not UTF-8, as paths of models must be; rename it") from None


def check_beside(target: Path, sources: Iterable[Path]) -> None:
    """Raises `InputError` if `target` lies inside one of the directories that it is made from."""
    resolved = as_path(target).resolve()
    for source in sources:
        if as_path(source).resolve() in resolved.parents:
            raise InputError(
                f"{target} lies inside {source}, which it is made from and which is never changed; choose a place "
                "outside of it"
            )
