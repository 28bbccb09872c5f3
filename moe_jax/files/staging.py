"""Checks places before anything is made there, and makes files and directories there whole or not at all.

Work that takes long goes on after a kill or a full disk, when the same command is given again. Until a target is
complete, its files lie in a folder beside it, which is renamed at the end:

    .NAME.partial/job.sha256    which work it is; another work empties the folder
    .NAME.partial/notes/        results that the work has noted
    .NAME.partial/...           the finished parts of the target
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from moe_jax.core.errors import InputError, shown
from moe_jax.core.formatting import show_bytes
from moe_jax.files.objects import is_in_bucket, parse_address, written_out
from moe_jax.files.remote_work import (
    Lease,
    RemoteWork,
    Work,
    is_begun,
    refuse_finished,
    remove_begun,
    remove_finished,
)
from moe_jax.files.storage_path import BucketPath, StoragePath, as_path

_FILES_OF_WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack")


def check_local(path: Path | str, *, buckets: bool = False) -> None:
    """Raises `InputError` for a text that cannot be a path, and without `buckets` for `gs://bucket/model`."""
    text = os.fspath(path)
    if buckets and is_in_bucket(path):
        parse_address(path)
        return
    if len(text) > 4096:
        raise InputError(f"{shown(text)} has {len(text):,} characters, more than a path can have")
    address = written_out(text)
    if address is not None:
        raise InputError(
            f"{shown(address)} is an address and not a path; models, runs, data and reports can be in buckets "
            "(gs://BUCKET/NAME), but this has to be on a local or mounted disk: give a path there"
        )
    if "\0" in text:
        raise InputError(f"{shown(text)} holds a zero byte, which no path can")


def check_model_path(path: Path | str) -> None:
    """Raises `InputError` unless a model can lie at `path`: a UTF-8 path in a bucket, or on a disk (`check_local`)."""
    check_local(path, buckets=True)
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise InputError(f"{shown(os.fspath(path))} is not UTF-8, as paths of models must be; rename it") from None


def check_beside(target: Path, sources: Iterable[Path]) -> None:
    """Raises `InputError` if `target` lies inside one of the directories that it is made from."""
    resolved = as_path(target).resolve()
    for source in sources:
        if as_path(source).resolve() in resolved.parents:
            raise InputError(
                f"{target} lies inside {source}, which it is made from and which is never changed; choose a place "
                "outside of it"
            )


def refuse_existing(target: Path, *, buckets: bool = False, file: bool = False) -> None:
    """Raises `InputError` if nothing may be made at `target`.

    There is something, it is in a bucket and not meant to (`buckets`), or it is called as files of weights are, and a
    directory would be made, not a `file`.
    """
    target = as_path(target)
    if not file and target.suffix.lower() in _FILES_OF_WEIGHTS:
        raise InputError(
            f"{target} is the name of a file, and a directory is made: leave out {target.suffix}"
            + ("; moe-jax export --format gguf makes GGUF files" if target.suffix.lower() == ".gguf" else "")
        )
    if buckets and isinstance(target, BucketPath):
        refuse_finished(target)
        return
    check_local(target)
    check_model_path(target)
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} already exists; choose another name or remove it")


def check_target(target: Path, *, buckets: bool = False, file: bool = False) -> None:
    """Raises `InputError` if nothing can be made at `target`; to be called before work that takes long."""
    refuse_existing(target, buckets=buckets, file=file)
    check_writable(target)


def check_writable(target: Path) -> None:
    """Raises `InputError` if the folder in which `target` would be made, or the folders above it, cannot be written.

    A folder (in a bucket, an object) is made there and removed, because access rights say nothing about file systems
    such as /proc, or about what root may do.
    """
    target = as_path(target).absolute()
    if isinstance(target, BucketPath):
        attempt = target.beside("attempt")
        attempt.write_bytes(b"")
        attempt.unlink()
        return
    above = next(parent for parent in target.parents if os.path.lexists(parent))
    if not above.is_dir():
        raise InputError(f"{target} cannot be made: {above} is not a directory; choose another place")
    attempt = (above / target.name).beside("attempt")  # as long as the name that the work would have
    try:
        attempt.mkdir()
    except FileExistsError:
        pass  # of another command, or one that was killed here
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # what is removed meanwhile may be enough
        raise InputError(
            f"{target} cannot be made: {above} cannot be written ({error.strerror}); choose another place"
        ) from None
    with contextlib.suppress(OSError):
        attempt.rmdir()


def rename_durably(directory: StoragePath, target: StoragePath) -> None:
    """Renames a complete directory, and waits until this is on disk; raises `InputError` if `target` has appeared."""
    directory.sync()
    refuse_existing(target)
    directory.rename(target)
    target.parent.sync()


def place_to_replace(target: StoragePath) -> StoragePath:
    """Returns the place to make a directory that will replace another one; removes what a killed command left there."""
    if isinstance(target, BucketPath):  # where nothing is replaced at once
        remove_finished(target)
        return target
    fresh = target.with_name(f"{target.name}.new")
    remove_replaced(target)
    if fresh.exists():
        fresh.remove_tree()
    return fresh


def replace_directory(target: StoragePath, fresh: StoragePath) -> None:
    """Moves the directory made at `place_to_replace` to `target`, and removes the old directory there."""
    if fresh == target:
        return
    old = target.beside("old")
    if target.exists():
        target.rename(old)
    rename_durably(fresh, target)
    with contextlib.suppress(OSError):
        _remove(old)


def remove_replaced(target: StoragePath) -> None:
    """Removes the old directory that a killed `replace_directory` left; puts it back where the new one is not there."""
    old = target.beside("old")
    if old.exists() and not target.exists():
        old.rename(target)
    if old.exists() or old.is_symlink():
        _remove(old)


def _remove(directory: StoragePath) -> None:
    """Removes a directory, or a link to one, which stays."""
    if directory.is_symlink():
        directory.unlink()
    elif directory.exists():
        shutil.rmtree(directory)


def lock_directory(directory: Path, target: Path) -> int:
    """Locks a directory while the returned descriptor is open; raises `InputError`, about `target`, if another has."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InputError(f"another command is writing {target}; wait for it or choose another name") from None
    except OSError:
        pass  # Some network file systems have no locks; there the user must not run two commands with one target.
    return descriptor


class DirectoryLock:
    """A directory that no other process works in until `release`; a file in it says which process this is."""

    def __init__(self, directory: StoragePath, holder: str, instead: str):
        directory.mkdir(parents=True, exist_ok=True)
        self._holder = directory / holder
        try:
            self._descriptor = lock_directory(directory, directory)
        except InputError:
            raise _in_use(directory, self._holder, instead) from None
        now = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds")
        self._holder.write_text(f"process {os.getpid()} on {socket.gethostname()} since {now}", encoding="utf-8")

    def release(self) -> None:
        """Unlocks the directory."""
        self._holder.unlink(missing_ok=True)
        os.close(self._descriptor)


_INSTEAD = "choose another run_dir"


def check_not_held(directory: StoragePath, holder: str, *, instead: str = _INSTEAD) -> None:
    """Raises `InputError` if another process works in a directory; the message says which, and what to do `instead`.

    Changes nothing.

    In a bucket, where only waiting shows whether a process is still at work, nothing is checked.
    """
    if isinstance(directory, BucketPath) or not (directory / holder).is_file():
        return
    try:
        os.close(lock_directory(directory, directory))
    except InputError:
        raise _in_use(directory, directory / holder, instead) from None


def _in_use(directory: StoragePath, holder: StoragePath, instead: str) -> InputError:
    """Returns the error that another process works in a directory, with what its file says of it."""
    who, end = "", time.monotonic() + 1.0
    while not who and time.monotonic() < end:  # the process writes it after it has locked the directory
        with contextlib.suppress(FileNotFoundError):
            who = holder.read_text(encoding="utf-8", errors="replace")[:80]
        time.sleep(0 if who else 0.02)
    return InputError(f"{directory} is in use by {who or 'another process'}; wait for it, or {instead}")


def hold_alone(directory: StoragePath, holder: str, *, instead: str = _INSTEAD) -> DirectoryLock | Lease:
    """Keeps all other processes out of a directory, which is created if necessary, until `release`.

    The file `holder` says which process is at work; on a disk the directory is locked, in a bucket the file is a lease.
    The message about a directory on a disk that is in use says what to do `instead`.

    Raises:
      InputError: if another process is at work; the message says which. If a lease is no longer renewed, this waits
        until it runs out.
    """
    if not isinstance(directory, BucketPath):
        return DirectoryLock(directory, holder, instead)
    lease = Lease(directory / holder, directory)
    lease.take()
    return lease


# --- work that goes on ----------------------------------------------------------------------------

_JOB = "job.sha256"
_NOTES = "notes"
PARTIAL, ANALYSIS, RECOVERY = "partial", "analysis", "recovery"


class Workplace(Work):
    """The folder beside a target in which a command works, alone. A context manager.

        with Workplace(target, job={"command": "export", ...}) as work:
            ...                # writes below work.folder; what the same job wrote before a kill is there
            work.complete()

    At the end of the block the folder is the target, or is gone if `complete` was not called. After an error it is gone
    too, unless the same job can go on with what is there; then the error has a note that says so.
    """

    def __init__(self, target: Path, job: Any = None, *, suffix: str = PARTIAL):
        """Touches no file yet. The folder will be called `.NAME.SUFFIX`.

        The `job` is JSON-able, and the same for the same work only: command, options, identities of the sources. If it
        is None, the work begins anew every time.
        """
        check_local(target)
        super().__init__(as_path(target).absolute(), job)
        self.folder = self._target.beside(suffix)

    def __enter__(self) -> Self:
        """Locks the folder, and empties it unless its files are of the same job.

        Raises:
          InputError: if the target exists, or another command is writing it.
        """
        self._made = [parent for parent in self.folder.parents if not parent.exists()]
        self._lock = _make_and_lock(self.folder, self._target)
        try:
            self._refuse_existing()
            job = self.folder / _JOB
            if not (self._goes_on and job.is_file() and job.read_text("utf-8") == self._job):
                self.begin_anew()
        except BaseException:
            _remove_empty([self.folder, *self._made])
            os.close(self._lock)
            raise
        return self

    def _refuse_existing(self) -> None:
        refuse_existing(self._target)

    def begin_anew(self) -> None:
        """Removes the files that an earlier command left in the folder."""
        for child in self.folder.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()
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
        """Does nothing: the folder is locked."""

    def complete(self) -> None:
        """Makes the folder the target; raises `InputError` if something has appeared there."""
        if (self.folder / _NOTES).exists():
            (self.folder / _NOTES).remove_tree()
        # Until the job's name is gone, which is last and after the long wait, the same command goes on from here.
        self.folder.sync()
        (self.folder / _JOB).unlink()
        rename_durably(self.folder, self._target)
        self._completed = True

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if not self._is_kept_after(error) and not self._completed:
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


def require_space(target: Path, needed: int, *, what: str = "") -> None:
    """Raises `InputError` if a target of `needed` bytes has no room on its disk. Buckets have room.

    `what` says what these bytes are, where the target does not. The files that an interrupted command wrote of the
    target count as free space: they are used again, or removed.
    """
    target = as_path(target).absolute()
    if isinstance(target, BucketPath):
        return
    existing = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(existing).free + _bytes_on_disk(Workplace(target).folder)
    if free < needed:
        raise InputError(
            f"{target} takes {show_bytes(needed)}{what and f' ({what})'}, but {existing} has {show_bytes(free)} free; "
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
    suffixes = (PARTIAL, ANALYSIS, RECOVERY)
    beside = [directory.beside(suffix) for suffix in suffixes]
    inside = sorted(file for suffix in suffixes for file in directory.glob(f".*.{suffix}"))
    return [folder for folder in (*beside, *inside) if _is_workplace(folder)]


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
