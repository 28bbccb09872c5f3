"""The file of results: read when a benchmark starts, written after every run."""

import dataclasses
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any, ClassVar

_PACKAGES = ("jax", "flax", "optax", "numpy")


class ResultsFile:
    """Nested dictionaries of numbers, kept in a JSON file. A benchmark derives from it to say what its settings are.

    Attributes:
      settings_type: a dataclass of JSON values.
      settings: of all runs in the file.
    """

    settings_type: ClassVar[type]

    def __init__(self, file: Path, settings: Any):
        """Reads the file, if there is one.

        Args:
          file: to read and write.
          settings: of the runs to come; None: there are none to come.

        Raises:
          SystemExit: if the file holds results of other settings, or is needed and not there.
        """
        self._file = file
        if not file.exists():
            if settings is None:
                raise SystemExit(f"no results at {file}")
            self.settings = settings
            self._data: dict[str, Any] = {"settings": dataclasses.asdict(settings), "environment": _environment()}
            return
        self._data = json.loads(file.read_text())
        self.settings = self.settings_type(**self._data["settings"])
        there = self._data["settings"]
        here = there if settings is None else dataclasses.asdict(settings)
        differ = [f"{name} {there[name]} there, {value} here" for name, value in here.items() if there[name] != value]
        if differ:
            raise SystemExit(f"{file} holds results of other settings ({', '.join(differ)}); choose another --out")

    @property
    def environment(self) -> dict[str, Any]:
        """Versions and machine of the first run."""
        return self._data["environment"]

    def get(self, *path: str) -> Any:
        """What lies at a path of keys; None if nothing does."""
        node: Any = self._data
        for key in path:
            if not isinstance(node, dict) or key not in node:
                return None
            node = node[key]
        return node

    def put(self, *path: str, value: Any) -> None:
        """Stores a value and writes the file; a kill leaves the old file or the new one."""
        node = self._data
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self._data, indent=1) + "\n")
        partial.replace(self._file)


def _environment() -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **versions, "machine": platform.machine(), "threads": os.cpu_count()}
