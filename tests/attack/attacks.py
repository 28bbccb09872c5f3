"""A class of inputs: how to make them, what reads them, and how to tell that one was read wrongly."""

import contextlib
import dataclasses
import functools
import importlib
import io
import pkgutil
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_jax.core.errors import InputError

CLASSES = f"{__package__}.classes"


def nothing_besides() -> tuple[float, int]:
    """For readers that do all of their work in their own process."""
    return 0.0, 0


def nothing_wrong(original: Any, folder: Path, read: Any) -> str | None:
    """For readers of which nothing more is asked than that they end well."""
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attack:
    """A class of inputs and its reader. All of it runs in processes of its own, which `trial.py` starts.

    Attributes:
      name: of the class, in tables and in `--only`.
      original: makes what the inputs are mutations of, once for every process: files as bytes, parsed files, weights.
      make: writes one input into an empty folder: the same one for the same random numbers. Nothing that it contains
        may be run or written; a payload writes `canary(folder)`.
      read: reads the input in a folder and may write below another, which is empty and its own. It returns anything,
        or refuses the input by `InputError` or `OSError`, as the command line does.
      wrong: says what is wrong about what was read, in a few words; None: nothing. It must know that from elsewhere:
        from the original, or from another reader.
      quick: how many inputs the tests try.
      share: how many the long run tries, in proportion to those of other classes; None: as many as the tests.
      least: how many the long run tries at least, whatever the share.
      max_seconds: of processor time that reading may take; more only where what is read is worked on, too.
      max_bytes: of memory that reading may take, above what the process had.
      besides: returns the processor time that other processes of the reader have taken so far, in seconds, and the
        most bytes that they have had; both count for the reader.
    """

    name: str
    original: Callable[[], Any]
    make: Callable[[random.Random, Any, Path], None]
    read: Callable[[Path, Path], Any]
    wrong: Callable[[Any, Path, Any], str | None] = nothing_wrong
    quick: int = 200
    share: int | None = None
    least: int = 0
    max_seconds: float = 5.0
    max_bytes: int = 500_000_000
    besides: Callable[[], tuple[float, int]] = nothing_besides


def canary(folder: Path) -> Path:
    """The file whose existence says that a payload was run."""
    return folder.parent / "canary"


@functools.cache
def all_attacks(package: str = CLASSES) -> dict[str, Attack]:
    """The classes of inputs by name: all in the tuples `ATTACKS` of the modules of a package."""
    found: dict[str, Attack] = {}
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        for attack in importlib.import_module(module.name).ATTACKS:
            assert attack.name not in found, f"two attacks are called {attack.name!r}"
            found[attack.name] = attack
    return found


def command(*arguments: str | Path) -> str:
    """Runs `moe-jax` in this process, as a `read` does that goes through the command line.

    Returns:
      What it printed.

    Raises:
      InputError: with what it said, if its exit code says that the input is at fault.
    """
    from moe_jax.commands.cli import USER_ERROR, main

    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        code = main([str(argument) for argument in arguments])
    if code == USER_ERROR:
        raise InputError(said.getvalue())
    assert code == 0, f"exit code {code}: {said.getvalue()}"
    return printed.getvalue()
