"""Lines of text that are added over time to a file in a bucket, where no object can be appended to.

They are written in parts, `metrics.jsonl`, `metrics.jsonl.1`, ... The last part is written anew whenever lines are due;
once it is large, another one begins. Readers read parts by name until one does not exist.
"""

import time
from collections.abc import Iterable

from moe_jax.files.remote.remote_path import BucketPath

_PART_BYTES = 1 << 20
_SECONDS = 30.0


class RemoteLines:
    """Writes lines to a bucket, within some time after they came, or when they are flushed."""

    def __init__(self, path: BucketPath, lines: Iterable[str]):
        """Replaces the existing parts.

        Args:
          path: of the first part.
          lines: lines to begin with, each with its line end.
        """
        self._path = path
        self._part, self._text, self._changed = 0, "", False
        for line in lines:
            self._add(line)
        self.flush()
        _remove_from(path, self._part + 1)
        self._written = time.monotonic()

    def write(self, line: str) -> None:
        """Adds a line, and writes the last part if it is due."""
        self._add(line)
        if time.monotonic() - self._written > _SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes the lines that are not in the bucket yet."""
        if self._changed:
            part_of(self._path, self._part).write_bytes(self._text.encode())
        self._changed, self._written = False, time.monotonic()

    def close(self) -> None:
        """Writes the remaining lines."""
        self.flush()

    def _add(self, line: str) -> None:
        if len(self._text) >= _PART_BYTES:
            self.flush()
            self._part, self._text = self._part + 1, ""
        self._text += line
        self._changed = True


def part_of(path: BucketPath, number: int) -> BucketPath:
    """Returns the object of a part."""
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


def read_remote_lines(path: BucketPath) -> bytes:
    """Returns the content of all parts."""
    content, number = b"", 0
    while (found := path.objects.read(part_of(path, number).key)) is not None:
        content, number = content + found.content, number + 1
    return content


def _remove_from(path: BucketPath, number: int) -> None:
    while (part := part_of(path, number)).is_file():
        part.unlink()
        number += 1
