"""Writes directories atomically: beside their target, and renamed at the end. `resume` does so for resumable work."""

import contextlib
import datetime
import errno
import fcntl
import os
import shutil
import socket
from pathlib import Path

from moe_jax.core.errors import InputError
from moe_jax.files.local_paths import check_local, check_model_path
from moe_jax.files.remote.lease import Lease
from moe_jax.files.remote.remote_work import refuse_finished, remove_finished
from moe_jax.files.storage_path import BucketPath, StoragePath, as_path


def refuse_existing(target: Path, *, buckets: bool = False) -> None:
    """Raises `InputError` if there is anything at `target` already, or it is no place to write to.

    Args:
      target: where a directory or file is to be made.
      buckets: whether it can be made in a bucket.
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
    """Raises `InputError` if nothing can be made at `target`, as `refuse_existing` and `check_writable` do.

    Commands call this before work that takes long.
    """
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
    """Renames a complete directory, and waits until this is on disk.

    Raises:
      InputError: if something has appeared at `target`.
    """
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
