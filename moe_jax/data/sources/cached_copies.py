"""Copies of files in a form with random access, made once and kept in the user's cache.

The copies lie in `moe_jax/data` below `$XDG_CACHE_HOME`, by default ~/.cache. Each may be removed: it is made again.
"""

import gzip
import hashlib
import io
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from moe_jax.core.errors import InputError, first_line
from moe_jax.files.byte_files import open_bytes
from moe_jax.files.storage_path import as_path

COMPRESSED = (".gz", ".zst")
"""Suffixes of compressed files."""
_BUFFER_BYTES = 32 << 20


def import_pyarrow(what: str) -> Any:
    """Imports the package pyarrow, which `what` needs.

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
    """Returns a copy of a file in another form; makes it unless it was made from the same file before.

    Args:
      file: identified by its path, its size and its time of change; an object in a bucket by its generation.
      form: name of the copy's form, and so of what `write` does.
      write: writes the copy. Nothing is left of it after an error.
    """
    identity = f"{file.resolve()}\n{as_path(file).version()}\n{form}"
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
    """Returns the file, or for a compressed one (`COMPRESSED`) an uncompressed copy.

    Raises:
      InputError: if its content does not have the format of its suffix.
    """
    if file.suffix not in COMPRESSED:
        return file
    arrow = import_pyarrow(f"{file}: zstd") if file.suffix == ".zst" else None

    def write(handle: IO[bytes]) -> None:
        try:
            with read_through(file) as stored, _content(stored, arrow) as content:
                shutil.copyfileobj(content, handle, 1 << 20)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{file} is not a whole gzip file: {first_line(error)}") from None
        except OSError as error:
            if arrow is None or error.errno is not None:  # of the system, such as a full disk
                raise
            raise InputError(f"{file} is not a whole zstd file: {first_line(error)}") from None

    return cached_copy(file, "plain", write)


def read_through(file: Path) -> IO[bytes]:
    """Opens a file, or object, for reading from beginning to end in large pieces."""
    return io.BufferedReader(open_bytes(file), _BUFFER_BYTES)


def _content(stored: IO[bytes], arrow: Any) -> Any:
    """Returns the content of a compressed file: zstd if arrow is given, else gzip."""
    return gzip.open(stored, "rb") if arrow is None else arrow.CompressedInputStream(stored, "zstd")


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "moe_jax" / "data"
