"""Files in a form that can be read at any place, made once of files that cannot, and kept in the user's cache.

The copies lie in `moe_jax/data` below `$XDG_CACHE_HOME`, by default ~/.cache. Each may be removed: it is made again.
"""

import gzip
import hashlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from moe_jax.errors import InputError, first_line

COMPRESSED = (".gz", ".zst")
"""Suffixes of files that are compressed as a whole."""


def import_pyarrow(what: str) -> Any:
    """The package pyarrow, which `what` needs.

    Raises:
      InputError: if it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{what} needs the package pyarrow: pip install 'moe-jax[data]'") from None
    return pyarrow


def cached_copy(file: Path, form: str, write: Callable[[IO[bytes]], object]) -> Path:
    """A copy of a file in another form, made now unless it was made of just this file before.

    Args:
      file: is identified by where it lies, its size and when it was changed.
      form: of the copy; names what `write` does.
      write: writes the copy. Nothing is left of it after an error.
    """
    stat = file.stat()
    identity = f"{file.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n{form}"
    copy = _folder() / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.{form.split()[0]}"
    if copy.is_file():
        return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    # Other processes may be making the same copy: the last one stays, and all are equal.
    descriptor, fresh = tempfile.mkstemp(dir=copy.parent, prefix=".", suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as handle:
            write(handle)
        os.replace(fresh, copy)
    except BaseException:
        os.unlink(fresh)
        raise
    return copy


def uncompressed(file: Path) -> Path:
    """The file, or of a compressed one (`COMPRESSED`) a copy of what it holds.

    Raises:
      InputError: if it cannot be read as what its name says.
    """
    if file.suffix not in COMPRESSED:
        return file
    arrow = import_pyarrow(f"{file}: zstd") if file.suffix == ".zst" else None

    def write(handle: IO[bytes]) -> None:
        try:
            with gzip.open(file, "rb") if arrow is None else arrow.CompressedInputStream(str(file), "zstd") as content:
                shutil.copyfileobj(content, handle, 1 << 20)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{file} is not a whole gzip file: {first_line(error)}") from None
        except OSError as error:
            if arrow is None or error.errno is not None:  # of the system, such as a full disk
                raise
            raise InputError(f"{file} is not a whole zstd file: {first_line(error)}") from None

    return cached_copy(file, "plain", write)


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "moe_jax" / "data"
