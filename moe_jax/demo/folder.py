"""The folder of a demo, which knows the steps that are done, so that a demo that was stopped goes on where it was."""

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_jax.core.errors import InputError, shown
from moe_jax.files.json_toml import ANYTHING, parse_json
from moe_jax.files.staging import check_not_held, hold_alone
from moe_jax.files.storage_path import as_path

MARKER = ".made-by-moe-jax-demo"
"""A folder with this file was made by a demo, and another demo may replace it."""
_HOLDER = ".lock"
_ANOTHER = "choose another --dir"


class Steps:
    """The steps of a demo that are done; every change is on the disk at once.

    Args:
      folder: of the demo.
      known: `settings`, `seconds` by the title of a step, and `kept`, the values by their names.
    """

    def __init__(self, folder: Path, known: dict[str, Any]):
        self._file, self._known = folder / MARKER, known

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that every step took, by its title, those before an interruption included."""
        return dict(self._known["seconds"])

    def kept(self, name: str, make: Callable[[], Any], fits: Callable[[Any], bool]) -> Any:
        """Returns a value of JSON that is made once, and kept under a name; one that does not fit is made again."""
        if name not in self._known["kept"] or not fits(self._known["kept"][name]):
            self._known["kept"][name] = make()
            self.write()
        return self._known["kept"][name]

    @contextlib.contextmanager
    def timed(self, title: str) -> Iterator[None]:
        """Adds the seconds of the block to those of a step, however the block ends."""
        began = time.monotonic()
        try:
            yield
        finally:
            before = self._known["seconds"].get(title, 0.0)
            self._known["seconds"][title] = before + time.monotonic() - began
            self.write()

    def write(self) -> None:
        """Writes all that is known; a kill leaves the file before or this one."""
        as_path(self._file).replace_content(json.dumps(self._known, indent=1).encode())


@contextlib.contextmanager
def open_folder(folder: Path, settings: Mapping[str, Any], *, resume: bool) -> Iterator[Steps]:
    """Opens the folder of a demo, in which no other demo works until the end of the block.

    It is made empty; one that an earlier demo made is replaced. A demo that is resumed finds its folder as it left it,
    and begins anew where there is none.

    Args:
      folder: the folder.
      settings: values of JSON that decide what the demo makes.
      resume: whether to go on.

    Raises:
      InputError: if the folder holds something else, is in use, or is to be resumed with other settings.
    """
    was_made = check_folder(folder)
    known = _read(folder, settings) if was_made and resume else None
    held = hold_alone(as_path(folder), _HOLDER, instead=_ANOTHER)
    try:
        if known is None:
            known = {"settings": dict(settings), "seconds": {}, "kept": {}}
            _empty(folder)
        steps = Steps(folder, known)
        steps.write()
        yield steps
    finally:
        held.release()


def check_folder(folder: Path) -> bool:
    """Returns whether a demo made a folder, which may also be absent or empty. Changes nothing.

    Raises:
      InputError: if the folder holds something else, or another demo works in it.
    """
    check_not_held(as_path(folder), _HOLDER, instead=_ANOTHER)
    if (folder / MARKER).is_file():
        return True
    is_new = not folder.exists() or (folder.is_dir() and all(one.name == _HOLDER for one in folder.iterdir()))
    if not is_new:
        raise InputError(f"{folder} exists and was not made by a demo; {_ANOTHER}")
    return False


def _empty(folder: Path) -> None:
    """Removes all that a demo made. A kill leaves a folder that a demo made, and none that could go on."""
    Steps(folder, {}).write()
    for one in folder.iterdir():
        if one.name in (MARKER, _HOLDER):
            continue
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one)
        else:
            one.unlink()


def _read(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is known of a demo that goes on with its `settings`."""
    try:
        known = parse_json((folder / MARKER).read_bytes(), where=str(folder / MARKER), allow=ANYTHING)
    except InputError:
        known = None
    if (
        not isinstance(known, dict)
        or not all(isinstance(known.get(name), dict) for name in ("settings", "seconds", "kept"))
        or not all(is_number(took) and took >= 0 for took in known["seconds"].values())
    ):
        raise InputError(
            f"{folder / MARKER} is damaged, of another version, or of a demo that was stopped before its first step; "
            "leave out --resume to begin anew"
        )
    differ = [name for name, value in settings.items() if known["settings"].get(name) != value]
    if differ:
        there = ", ".join(f"{name} {shown(known['settings'].get(name))}, now {settings[name]}" for name in differ)
        raise InputError(f"{folder} holds a demo with other options ({there}); give these, or leave out --resume")
    return known


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
