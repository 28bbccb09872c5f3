"""Pixels of pictures on disk, so that a picture is decoded and resized once, whatever the epochs and runs."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from moe_jax.files.bounded_folder import BoundedFolder
from moe_jax.images.decoding import decode_picture
from moe_jax.images.image_config import ImageProcessing
from moe_jax.images.processing import pixels_of

_SUFFIX = ".pixels"


class PixelCache:
    """A folder of pixels, named by the picture's bytes and its processing; several runs may share it.

    Another picture under an old name, another processing and a damaged file are never mistaken for what is asked for.
    Those that were not used for longest are deleted when the folder is full.
    """

    def __init__(self, folder: Path, *, max_bytes: int, note: Callable[[str], object] = lambda line: None):
        """Makes the folder; arguments as in `BoundedFolder`."""
        self._folder = BoundedFolder(folder, _SUFFIX, max_bytes=max_bytes, note=note)

    def pixels(
        self,
        data: bytes,
        name: str,
        processing: ImageProcessing,
        *,
        remark: Callable[[str], None] | None = None,
    ) -> UInt8[np.ndarray, "S S 3"]:
        """Returns the pixels of a picture, from the folder where they are there, and otherwise made and put there.

        A folder that cannot be written to, as on a full disk, does not stop the work.

        Args:
          data: the bytes of its file.
          name: of the file, for messages.
          processing: how they become pixels.
          remark: as in `decode_picture`, where they are made.

        Raises:
          InputError: as `decode_picture`.
        """
        key = _key(data, processing)
        found = self._folder.find(key, (*processing.size, 3), np.dtype(np.uint8))
        if found is not None:
            return found
        made = pixels_of(decode_picture(data, name, remark=remark), processing)
        self._folder.keep(key, made)
        return made


def hash_of_processing(processing: ImageProcessing) -> bytes:
    """Returns a SHA-256 of how pictures become pixels."""
    return hashlib.sha256(json.dumps(dataclasses.asdict(processing), sort_keys=True).encode()).digest()


def _key(data: bytes, processing: ImageProcessing) -> str:
    return hashlib.sha256(hash_of_processing(processing) + data).hexdigest()
