"""Files that are only read: regular ones, and no larger than what they are read as can be.

A path that somebody else wrote may be a pipe, which waits for ever, a device without an end, or a link to one.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from moe_jax.errors import InputError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path | str) -> BinaryIO:
    """Opens a file to read its bytes; links are followed.

    Raises:
      FileNotFoundError: if there is none.
      InputError: if it is not a regular file, which may never end or never begin.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, expected a regular file")
    # If it has become a pipe since then, this does not wait for somebody to write into it.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def read_regular(path: Path | str, *, max_bytes: int) -> bytes:
    """The whole content of a file.

    Args:
      path: of the file; links are followed.
      max_bytes: what is larger is refused before it is read.

    Raises:
      FileNotFoundError: if there is none.
      InputError: if it is not a regular file, or larger.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Files of the system (`/proc`) say that they have no bytes.
        content = file.read(max_bytes + 1) if size <= max_bytes else b""
    if max(size, len(content)) > max_bytes:
        raise InputError(f"{path} has more than {max_bytes:,} bytes, which is more than it can need")
    return content
