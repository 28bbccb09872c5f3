"""Atomic writing of files and directories: written beside their target and renamed at the end. See also `resume`."""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from moe_jax.core.errors import InputError
from moe_jax.files.local_paths import check_local, check_model_path
from moe_jax.files.remote.remote_path import BucketPath
from moe_jax.files.remote.remote_work import refuse_finished


def refuse_existing(target: Path, *, buckets: bool = False) -> None:
    """Raises `InputError` if there is anything at `target` already, or it is no place to write to.

    Args:
      target: what is to be made.
      buckets: whether it can be made in a bucket.
    """
    if buckets and isinstance(target, BucketPath):
        refuse_finished(target)
        return
    check_local(target)
    check_model_path(target)
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} already exists; choose another name or remove it")


def check_target(target: Path, *, buckets: bool = False) -> None:
    """Raises `InputError` if nothing can be made at `target`: see `refuse_existing` and `check_writable`.

    For commands to ask before they do what takes long.
    """
    refuse_existing(target, buckets=buckets)
    check_writable(target)


def check_writable(target: Path) -> None:
    """Raises `InputError` if the folder in which `target` would be made, or the folders above it, cannot be written.

    A folder is made there and removed: rights do not tell of file systems such as /proc, and not root of its own. In a
    bucket it is an object.
    """
    if isinstance(target, BucketPath):
        attempt = _beside(target, "attempt")
        attempt.write_bytes(b"")
        attempt.unlink()
        return
    target = Path(target).absolute()
    above = next(parent for parent in target.parents if os.path.lexists(parent))
    if not above.is_dir():
        raise InputError(f"{target} cannot be made: {above} is not a directory; choose another place")
    attempt = _beside(above / target.name, "attempt")  # as long as the name that the work would have
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


def rename_durably(directory: Path, target: Path) -> None:
    """Renames a complete directory, and waits until this is on disk.

    Raises:
      InputError: if something has appeared at `target`.
    """
    sync(directory)
    refuse_existing(target)
    directory.rename(target)
    sync(target.parent)


def replace_directory(target: Path, fresh: Path) -> None:
    """Moves `fresh` to `target` and removes the old directory there. `remove_replaced` cleans up after a kill."""
    old = _beside(target, "old")
    if target.exists():
        target.rename(old)
    rename_durably(fresh, target)
    shutil.rmtree(old, ignore_errors=True)


def remove_replaced(target: Path) -> None:
    """Removes the old directory that a killed `replace_directory` left; puts it back where the new one is not there."""
    old = _beside(target, "old")
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


def remove_content(directory: Path) -> None:
    """Empties a directory."""
    for child in directory.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def remove_directory(directory: Path) -> None:
    """Removes a directory, even if threads of a failed write are still writing into it."""
    if isinstance(directory, BucketPath):
        directory.objects.remove_all(directory.key)
        return
    for _ in range(100):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.05)
    shutil.rmtree(directory)


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """Yields a file to write to, which replaces `file` when the block ends without an error.

    At any time `file` has either the old content or all of the new one, which is on disk on return.
    """
    fresh = _beside(file, "new")
    try:
        with open(fresh, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        fresh.replace(file)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync(file.parent)


def replace_file(file: Path, content: bytes) -> None:
    """Replaces the content of a file atomically; see `replacing`."""
    if isinstance(file, BucketPath):
        file.write_bytes(content)
        return
    with replacing(file) as handle:
        handle.write(content)


def write_durably(file: Path, content: bytes | memoryview) -> None:
    """Writes a file and waits until it is on disk, or in the bucket."""
    if isinstance(file, BucketPath):
        file.write_bytes(content)
        return
    with open(file, "wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())


def sync(path: Path) -> None:
    """Waits until a file, or the list of files in a directory, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")
