"""Files of results: read when a benchmark starts, written after every run, with the commit of the code that ran."""

import dataclasses
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from evidence.stamp import Stamp, current_stamp

RESULTS = Path(__file__).resolve().parents[1] / "results"
Key = tuple[str, ...]
_NUMBERS = re.compile(r"\[\s+-?\d[-+.,\w\s]*\]")


@dataclasses.dataclass(frozen=True)
class NoSettings:
    """Of programs whose results can stand beside each other, whatever they were called with."""


class ResultsFile:
    """Nested dictionaries of numbers, kept in a JSON file. A benchmark derives from it to say what its settings are.

    The file's `made` is a list of stamps. The first is that of all figures that no other names in its `paths`; a path
    stands for all that lies below it, and the longest one counts.

    Attributes:
      settings_type: a dataclass of JSON values.
      names_at: the key of a path, by its first key, that says what was measured; otherwise the first.
      settings: of all runs in the file.
    """

    settings_type: ClassVar[type] = NoSettings
    names_at: ClassVar[dict[str, int]] = {}

    def __init__(self, file: Path, settings: Any, stamp: Callable[[], Stamp] = current_stamp):
        """Reads the file, if there is one.

        Args:
          file: to read and write.
          settings: of the runs to come; None: there are none to come.
          stamp: says what runs to come are made with.

        Raises:
          SystemExit: if the file holds results of other settings, or is needed and not there.
        """
        self._file = file
        self._stamp = stamp
        self._current: int | None = None
        self._one_at_a_time = threading.Lock()
        if not file.exists():
            if settings is None:
                raise SystemExit(f"no results at {file}")
            self.settings = settings
            self._data: dict[str, Any] = {"settings": dataclasses.asdict(settings), "made": []}
            return
        self._data = json.loads(file.read_text())
        self.settings = self.settings_type(**self._data["settings"])
        there = self._data["settings"]
        here = there if settings is None else dataclasses.asdict(settings)
        differ = [f"{name} {there[name]} there, {value} here" for name, value in here.items() if there[name] != value]
        if differ:
            raise SystemExit(f"{file} holds results of other settings ({', '.join(differ)}); choose another --out")

    def get(self, *path: str) -> Any:
        """What lies at a path of keys; None if nothing does."""
        node: Any = self._data
        for key in path:
            if not isinstance(node, dict) or key not in node:
                return None
            node = node[key]
        return node

    def put(self, *path: str, value: Any) -> None:
        """Stores a value with the stamp of now, and writes the file; a kill leaves the old file or the new one.

        Threads may do so at the same time.
        """
        with self._one_at_a_time:
            node = self._data
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = value
            self._stamp_path(path)
            self._write()

    def forget(self, *path: str) -> None:
        """Takes out what lies at a path, to be measured again; nothing if nothing does."""
        node = self.get(*path[:-1])
        if isinstance(node, dict) and node.pop(path[-1], None) is not None:
            self._write()

    def made(self) -> list[tuple[Stamp, list[Key]]]:
        """Every stamp that figures in the file have, with the paths of these figures."""
        found: dict[int, list[Key]] = {}
        for path in self._figures():
            found.setdefault(self._stamp_of(path), []).append(path)
        return [(_stamp(self._data["made"][index]), paths) for index, paths in sorted(found.items())]

    def stamp_of(self, *path: str) -> Stamp:
        """The stamp of the figure at a path."""
        return _stamp(self._data["made"][self._stamp_of(path)])

    def name(self, path: Key) -> str:
        """What a path says was measured, without seeds and values."""
        return path[min(self.names_at.get(path[0], 0), len(path) - 1)]

    def _figures(self) -> Iterator[Key]:
        """Paths of the innermost dictionaries."""

        def below(node: Any, path: Key) -> Iterator[Key]:
            inner = [key for key, value in node.items() if isinstance(value, dict)] if isinstance(node, dict) else []
            if len(inner) < len(node) or not inner:
                yield path
            else:
                for key in inner:
                    yield from below(node[key], (*path, key))

        for key, node in self._data.items():
            if key not in ("settings", "made") and node:
                yield from below(node, (key,))

    def _stamp_of(self, path: Key) -> int:
        """Index of the stamp of a figure."""
        best, length = 0, 0
        for index, made in enumerate(self._data["made"]):
            for start in made.get("paths", ()):
                if len(start) > length and path[: len(start)] == tuple(start):
                    best, length = index, len(start)
        return best

    def _stamp_path(self, path: Key) -> None:
        """Gives a path, and all below it, the stamp of now."""
        made = self._data["made"]
        if self._current is None:
            stamp = _fields(self._stamp())
            stamps = [{key: value for key, value in other.items() if key != "paths"} for other in made]
            if stamp not in stamps:
                made.append(stamp)
                stamps.append(stamp)
            self._current = stamps.index(stamp)
        for other in made:
            if "paths" in other:
                other["paths"] = [start for start in other["paths"] if tuple(start[: len(path)]) != path]
        if self._stamp_of(path) != self._current:
            made[self._current].setdefault("paths", []).append(list(path))

    def _write(self) -> None:
        partial = self._file.with_suffix(".partial")
        # Hundreds of numbers in a row read better in a line.
        text = _NUMBERS.sub(lambda list_: " ".join(list_[0].split()), json.dumps(self._data, indent=1))
        partial.write_text(text + "\n")
        partial.replace(self._file)


class Figures(ResultsFile):
    """Tables of a program that needs no report: lists of cells, measured together or one after another."""

    names_at: ClassVar[dict[str, int]] = {"tables": 1, "rows": 2}

    def __init__(
        self, name: str, out: Path = RESULTS, *, writes: bool = False, stamp: Callable[[], Stamp] = current_stamp
    ):
        """Opens `OUT/NAME.json`; what is not there yet is made if the program `writes`, with the `stamp` of now."""
        if writes:
            out.mkdir(parents=True, exist_ok=True)
        super().__init__(out / f"{name}.json", NoSettings() if writes else None, stamp)

    def rows(self, table: str) -> list[list[Any]]:
        """The rows of a table."""
        whole = self.get("tables", table)
        return whole["rows"] if whole else [row["cells"] for row in (self.get("rows", table) or {}).values()]

    def put_rows(self, table: str, rows: list[list[Any]]) -> None:
        """Stores a whole table."""
        self.put("tables", table, value={"rows": rows})

    def put_row(self, table: str, name: str, cells: list[Any]) -> None:
        """Stores one row of a table, under a name that it alone has."""
        self.put("rows", table, name, value={"cells": cells})


def _stamp(made: dict[str, Any]) -> Stamp:
    return Stamp(**{key: value for key, value in made.items() if key != "paths"})


def _fields(stamp: Stamp) -> dict[str, Any]:
    """As JSON, without what does not apply."""
    return {key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(stamp).items() if value or key == "commit"}  # fmt: skip
