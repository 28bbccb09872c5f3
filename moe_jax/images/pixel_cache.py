"""Pixels of pictures on disk, so that a picture is decoded and resized once, whatever the epochs and runs."""

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from moe_jax.images.decoding import decode_picture
from moe_jax.images.image_config import ImageProcessing
from moe_jax.images.processing import pixels_of

_SUFFIX, _UNFINISHED = ".pixels", ".part"
# A run that was killed left what is so many seconds old and not finished.
_ABANDONED = 3600
# The folder is measured each time so many bytes were added, as a share of what it may hold.
_MEASURED_EVERY = 1 / 16
# What is deleted makes room for more than one picture.
_KEPT = 7 / 8


class PixelCache:
    """A folder of pixels, named by the picture's bytes and its processing; several runs may share it.

    Another picture under an old name, another processing and a damaged file are never mistaken for what is asked for.
    Those that were not used for longest are deleted when the folder is full.
    """

    def __init__(self, folder: Path, *, max_bytes: int):
        """Makes the folder; `max_bytes` is what all of its files may take together."""
        self._folder, self._max_bytes = folder, max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._added = 0

    def pixels(self, data: bytes, name: str, processing: ImageProcessing) -> UInt8[np.ndarray, "S S 3"]:
        """Returns the pixels of a picture, from the folder where they are there, and otherwise made and put there.

        A folder that cannot be written to, as on a full disk, does not stop the work.

        Args:
          data: the bytes of its file.
          name: of the file, for messages.
          processing: how they become pixels.

        Raises:
          InputError: as `decode_picture`.
        """
        file = self._folder / f"{_key(data, processing)}{_SUFFIX}"
        found = _read(file, processing)
        if found is not None:
            return found
        made = np.ascontiguousarray(pixels_of(decode_picture(data, name), processing))
        with contextlib.suppress(OSError):
            self._keep(file, made)
        return made

    def _keep(self, file: Path, made: UInt8[np.ndarray, "S S 3"]) -> None:
        # A file is there whole or not at all, also if two runs write it.
        pixels = made.tobytes()
        content = hashlib.sha256(pixels).digest() + pixels
        descriptor, temporary = tempfile.mkstemp(_UNFINISHED, dir=self._folder)
        try:
            with os.fdopen(descriptor, "wb") as out:
                out.write(content)
            os.replace(temporary, file)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._added += len(content)
        if self._added >= self._max_bytes * _MEASURED_EVERY:
            self._added = 0
            self._make_room()

    def _make_room(self) -> None:
        used: list[tuple[float, int, Path]] = []
        for file in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another run made room
                found = file.stat()
                if file.suffix == _SUFFIX:
                    used.append((found.st_mtime, found.st_size, file))
                elif file.suffix == _UNFINISHED and found.st_mtime < time.time() - _ABANDONED:
                    file.unlink()
        total = sum(size for _, size, _ in used)
        if total <= self._max_bytes:
            return
        for _, size, file in sorted(used):
            if total <= self._max_bytes * _KEPT:
                return
            file.unlink(missing_ok=True)
            total -= size


def _key(data: bytes, processing: ImageProcessing) -> str:
    said = json.dumps(dataclasses.asdict(processing), sort_keys=True).encode()
    return hashlib.sha256(hashlib.sha256(said).digest() + data).hexdigest()


def _read(file: Path, processing: ImageProcessing) -> UInt8[np.ndarray, "S S 3"] | None:
    """Returns the pixels in a file; None: there is none, or it is not whole."""
    try:
        content = file.read_bytes()
        os.utime(file)
    except OSError:
        return None
    hashed, pixels = content[:32], content[32:]
    if len(pixels) != processing.size[0] * processing.size[1] * 3 or hashlib.sha256(pixels).digest() != hashed:
        return None
    return np.frombuffer(pixels, np.uint8).reshape(*processing.size, 3)
