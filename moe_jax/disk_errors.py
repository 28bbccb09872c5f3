"""Errors of the disk, whatever library reports them."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns an error that says "No space left on device" or the like in its text into the `OSError` that it is.

    TensorStore reports a full disk as `ValueError`, and Orbax may wrap it.

    Args:
      path: what was being written, to be named in the message.

    Raises:
      OSError: with the error's number and `path`.
    """
    try:
        yield
    except Exception as error:
        text = "\n".join(str(cause) for cause in _causes(error))
        for code in _CODES:
            if os.strerror(code) in text:
                raise OSError(code, os.strerror(code), str(path)) from error
        raise


def _causes(error: BaseException) -> list[BaseException]:
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes
