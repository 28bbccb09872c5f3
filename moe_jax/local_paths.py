"""What can be said about a path before anything is opened: it is local, can be written, and lies beside its source."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from moe_jax.errors import InputError, shown

_LONGEST = 4096
# `Path` makes one slash of two. One letter before the colon is a drive of Windows.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_local(path: Path | str) -> None:
    """Raises `InputError` for an address such as `gs://bucket/model`, and for what no path can hold."""
    text = os.fspath(path)
    if len(text) > _LONGEST:
        raise InputError(f"{shown(text)} has {len(text):,} characters, more than a path can have")
    if _ADDRESS.match(text):
        address = re.sub(":/+", "://", text, count=1)
        raise InputError(
            f"{shown(address)} is an address and not a path; models and data are read from and written to local or "
            "mounted disks only, so copy it to one first"
        )
    if "\0" in text:
        raise InputError(f"{shown(text)} holds a zero byte, which no path can")


def check_model_path(path: Path | str) -> None:
    """Raises `InputError` unless a model can lie at `path`: see `check_local`, and the path has to be UTF-8."""
    check_local(path)
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise InputError(f"{shown(os.fspath(path))} is not UTF-8, as paths of models must be; rename it") from None


def check_beside(target: Path, sources: Iterable[Path]) -> None:
    """Raises `InputError` if `target` lies inside one of the directories that it is made from."""
    resolved = Path(target).resolve()
    for source in sources:
        if Path(source).resolve() in resolved.parents:
            raise InputError(
                f"{target} lies inside {source}, which it is made from and which is never changed; choose a place "
                "outside of it"
            )
