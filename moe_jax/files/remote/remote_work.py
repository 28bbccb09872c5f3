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
"""

import hashlib
import json
import uuid
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from moe_jax.core.errors import InputError
from moe_jax.files.remote.lease import Lease
from moe_jax.files.storage_path import BucketPath, StoragePath

MARKERS = ("config.json", "adapter_config.json", "tokens.json", "run.json")
"""The files that commands write last. Without its file a model, an adapter for PEFT, tokens or a run does not count."""
_JOB, _LEASE, _NOTES, _DONE = "job.json", "lease.json", "notes", "done"


class RemoteWork:
    """The place in a bucket in which a command works, alone. It has the methods of `files.resume.Workplace`.

    Attributes:
      folder: where to write: the target itself.
    """

    def __init__(self, target: BucketPath, job: Any, *, suffix: str):
        self.folder = target
        self._control = control_of(target, suffix)
        self._goes_on = job is not None
        self._job = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
        self._lease = Lease(self._control / _LEASE, target)
        self._completed = False
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
            begun = self._read(_JOB)
            if begun is None and self.folder.is_dir():
                raise InputError(f"{self.folder} already exists; choose another name or remove it")
            if begun is not None and begun.get("job") == self._job and self._goes_on:
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
        """Removes the files that were only needed for the work. Called when the target's last file is written.

        Raises:
          InputError: if another command has taken over the work.
        """
        self._completed = True
        self._remove_control()

    def check_alone(self) -> None:
        """Raises `InputError` if another command has taken over the work; to be called before the last file."""
        self._lease.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # As on a disk: when the user corrects the input, it is another job.
            if error is not None and self._goes_on and not isinstance(error, InputError):
                note = f"what is done of it is kept: the same command goes on, moe-jax clean {self.folder} removes it"
                if note not in getattr(error, "__notes__", ()):
                    error.add_note(note)
            elif not self._completed:
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
        lease = self._lease.name.name
        listed = [name for name in self._control.objects.names(self._control.key) if name != lease]
        self._control.objects.remove_each(self._control.key, {*names, *listed})

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            return json.loads((self._control / name).read_bytes())
        except FileNotFoundError:
            return None

    def _write(self, name: str, data: Any) -> None:
        (self._control / name).write_bytes(json.dumps(data).encode())


def control_of(target: BucketPath, suffix: str) -> BucketPath:
    """Returns the folder beside a target that exists while a command works on the target."""
    return target.beside(suffix)


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
    control = control_of(target, suffix)
    return bool(target.key) and any((control / name).is_file() for name in (_JOB, _LEASE))


def remove_begun(target: BucketPath, suffix: str) -> None:
    """Removes the files of an interrupted command: all of a target, unless that is finished.

    Raises:
      InputError: if a command is working there.
    """
    control = control_of(target, suffix)
    lease = Lease(control / _LEASE, target)
    lease.take()
    try:
        if not _is_finished(target):
            target.objects.remove_all(target.key)
        names = [name for name in control.objects.names(control.key) if name != lease.name.name]
        control.objects.remove_each(control.key, {_JOB, *names})
    finally:
        lease.release()
