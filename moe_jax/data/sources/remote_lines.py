"""Lines of text that grow in a bucket, where nothing can be appended to an object.

They are written in parts, `metrics.jsonl`, `metrics.jsonl.1`, ...: the last one anew whenever lines are due, and when
it has become large, another one begins. Parts are read by their names until one is not there.
"""

import time
from collections.abc import Iterable

from moe_jax.files.remote.remote_path import BucketPath

_PART_BYTES = 1 << 20
_SECONDS = 30.0


class RemoteLines:
    """Writes lines to a bucket, at the latest some time after they came, or when they are flushed."""

    def __init__(self, path: BucketPath, lines: Iterable[str]):
        """Replaces what is there.

        Args:
          path: of the first part.
          lines: to begin with, each with its end.
        """
        self._path = path
        self._part, self._text, self._changed = 0, "", False
        for line in lines:
            self._add(line)
        self.flush()
        _remove_from(path, self._part + 1)
        self._written = time.monotonic()

    def write(self, line: str) -> None:
        self._add(line)
        if time.monotonic() - self._written > _SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._changed:
            part_of(self._path, self._part).write_bytes(self._text.encode())
        self._changed, self._written = False, time.monotonic()

    def close(self) -> None:
        self.flush()

    def _add(self, line: str) -> None:
        if len(self._text) >= _PART_BYTES:
            self.flush()
            self._part, self._text = self._part + 1, ""
        self._text += line
        self._changed = True


def part_of(path: BucketPath, number: int) -> BucketPath:
    """The object of a part."""
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


def read_remote_lines(path: BucketPath) -> bytes:
    """All lines."""
    content, number = b"", 0
    while (found := path.objects.read(part_of(path, number).key)) is not None:
        content, number = content + found.content, number + 1
    return content


def _remove_from(path: BucketPath, number: int) -> None:
    while (part := part_of(path, number)).is_file():
        part.unlink()
        number += 1
