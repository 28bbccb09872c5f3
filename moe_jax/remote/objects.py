"""Objects of a bucket: read, written, listed and removed, in bounded time and with one line when it fails.

What fails for a moment (status 429 and 5xx, a lost connection) is tried again by TensorStore.
"""

import errno
import functools
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from moe_jax.errors import InputError, clipped
from moe_jax.remote.address import DRIVERS

SECONDS = "MOE_JAX_STORAGE_SECONDS"
"""Environment variable: how long a request may take, with all its retries, besides the time for its bytes."""

_DEFAULT_SECONDS = 60.0
_BYTES_PER_SECOND = 2 << 20  # the slowest connection that is not taken for a dead one
_RETRIES = {"max_retries": 10, "initial_delay": "100ms", "max_delay": "8s"}
AT_ONCE = 16
ABSENT = b"\2"
"""The generation, in TensorStore's terms, of an object that is not there."""


class Found(NamedTuple):
    """What there is of an object.

    Attributes:
      content: all bytes, or those of the range.
      generation: changes with every write.
    """

    content: bytes
    generation: bytes


class Objects:
    """A bucket. `objects_of` opens each once."""

    def __init__(self, scheme: str, bucket: str):
        """Nothing is asked of the network yet."""
        import tensorstore

        self.where = f"{scheme}://{bucket}"
        driver = DRIVERS[scheme]
        context = tensorstore.Context({f"{driver}_request_retries": _RETRIES})
        opened = tensorstore.KvStore.open({"driver": driver, "bucket": bucket}, context=context)
        self._range = tensorstore.KvStore.KeyRange
        self._store: Any = self._done("", lambda: opened)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Found | None:
        """An object, or the bytes from `start` to `stop` of it; None if there is none.

        Raises:
          InputError: if it may not be read, or is shorter than `start`.
          OSError: if the bucket does not answer.
        """
        asked = slice(start, stop) if start or stop is not None else None
        result = self._done(name, lambda: self._store.read(name, byte_range=asked), (stop or 0) - start)
        if result.state != "value":
            return None
        return Found(result.value, result.stamp.generation)

    def read_many(self, names: Iterable[str]) -> dict[str, Found | None]:
        """Several objects, at the same time."""
        names = list(names)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip(names, pool.map(self.read, names), strict=True))

    def write(self, name: str, content: bytes | memoryview, *, over: bytes | None = None) -> bytes | None:
        """Writes an object as a whole.

        Args:
          name: of the object.
          content: all of it.
          over: write only if the object has this generation, `ABSENT` if there is none; None: whatever there is.

        Returns:
          The new generation; None if the object has another one than `over`.

        Raises:
          InputError: if it may not be written, or there is no such bucket.
          OSError: if the bucket does not answer.
        """
        # A request that was lost on its way back is repeated, and then meets what it has written itself.
        stamp = self._done(name, lambda: self._store.write(name, bytes(content), if_equal=over), len(content))
        if stamp.generation:
            return stamp.generation
        found = self.read(name)
        return found.generation if found is not None and found.content == content else None

    def remove(self, name: str, *, over: bytes | None = None) -> None:
        """Removes an object, if there is one (and if it has the generation `over`)."""
        self._done(name, lambda: self._store.write(name, None, if_equal=over))

    def names(self, folder: str) -> list[str]:
        """Names of all objects in a folder and below, without the folder, as far as listings show them yet.

        TensorStore takes a bucket that is not there, or must not be listed, for an empty one.
        """
        begin = f"{folder}/" if folder else ""
        # The character after "/" is "0".
        within = self._range(begin, f"{folder}0") if folder else self._range()
        found = self._done(folder, lambda: self._store.list(within, strip_prefix_length=len(begin.encode())))
        return sorted(name.decode() for name in found)

    def remove_all(self, folder: str) -> None:
        """Removes the objects in a folder and below that a listing shows."""
        self.remove_each(folder, self.names(folder))

    def remove_each(self, folder: str, names: Iterable[str]) -> None:
        """Removes objects in a folder, by their names without it; some of them may not be there."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda name: self.remove(f"{folder}/{name}"), sorted(names)))

    def _done(self, name: str, start: Callable[[], Any], size: int = 0) -> Any:
        """The result of what `start` begins."""
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
    """The objects of a bucket."""
    return Objects(scheme, bucket)


def _seconds() -> float:
    text = os.environ.get(SECONDS, "")
    try:
        return float(text) if text else _DEFAULT_SECONDS
    except ValueError:
        raise InputError(f"{SECONDS}={clipped(text)}: expected a number of seconds") from None


def explained(what: str, bucket: str, text: str) -> Exception:
    """What an error of TensorStore means.

    Args:
      what: was read or written.
      bucket: it is in.
      text: of the error.
    """
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
        return InputError(f"{what} is shorter than expected: it is truncated or corrupt")
    reason = re.sub(r"^[A-Z_]+: |All \d+ retry attempts failed: |\s*\[.*", "", text.splitlines()[0])
    if "CURL error" in reason:
        reason = f"{reason.split(': ')[0].removeprefix('CURL error ')}; is there a network?"
    return OSError(errno.EIO, f"{clipped(reason)}{f' (status {status[1]})' if status else ''}", what)
