"""Work that goes on after a kill or a full disk, when the same command is given again.

Until a target is complete, its files lie in a folder beside it:

    .NAME.partial/job.sha256    which work it is; another work empties the folder
    .NAME.partial/notes/        results that the work has noted
    .NAME.partial/...           the finished parts of the target
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moe_jax.core.errors import InputError
from moe_jax.core.formatting import show_bytes
from moe_jax.files.remote_work import RemoteWork, is_begun, remove_begun
from moe_jax.files.staging import check_local, lock_directory, refuse_existing, remove_content, rename_durably
from moe_jax.files.storage_path import BucketPath, StoragePath, as_path

_JOB = "job.sha256"
_NOTES = "notes"
PARTIAL, ANALYSIS = "partial", "analysis"


class Workplace:
    """The folder beside a target in which a command works, alone. A context manager.

        with Workplace(target, job={"command": "export", ...}) as work:
            ...                # writes below work.folder; what the same job wrote before a kill is there
            work.complete()

    At the end of the block the folder is the target, or is gone if `complete` was not called. After an error it is gone
    too, unless the same job can go on with what is there; then the error has a note that says so.
    """

    def __init__(self, target: Path, job: Any = None, *, suffix: str = PARTIAL):
        """Touches no file yet.

        Args:
          target: the file or folder that the command makes.
          job: JSON-able, the same for the same work only: command, options, identities of the sources. None: the work
            begins anew every time.
          suffix: the folder is called `.NAME.SUFFIX`.
        """
        check_local(target)
        self._target = as_path(target).absolute()
        self.folder = self._target.beside(suffix)
        self._goes_on = job is not None
        self._completed = False
        self._job = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()

    def __enter__(self) -> Self:
        """Locks the folder, and empties it unless its files are of the same job.

        Raises:
          InputError: if the target exists, or another command is writing it.
        """
        self._made = [parent for parent in self.folder.parents if not parent.exists()]
        self._lock = _make_and_lock(self.folder, self._target)
        try:
            refuse_existing(self._target)
            job = self.folder / _JOB
            if not (self._goes_on and job.is_file() and job.read_text() == self._job):
                self.begin_anew()
        except BaseException:
            _remove_empty([self.folder, *self._made])
            os.close(self._lock)
            raise
        return self

    def begin_anew(self) -> None:
        """Removes the files that an earlier command left in the folder."""
        remove_content(self.folder)
        (self.folder / _JOB).write_durably(self._job.encode())

    def note(self, name: str, data: Any) -> None:
        """Stores JSON-able data for when the job goes on. Any process of it may do so, each under its own names."""
        (self.folder / _NOTES).mkdir(exist_ok=True)
        (self.folder / _NOTES / f"{name}.json").replace_content(json.dumps(data).encode())

    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the data stored by `note` under some names, including data from before a kill."""
        found = {file.stem: file for file in (self.folder / _NOTES).glob("*.json")}
        return {name: json.loads(found[name].read_bytes()) for name in names if name in found}

    def check_alone(self) -> None:
        """Does nothing: as long as the folder is locked, no other command is at it."""

    def complete(self) -> None:
        """Makes the folder the target; raises `InputError` if something has appeared there."""
        (self.folder / _JOB).unlink()
        if (self.folder / _NOTES).exists():
            (self.folder / _NOTES).remove_tree()
        rename_durably(self.folder, self._target)
        self._completed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # Bad input is corrected by other input, and then it is another job.
            if error is not None and self._goes_on and not isinstance(error, InputError):
                note = f"what is done of it is kept: the same command goes on, moe-jax clean {self._target} removes it"
                if note not in getattr(error, "__notes__", ()):
                    error.add_note(note)
            elif not self._completed:
                if error is not None and hasattr(error, "__notes__"):  # which may speak of work inside the folder
                    error.__notes__ = [note for note in error.__notes__ if str(self.folder) not in note]
                self.folder.remove_tree()
                _remove_empty(self._made)
        finally:
            os.close(self._lock)


def open_work(target: Path, job: Any = None) -> Workplace | RemoteWork:
    """Returns the place to work on a target, on a disk or in a bucket."""
    target = as_path(target)
    return RemoteWork(target, job, suffix=PARTIAL) if isinstance(target, BucketPath) else Workplace(target, job)


def require_space(target: Path, needed: int) -> None:
    """Raises `InputError` if a target of `needed` bytes has no room on its disk. Buckets have room.

    The files that an interrupted command wrote of it count as free space: they are used again, or removed.
    """
    target = as_path(target).absolute()
    if isinstance(target, BucketPath):
        return
    existing = next(parent for parent in target.parents if parent.exists())
    begun = Workplace(target).folder
    free = shutil.disk_usage(existing).free
    free += _bytes_on_disk(begun)
    if free < needed:
        raise InputError(
            f"{target} takes {show_bytes(needed)}, but {existing} has {show_bytes(free)} free; "
            "free some or choose another disk"
        )


def _bytes_on_disk(folder: Path) -> int:
    """Returns the bytes of all files below a folder. A file that another command removes meanwhile counts 0."""
    blocks = 0
    for parent, _, names in os.walk(folder):  # skips a folder that has gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                blocks += os.lstat(os.path.join(parent, name)).st_blocks
    return blocks * 512


def _remove_empty(folders: Iterable[Path]) -> None:
    """Removes folders, innermost first, up to one that is not empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextlib.contextmanager
def staged_directory(target: Path) -> Iterator[StoragePath]:
    """Yields a folder beside the target, which becomes the target if the block ends without an error, else is removed.

    The remains of a killed command are removed first. In a bucket the folder is the target itself, and the file that is
    written last makes it count.

    Raises:
      InputError: if the target exists, or another command is writing it.
    """
    with open_work(target) as work:
        yield work.folder
        work.check_alone()
        work.complete()


def leftovers(directory: Path) -> list[StoragePath]:
    """Returns the folders that interrupted commands left of a target, or of the targets in a directory."""
    directory = as_path(directory).absolute()
    if isinstance(directory, BucketPath):
        matches = (re.fullmatch(rf"\.(.+)\.{PARTIAL}", child.name) for child in directory.iterdir())
        targets = [directory, *(directory / match[1] for match in matches if match)]
        return [target for target in targets if is_begun(target, PARTIAL)]
    beside = [directory.beside(suffix) for suffix in (PARTIAL, ANALYSIS)]
    inside = []
    if directory.is_dir():
        inside = [file for suffix in (PARTIAL, ANALYSIS) for file in directory.glob(f".*.{suffix}")]
    return [folder for folder in (*beside, *sorted(inside)) if _is_workplace(folder)]


def remove_leftover(folder: StoragePath) -> int | None:
    """Removes one of the `leftovers`; returns the number of bytes that this frees, None in a bucket.

    Raises:
      InputError: if a command is working there.
    """
    if isinstance(folder, BucketPath):
        remove_begun(folder, PARTIAL)
        return None
    freed = sum(file.lstat().st_size for file in folder.rglob("*"))
    lock = _make_and_lock(folder, folder)
    try:
        folder.remove_tree()
    finally:
        os.close(lock)
    return freed


def _is_workplace(folder: StoragePath) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    return (folder / _JOB).is_file() or not any(folder.iterdir())


def _make_and_lock(folder: StoragePath, target: StoragePath) -> int:
    """Makes a folder and locks it, as `lock_directory` does."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = lock_directory(folder, target)
        except FileNotFoundError:
            continue  # another command has just completed or removed it
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
        os.close(descriptor)  # it was renamed before it was locked
