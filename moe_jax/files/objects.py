"""The objects of a bucket, by addresses such as `gs://bucket/models/moe`: read, written, listed and removed.

Everything goes through TensorStore's client, which Orbax uses for the arrays of checkpoints too: one way to log in, to
ask for a range of bytes, and to overwrite only the version that was read. It retries requests that fail for a moment
(status 429 and 5xx, a lost connection); every request ends in bounded time, with an error of one line.

All of this was tested against a server in the tests that speaks the protocol of Google Cloud Storage, lists late and
fails when it is told to, and never against Google's own.
"""

import errno
import functools
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import Any, NamedTuple

from moe_jax.core.errors import InputError, clipped, shown

DRIVERS = {"gs": "gcs"}
"""Scheme of the supported addresses -> TensorStore's driver."""

# `Path` makes one slash of two. One letter before the colon is a drive of Windows.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


class Address(NamedTuple):
    """A place in a bucket; the key is names joined by "/", empty for the bucket itself."""

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")


def written_out(path: str | os.PathLike[str]) -> str | None:
    """Returns the address that a path stands for, with both slashes, whatever its scheme; None for any other path."""
    text = os.fspath(path)
    match = _ADDRESS.match(text)
    return f"{match[1]}://{text[match.end() :]}" if match else None


def is_in_bucket(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address of a supported scheme."""
    match = _ADDRESS.match(os.fspath(path))
    return match is not None and match[1] in DRIVERS


def parse_address(path: str | os.PathLike[str]) -> Address:
    """Returns the parts of an address; raises `InputError` for a wrong name of a bucket, or `.` or `..` in the key."""
    text = written_out(path)
    assert text is not None and is_in_bucket(path), f"{path} is no address"
    scheme, _, rest = text.partition("://")
    bucket, *names = [name for name in rest.split("/") if name] or [""]
    if not _BUCKET.fullmatch(bucket):
        raise InputError(
            f"{shown(text)}: {shown(bucket)} is not the name of a bucket; expected {scheme}://BUCKET/FOLDER"
        )
    if any(name in (".", "..") for name in PurePath("/".join(names)).parts):
        raise InputError(f"{shown(text)} has . or .. in it, which are names like any other in a bucket; write it out")
    return Address(scheme, bucket, "/".join(names))


SECONDS = "MOE_JAX_STORAGE_SECONDS"
"""Environment variable: how long a request may take, with all its retries, besides the time for its bytes."""

_DEFAULT_SECONDS = 60.0
_BYTES_PER_SECOND = 2 << 20  # the slowest connection that is not taken for a dead one
_RETRIES = {"max_retries": 10, "initial_delay": "100ms", "max_delay": "8s"}
AT_ONCE = 16
_REST = 256 << 10  # bytes that are rather read than asked about further
_PARTS = 4
ABSENT = b"\2"
"""The generation, in TensorStore's terms, of an object that does not exist."""


class Found(NamedTuple):
    """The bytes read from an object, all or those of a range, and its generation, which changes with every write."""

    content: bytes
    generation: bytes


class TooShort(InputError):
    """A range was asked for that an object does not have, or not all of."""


class Objects:
    """A bucket. `objects_of` opens each once."""

    def __init__(self, scheme: str, bucket: str):
        """Sends no request yet."""
        import tensorstore

        self.where = f"{scheme}://{bucket}"
        driver = DRIVERS[scheme]
        context = tensorstore.Context({f"{driver}_request_retries": _RETRIES})
        opened = tensorstore.KvStore.open({"driver": driver, "bucket": bucket}, context=context)
        self._range = tensorstore.KvStore.KeyRange
        self._store: Any = self._done("", lambda: opened)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Found | None:
        """Returns an object, or the bytes from `start` to `stop` of it; None if there is none.

        Raises:
          TooShort: if it ends before `stop`, or has no byte at `start`.
          InputError: if it may not be read.
          OSError: if the bucket does not answer.
        """
        asked = slice(start, stop) if start or stop is not None else None
        result = self._done(name, lambda: self._store.read(name, byte_range=asked), (stop or 0) - start)
        if result.state != "value":
            return None
        return Found(result.value, result.stamp.generation)

    def generation(self, name: str) -> bytes | None:
        """Returns the generation of an object without reading its content; None if there is none."""
        found = self.read(name, 0, 0)
        return None if found is None else found.generation

    def has(self, name: str, position: int) -> bool:
        """Whether there is an object that has a byte at a position."""
        try:
            return self.read(name, position, position + 1) is not None
        except TooShort:
            return False

    def size(self, name: str, *, at_least: int = 0) -> tuple[int, bytes] | None:
        """Returns the number of bytes of an object, known to be `at_least` so many, and its generation; or None.

        TensorStore does not tell it, so requests for single bytes, several at the same time, search for the end: first
        for a power of 16 above it, then for the part of that range, until the rest is small enough to be read.

        Raises:
          InputError: as in `read`, or if the object is written meanwhile.
        """
        low, high = at_least, 5 << 40  # the largest object that Google stores
        places = [_REST * 16**power for power in range(8)]
        while high - low > _REST:
            low, high = self._narrowed(name, [place for place in places if low < place < high], low, high)
            places = [low + (high - low) * part // _PARTS for part in range(1, _PARTS)]
        try:
            found = self.read(name, low)
        except TooShort:  # it ends just there
            found = self.read(name, low - 1) if low else self.read(name)
            low = max(0, low - 1)
        return None if found is None else (low + len(found.content), found.generation)

    def _narrowed(self, name: str, places: list[int], low: int, high: int) -> tuple[int, int]:
        """Returns the two neighbours among some places between which an object ends."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            there = list(pool.map(lambda place: self.has(name, place), places))
        last = max((place for place, found in zip(places, there, strict=True) if found), default=low)
        first = min((place for place, found in zip(places, there, strict=True) if not found), default=high)
        if first < last:
            raise InputError(f"{self.where}/{name} was written while it was read; start again")
        return last, first

    def read_many(self, names: Iterable[str]) -> dict[str, Found | None]:
        """Reads several objects at the same time; returns them by name, None for one that does not exist."""
        names = list(names)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip(names, pool.map(self.read, names), strict=True))

    def write(self, name: str, content: bytes | memoryview, *, over: bytes | None = None) -> bytes | None:
        """Writes an object as a whole; returns its new generation.

        If `over` is a generation (`ABSENT`: that of no object), it is written only if the object has this one; returns
        None if it has another.

        Raises:
          InputError: if it may not be written, or there is no such bucket.
          OSError: if the bucket does not answer.
        """
        # If the answer to a request is lost, the request is repeated, and then finds the object that it wrote itself.
        stamp = self._done(name, lambda: self._store.write(name, bytes(content), if_equal=over), len(content))
        if stamp.generation:
            return stamp.generation
        found = self.read(name)
        return found.generation if found is not None and found.content == content else None

    def remove(self, name: str, *, over: bytes | None = None) -> None:
        """Removes an object, if there is one (and if it has the generation `over`)."""
        self._done(name, lambda: self._store.write(name, None, if_equal=over))

    def names(self, folder: str) -> list[str]:
        """Returns the names of all objects in a folder and below, relative to it, as far as listings show them yet.

        TensorStore takes a bucket that is not there, or must not be listed, for an empty one.
        """
        begin = f"{folder}/" if folder else ""
        # The character after "/" is "0".
        within = self._range(begin, f"{folder}0") if folder else self._range()
        found = self._done(folder, lambda: self._store.list(within, strip_prefix_length=len(begin.encode())))
        return sorted(name.decode() for name in found)

    def remove_all(self, folder: str, names: Iterable[str] | None = None) -> None:
        """Removes objects by their names in a folder, absent ones too; None: all that a listing shows."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = self.names(folder) if names is None else names
            list(pool.map(lambda name: self.remove(f"{folder}/{name}"), sorted(found)))

    def _done(self, name: str, start: Callable[[], Any], size: int = 0) -> Any:
        """Waits for the request that `start` sends, and returns its result."""
        seconds = _seconds() + max(0, size) / _BYTES_PER_SECOND
        try:
            return start().result(timeout=seconds)
        except TimeoutError:
            what = f"{self.where}/{name} was not answered within {seconds:.3g} s; is there a network?"
            raise TimeoutError(errno.ETIMEDOUT, what) from None
        except ValueError as error:
            raise explained(f"{self.where}/{name}", self.where, str(error)) from error


@functools.cache
def objects_of(scheme: str, bucket: str) -> Objects:
    """Returns the objects of a bucket."""
    return Objects(scheme, bucket)


def _seconds() -> float:
    text = os.environ.get(SECONDS, "")
    try:
        return float(text) if text else _DEFAULT_SECONDS
    except ValueError:
        raise InputError(f"{SECONDS}={clipped(text)}: expected a number of seconds") from None


def explained(what: str, bucket: str, text: str) -> Exception:
    """Returns the error that users see for the text of an error of TensorStore, about an object `what` of a bucket."""
    status = re.search(r"http_response_code='(\d+)'", text)
    if "PERMISSION_DENIED" in text or "UNAUTHENTICATED" in text:
        code = f" (status {status[1]})" if status else ""
        return InputError(
            f"{what}: no permission{code}; log in with `gcloud auth application-default login`, or ask the owner of "
            "the bucket"
        )
    if "bucket does not exist" in text or ("NOT_FOUND" in text and status and status[1] == "404"):
        return InputError(f"{what}: there is no bucket {bucket}; check its name")
    if "OUT_OF_RANGE" in text:
        return TooShort(f"{what} is shorter than expected: it is truncated or corrupt")
    reason = re.sub(r"^[A-Z_]+: |All \d+ retry attempts failed: |\s*\[.*", "", text.splitlines()[0])
    if "CURL error" in reason:
        reason = f"{reason.split(': ')[0].removeprefix('CURL error ')}; is there a network?"
    return OSError(errno.EIO, f"{clipped(reason)}{f' (status {status[1]})' if status else ''}", what)


class GrowingObjects:
    """Lines that grow in a bucket, where nothing can be appended to an object.

    They are written in parts, `metrics.jsonl`, `metrics.jsonl.1`, ... The last part is rewritten when it is flushed, or
    some time after lines came; when it has become large, another one begins. A reader asks for the parts by name until
    one does not exist.
    """

    PART_BYTES = 1 << 20
    SECONDS = 30.0

    def __init__(self, objects: Objects, name: str, lines: Iterable[str]):
        self._objects, self._name = objects, name
        # What is there of earlier lines is replaced, also by none.
        self._part, self._text, self._changed = 0, "", objects.generation(name) is not None
        for line in lines:
            self._add(line)
        self.flush()
        later = (part_name(name, number) for number in itertools.count(self._part + 1))
        # The last first: behind a gap that a kill leaves, none would be found, until new lines had filled it.
        for part in reversed([*itertools.takewhile(lambda part: objects.generation(part) is not None, later)]):
            objects.remove(part)
        self._written = time.monotonic()

    def write(self, line: str) -> None:
        """Appends a line, which is given with its end."""
        self._add(line)
        if time.monotonic() - self._written > self.SECONDS:
            self.flush()

    def flush(self) -> None:
        """Returns when all lines are stored."""
        if self._changed:
            self._objects.write(part_name(self._name, self._part), self._text.encode())
        self._changed, self._written = False, time.monotonic()

    close = flush

    def _add(self, line: str) -> None:
        if len(self._text) >= self.PART_BYTES:
            self.flush()
            self._part, self._text = self._part + 1, ""
        self._text += line
        self._changed = True


def part_name(name: str, number: int) -> str:
    """Returns the name of the object that holds a part of lines that grow."""
    return name if number == 0 else f"{name}.{number}"
