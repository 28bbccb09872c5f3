"""Files that programs write bit by bit: folders of this machine, and lines that are appended to a file.

In a bucket nothing grows: a folder is copied there when it is complete, and lines are written as objects.
"""

import itertools
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_jax.files.storage_path import BucketPath, StoragePath


class LocalFolder:
    """A folder on this machine's disk whose files belong to a place: it is that place, or they are copied there."""

    def __init__(self, place: "StoragePath", path: Path):
        self._place, self.path = place, path

    def flush(self) -> None:
        """Returns when all files are in their place."""

    def close(self) -> None:
        """Puts all files in their place, and ends the use of the folder."""
        self.flush()


class CopiedFolder(LocalFolder):
    """A temporary folder whose files are copied to a bucket, all but hidden ones."""

    def __init__(self, place: "StoragePath"):
        self._temporary = tempfile.TemporaryDirectory(prefix="moe-jax-")
        super().__init__(place, Path(self._temporary.name))

    def flush(self) -> None:
        for file in sorted(self.path.rglob("*")):
            if file.is_file() and not file.name.startswith("."):
                (self._place / file.relative_to(self.path)).write_durably(file.read_bytes())

    def close(self) -> None:
        super().close()
        self._temporary.cleanup()


class GrowingFile:
    """Lines that are appended to a file, and are there at once."""

    def __init__(self, path: "StoragePath"):
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: str) -> None:
        """Appends a line, which is given with its end."""
        self._file.write(line)
        self._file.flush()

    def flush(self) -> None:
        """Returns when all lines are there."""

    def close(self) -> None:
        """Stores all lines, and closes the file."""
        self._file.close()


class GrowingObjects(GrowingFile):
    """Lines that grow in a bucket, where nothing can be appended to an object.

    They are written in parts, `metrics.jsonl`, `metrics.jsonl.1`, ... The last part is rewritten when it is flushed, or
    some time after lines came; when it has become large, another one begins. A reader asks for the parts by name until
    one does not exist.
    """

    PART_BYTES = 1 << 20
    SECONDS = 30.0

    def __init__(self, path: "BucketPath", lines: Iterable[str]):
        self._path = path
        self._part, self._text, self._changed = 0, "", False
        for line in lines:
            self._add(line)
        self.flush()
        later = map(path.part, itertools.count(self._part + 1))
        for part in itertools.takewhile(lambda part: part.is_file(), later):
            part.unlink()
        self._written = time.monotonic()

    def write(self, line: str) -> None:
        self._add(line)
        if time.monotonic() - self._written > self.SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._changed:
            self._path.part(self._part).write_bytes(self._text.encode())
        self._changed, self._written = False, time.monotonic()

    def close(self) -> None:
        self.flush()

    def _add(self, line: str) -> None:
        if len(self._text) >= self.PART_BYTES:
            self.flush()
            self._part, self._text = self._part + 1, ""
        self._text += line
        self._changed = True
