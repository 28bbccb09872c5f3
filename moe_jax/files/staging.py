"""Checks places before anything is made there, and writes directories atomically: beside them, renamed at the end.

`resume` does so for work that goes on after a kill.
"""

import contextlib
import datetime
import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from moe_jax.core.errors import InputError, shown
from moe_jax.files.objects import is_in_bucket, parse_address, written_out
from moe_jax.files.remote_work import Lease, refuse_finished, remove_finished
from moe_jax.files.storage_path import BucketPath, StoragePath, as_path

_LONGEST = 4096


def check_local(path: Path | str, *, buckets: bool = False) -> None:
    """Raises `InputError` for a text that cannot be a path, and for an address such as `gs://bucket/model`.

    With `buckets`, addresses of buckets are accepted.
    """
    text = os.fspath(path)
    if buckets and is_in_bucket(path):
        parse_address(path)
        return
    if len(text) > _LONGEST:
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


def refuse_existing(target: Path, *, buckets: bool = False) -> None:
    """Raises `InputError` if there is anything at `target` already, or it is no place to write to, such as a bucket.

    With `buckets`, it can be in one.
    """
    target = as_path(target)
    if buckets and isinstance(target, BucketPath):
        refuse_finished(target)
        return
    check_local(target)
    check_model_path(target)
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} already exists; choose another name or remove it")


def check_target(target: Path, *, buckets: bool = False) -> None:
    """Raises `InputError` if nothing can be made at `target`; to be called before work that takes long."""
    refuse_existing(target, buckets=buckets)
    check_writable(target)


def check_writable(target: Path) -> None:
    """Raises `InputError` if the folder in which `target` would be made, or the folders above it, cannot be written.

    A folder is made there and removed, because access rights say nothing about file systems such as /proc, or about
    what root may do. In a bucket, an object is written and removed.
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
    """Returns the place to make a directory that will replace another one; removes what a killed command left there.

    In a bucket nothing is replaced at once: it is the same place, and the old directory is removed.
    """
    if isinstance(target, BucketPath):
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
    shutil.rmtree(old, ignore_errors=True)


def remove_replaced(target: StoragePath) -> None:
    """Removes the old directory that a killed `replace_directory` left; puts it back where the new one is not there."""
    old = target.beside("old")
    if old.exists() and not target.exists():
        old.rename(target)
    if old.exists():
        shutil.rmtree(old)


def lock_directory(directory: Path, target: Path) -> int:
    """Locks a directory against other processes, for as long as the returned descriptor is open.

    Raises:
      InputError: if another process has locked it; the message names `target`.
    """
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

    def __init__(self, directory: StoragePath, holder: str):
        directory.mkdir(parents=True, exist_ok=True)
        self._holder = directory / holder
        try:
            self._descriptor = lock_directory(directory, directory)
        except InputError:
            who = self._holder.read_text(encoding="utf-8")[:80] if self._holder.is_file() else "another process"
            raise InputError(f"{directory} is in use by {who}; wait for it, or choose another run_dir") from None
        now = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds")
        self._holder.write_text(f"process {os.getpid()} on {socket.gethostname()} since {now}", encoding="utf-8")

    def release(self) -> None:
        """Unlocks the directory."""
        self._holder.unlink(missing_ok=True)
        os.close(self._descriptor)


def hold_alone(directory: StoragePath, holder: str) -> DirectoryLock | Lease:
    """Keeps all other processes out of a directory, which is created if necessary, until `release`.

    Args:
      directory: on a disk, where it is locked; or in a bucket, where the file is a lease.
      holder: the name of a file that says which process is at work.

    Raises:
      InputError: if another process is at work; the message says which. If a lease is no longer renewed, this waits
        until it runs out.
    """
    if not isinstance(directory, BucketPath):
        return DirectoryLock(directory, holder)
    lease = Lease(directory / holder, directory)
    lease.take()
    return lease


def remove_content(directory: Path) -> None:
    """Empties a directory."""
    for child in directory.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()
