"""The folder of a demo, which knows the steps that are done, so that a demo that was stopped goes on where it was."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_jax.core.errors import InputError
from moe_jax.files.json_toml import ANYTHING, parse_json
from moe_jax.files.storage_path import as_path

MARKER = ".made-by-moe-jax-demo"
"""A folder with this file was made by a demo, and another demo may replace it."""


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

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns a value of JSON that is made once, and kept under a name."""
        if name not in self._known["kept"]:
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


def open_folder(folder: Path, settings: Mapping[str, Any], *, resume: bool) -> Steps:
    """Opens the folder of a demo.

    It is made empty; one that an earlier demo made is replaced. A demo that is resumed finds its folder as it left it,
    and begins anew where there is none.

    Args:
      folder: the folder.
      settings: values of JSON that decide what the demo makes.
      resume: whether to go on.

    Raises:
      InputError: if the folder holds something else, or is to be resumed with other settings.
    """
    if folder.exists() and not (folder / MARKER).is_file():
        raise InputError(f"{folder} exists and was not made by a demo; choose another --dir")
    if resume and folder.exists():
        known = _read(folder)
        differ = [name for name, value in settings.items() if known["settings"].get(name) != value]
        if differ:
            there = ", ".join(f"{name} {known['settings'].get(name)}, now {settings[name]}" for name in differ)
            raise InputError(f"{folder} holds a demo with other options ({there}); give these, or leave out --resume")
        return Steps(folder, known)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    steps = Steps(folder, {"settings": dict(settings), "seconds": {}, "kept": {}})
    steps.write()
    return steps


def _read(folder: Path) -> dict[str, Any]:
    try:
        known = parse_json((folder / MARKER).read_bytes(), where=str(folder / MARKER), allow=ANYTHING)
    except InputError:
        known = None
    if not isinstance(known, dict) or not all(isinstance(known.get(name), dict) for name in _PARTS):
        raise InputError(f"{folder} was made by a demo of another version; leave out --resume to replace it")
    return known


_PARTS = ("settings", "seconds", "kept")
