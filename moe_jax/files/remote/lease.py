"""Leases: objects that say who works in a place of a bucket, where nothing can be locked. The owner renews them.

A lease counts for as long as it changes: whoever wants it watches it for `SECONDS` by their own clock, so that no two
clocks have to agree, and takes it over if its owner has written nothing in that time. It is only written over the
version that was read (generations), so if two processes take it over, one gets it.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from typing import Any

from moe_jax.core.errors import InputError, clipped, shown
from moe_jax.files.remote.objects import ABSENT, Found
from moe_jax.files.storage_path import BucketPath

SECONDS = 45.0
"""Number of seconds after which a lease that was not renewed is free."""
RENEWALS = 5  # in that time


class Lease:
    """The right to work in a place, from `take` to `release`. It is renewed in the background.

    Attributes:
      name: name of the object.
    """

    def __init__(self, name: BucketPath, target: BucketPath):
        """Sends no request yet.

        Args:
          name: the object of the lease.
          target: the place that is worked on; for messages.
        """
        self.name = name
        self._target = target
        self._seconds = SECONDS
        self._generation: bytes | None = None
        self._renewed = time.monotonic()
        self._ended = threading.Event()
        self._lost = False
        self._guard = threading.Lock()
        self._identity = uuid.uuid4().hex

    def take(self) -> None:
        """Takes the lease; if there is one already, waits until it is clear whether its owner renews it.

        Raises:
          InputError: if another process holds it; the message says which.
        """
        found = self._read()
        if found is not None and not _owner_is_dead(found):
            self._watch(found)
        over = ABSENT if found is None else found.generation
        generation = self._write(over)
        if generation is None:
            raise self._taken(self._read())
        self._generation, self._renewed = generation, time.monotonic()
        threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def check(self) -> None:
        """Raises `InputError` if another process has taken the lease over, because this one stood still too long."""
        with self._guard:
            if self._lost or not self._is_mine(self._read()):
                raise self._lost_it()

    def check_clock(self) -> None:
        """Raises `InputError` if the lease was not renewed for so long that another process may have taken it.

        Sends no request.
        """
        held = self._generation is not None  # only by the first process
        if self._lost or (held and time.monotonic() - self._renewed > self._seconds):
            raise self._lost_it()

    def release(self) -> None:
        """Gives the lease back; if the bucket does not answer, the lease runs out by itself."""
        self._ended.set()
        with self._guard, contextlib.suppress(OSError, InputError):
            if self._generation is not None and not self._lost:
                self.name.objects.remove(self.name.key, over=self._generation)
        self._generation = None

    def _watch(self, found: Found) -> None:
        """Returns when a lease has not changed for long enough, or has gone."""
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            time.sleep(min(self._seconds / RENEWALS / 2, 1.0))
            now = self._read()
            if now is None:
                break
            if now.generation != found.generation:
                raise self._taken(now)

    def _renew(self) -> None:
        while not self._ended.wait(self._seconds / RENEWALS):
            with self._guard:
                if self._generation is None:
                    return
                now = time.monotonic()
                try:
                    generation = self._write(self._generation)
                    if generation is None:  # perhaps an answer to an earlier renewal was lost
                        found = self._read()
                        self._lost = not self._is_mine(found)
                        generation = found.generation if found is not None else None
                except (OSError, InputError):
                    continue  # others wait as long as `check_clock` does
                if self._lost or generation is None:
                    return
                self._generation, self._renewed = generation, now

    def _is_mine(self, found: Found | None) -> bool:
        return found is not None and _said(found).get("id") == self._identity

    def _lost_it(self) -> InputError:
        return InputError(
            f"the work on {self._target} is not this command's any more: nothing was heard of it for "
            f"{self._seconds:.0f} s; give it again"
        )

    def _read(self) -> Found | None:
        return self.name.objects.read(self.name.key)

    def _write(self, over: bytes) -> bytes | None:
        said = {"host": _machine(), "pid": os.getpid(), "id": self._identity, "time": time.time()}
        return self.name.objects.write(self.name.key, json.dumps(said).encode(), over=over)

    def _taken(self, found: Found | None) -> InputError:
        said = _said(found)
        host = clipped(str(said.get("host")).partition(" ")[0])
        who = f"process {shown(said.get('pid'))} on {host}" if said else "another process"
        return InputError(f"{self._target} is in use by {who}; wait for it, or choose another name")


def _machine() -> str:
    """Returns a name of this machine, or of the container, which has process numbers of its own."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _said(found: Found | None) -> dict[str, Any]:
    try:
        said = json.loads(found.content[:4096]) if found is not None else {}
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _owner_is_dead(found: Found) -> bool:
    """Whether the owner was a process of this machine that has ended: nobody has to wait for it."""
    said = _said(found)
    if said.get("host") != _machine() or type(said.get("pid")) is not int:
        return False
    try:
        os.kill(said["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
