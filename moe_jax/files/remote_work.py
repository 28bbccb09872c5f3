"""Work on something in a bucket that goes on after a kill, when the same command is given again.

Nothing is renamed in a bucket. Files are written where they will stay, and count for nothing until the last one is
there (`MARKERS`). Until then there are, beside the target:

    .NAME.partial/job.json     which work it is, and the name of its beginning
    .NAME.partial/lease.json   which process works on it
    .NAME.partial/notes/...    results that the work has noted
    .NAME.partial/done/...     which leaves are written

All of these are read by known names: a listing may not show yet a file that was written just before a kill, and may
still show a removed one. So a note of finished work carries the name of its beginning, by which notes of an earlier
beginning are told apart.

Nothing can be locked there either. A lease counts for as long as it changes: its owner renews it, and whoever wants it
watches it for `SECONDS` by their own clock, so that no two clocks have to agree, and takes it over if its owner has
written nothing in that time. It is only written over the version that was read (generations), so if two processes take
it over, one gets it.
"""

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable
from typing import Any, Self

from moe_jax.core.errors import InputError, clipped, shown
from moe_jax.files.objects import ABSENT, Found
from moe_jax.files.storage_path import BucketPath, StoragePath

SECONDS = 45.0
"""Number of seconds after which a lease that was not renewed is free."""
RENEWALS = 5  # in that time


class Lease:
    """The right to work in a place, from `take` to `release`. It is renewed in the background."""

    def __init__(self, name: BucketPath, target: BucketPath):
        """Sends no request yet; `name` is the object of the lease, `target` the place that it is for, in messages."""
        self.name, self._target = name, target
        self._seconds, self._identity = SECONDS, uuid.uuid4().hex
        self._generation: bytes | None = None
        self._renewed, self._lost = time.monotonic(), False
        self._ended, self._guard = threading.Event(), threading.Lock()

    def take(self) -> None:
        """Takes the lease; if there is one already, waits until it is clear whether its owner renews it.

        Raises:
          InputError: if another process holds it; the message says which.
        """
        found = self._read()
        if found is not None and not _owner_is_dead(found):
            self._watch(found)
        self._generation = self._write(ABSENT if found is None else found.generation)
        if self._generation is None:
            raise self._taken(self._read())
        self._renewed = time.monotonic()
        threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def check(self) -> None:
        """Raises `InputError` if another process has taken the lease over, because this one stood still too long."""
        with self._guard:
            if self._lost or not self._is_mine(self._read()):
                raise self._lost_it()

    def check_clock(self) -> None:
        """Raises `InputError` if the lease was not renewed for so long that it may have been taken. No request."""
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
    with contextlib.suppress(OSError, OverflowError):
        try:
            os.kill(said["pid"], 0)
        except ProcessLookupError:
            return True
    return False


MARKERS = ("config.json", "adapter_config.json", "tokens.json", "run.json")
"""The files that commands write last. Without its file a model, an adapter for PEFT, tokens or a run does not count."""
_JOB, _LEASE, _NOTES, _DONE = "job.json", "lease.json", "notes", "done"


class Work:
    """The work on a target; `job` is JSON-able, or None for work that begins anew every time."""

    def __init__(self, target: StoragePath, job: Any):
        self._target = target
        self._goes_on = job is not None
        self._job = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
        self._completed = False

    def _is_kept_after(self, error: BaseException | None) -> bool:
        """Whether the same job can go on with what is done before an error, which gets a note that says so."""
        # Bad input is corrected by other input, and then it is another job.
        if error is None or not self._goes_on or isinstance(error, InputError):
            return False
        removes = f"moe-jax clean {self._target} removes it"
        note = f"what is done so far is kept: the same command goes on from there, and {removes}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        return True


class RemoteWork(Work):
    """The place in a bucket, the target itself, in which a command works, alone; as `files.staging.Workplace`."""

    def __init__(self, target: BucketPath, job: Any, *, suffix: str):
        super().__init__(target, job)
        self.folder = target
        self._control = target.beside(suffix)
        self._lease = Lease(self._control / _LEASE, target)
        self._done: set[str] = set()
        self._noted: set[str] = set()
        self.beginning = ""
        """The name of this beginning of the work; the first process tells it to the others."""

    def __enter__(self) -> Self:
        """Takes the lease, and removes the files at the target unless they are of the same job.

        Raises:
          InputError: if the target exists, or another command is writing it.
        """
        refuse_finished(self.folder)
        self._lease.take()
        try:
            refuse_finished(self.folder)  # by now another command may have finished
            job = self._control.objects.read((self._control / _JOB).key)
            if job is None and self.folder.is_dir():
                raise InputError(f"{self.folder} already exists; choose another name or remove it")
            begun = {} if job is None else json.loads(job.content)
            if begun.get("job") == self._job and self._goes_on:
                self.beginning = str(begun.get("beginning"))
            else:
                self.begin_anew()
        except BaseException:
            self._lease.release()
            raise
        return self

    def begin_anew(self) -> None:
        """Removes files of an earlier command, as far as listings show them; others are overwritten, or not used."""
        self.folder.objects.remove_all(self.folder.key)
        self.beginning = uuid.uuid4().hex
        self._write(_JOB, {"job": self._job, "beginning": self.beginning})

    def note(self, name: str, data: Any) -> None:
        """Stores JSON-able data for when the job goes on. Any process of it may do so, each under its own names."""
        self._noted.add(name)
        self._write(f"{_NOTES}/{name}.json", {"beginning": self.beginning, "data": data})

    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the data stored by `note` under some names, including data from before a kill."""
        keys = {(self._control / _NOTES / f"{name}.json").key: name for name in names}
        found = {keys[key]: note for key, note in self._control.objects.read_many(keys).items() if note is not None}
        stored = {name: json.loads(note.content) for name, note in found.items()}
        self._noted |= set(stored)
        return {name: one["data"] for name, one in stored.items() if one.get("beginning") == self.beginning}

    def mark(self, name: str) -> None:
        """Notes that a leaf is written."""
        self._lease.check_clock()
        self._done.add(name)
        (self._control / _DONE / name).write_bytes(self.beginning.encode())

    def marked(self, names: Iterable[str]) -> list[str]:
        """Returns the names of the leaves that are written, including leaves from before a kill."""
        keys = {(self._control / _DONE / name).key: name for name in names}
        found = self._control.objects.read_many(keys)
        own = self.beginning.encode()
        done = [keys[key] for key, mark in found.items() if mark is not None and mark.content == own]
        self._done |= set(done)
        return done

    def complete(self) -> None:
        """Removes the files that were only needed for the work. Called when the target's last file is written."""
        self._completed = True
        self._remove_control()

    def check_alone(self) -> None:
        """Raises `InputError` if another command has taken over the work; to be called before the last file."""
        self._lease.check()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if not self._is_kept_after(error) and not self._completed:
                self._lease.check()  # what another command is writing is not removed
                self.folder.objects.remove_all(self.folder.key)
                self._remove_control()
        except (OSError, InputError):
            if error is None:
                raise  # otherwise it is the first error that is told
        finally:
            self._lease.release()

    def _remove_control(self) -> None:
        names = [_JOB, *(f"{_DONE}/{name}" for name in self._done), *(f"{_NOTES}/{name}.json" for name in self._noted)]
        listed = self._control.objects.names(self._control.key)
        self._control.objects.remove_all(self._control.key, {*names, *listed} - {self._lease.name.name})

    def _write(self, name: str, data: Any) -> None:
        (self._control / name).write_bytes(json.dumps(data).encode())


def refuse_finished(target: BucketPath) -> None:
    """Raises `InputError` if there is something finished at a target."""
    if not target.key:
        raise InputError(f"{target} is a whole bucket; name a folder in it, {target}/FOLDER")
    if target.is_file() or _is_finished(target):
        raise InputError(f"{target} already exists; choose another name or remove it")


def _is_finished(target: BucketPath) -> bool:
    return any((target / marker).is_file() for marker in MARKERS)


def remove_finished(target: BucketPath) -> None:
    """Removes a finished target, first the file that makes it count."""
    for marker in MARKERS:
        (target / marker).unlink()
    target.objects.remove_all(target.key)


def is_begun(target: StoragePath, suffix: str) -> bool:
    """Whether a command has begun to make a target in a bucket and has not finished it."""
    if not isinstance(target, BucketPath):
        return False
    control = target.beside(suffix)
    return bool(target.key) and any((control / name).is_file() for name in (_JOB, _LEASE))


def remove_begun(target: BucketPath, suffix: str) -> None:
    """Removes the files of an interrupted command: all of a target, unless that is finished.

    Raises:
      InputError: if a command is working there.
    """
    control = target.beside(suffix)
    lease = Lease(control / _LEASE, target)
    lease.take()
    try:
        if not _is_finished(target):
            target.objects.remove_all(target.key)
        names = {_JOB, *control.objects.names(control.key)} - {lease.name.name}
        control.objects.remove_all(control.key, names)
    finally:
        lease.release()
