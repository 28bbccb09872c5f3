"""Features of pictures on disk, so that a frozen tower looks at a picture once, whatever the epochs and runs."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from moe_jax.files.bounded_folder import BoundedFolder
from moe_jax.images.image_config import ImageProcessing
from moe_jax.images.pixel_cache import hash_of_processing

_SUFFIX = ".features"
DIGEST_BYTES = 32
"""Bytes of what `digest_of` returns."""
# As much of a tower's fingerprint as stands in the names of files, in hexadecimal digits.
_SHOWN_DIGITS = 16


class FeatureCache:
    """A folder of features, named by the tower, the processing and the picture's bytes; several runs may share it.

    What another tower or another processing made of a picture is never mistaken for what is asked for, nor is a damaged
    file. Those that were not used for longest are deleted when the folder is full.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        processing: ImageProcessing,
        shape: tuple[int, int],
        dtype: np.dtype,
        max_bytes: int,
        note: Callable[[str], object] = lambda line: None,
    ):
        """Makes the folder.

        Args:
          folder: on a disk.
          fingerprint: of the tower, in hexadecimal digits: of all that features depend on beside pixels.
          processing: how pictures become pixels.
          shape: number and width of the features of a picture.
          dtype: of the features.
          max_bytes: what all files may take together.
          note: called with a remark if the folder cannot be written to, is full, or holds features of other towers
            alone.
        """
        whole = hashlib.sha256(fingerprint.encode() + hash_of_processing(processing)).hexdigest()
        self._tower, self._shape, self._dtype = whole, shape, dtype
        self._folder = BoundedFolder(folder, _SUFFIX, max_bytes=max_bytes, note=note)
        keys = self._folder.keys()
        if keys and not any(key.startswith(whole[:_SHOWN_DIGITS]) for key in keys):
            note(
                f"{folder} holds features of another tower, dtype or processing alone: those of this one are made anew"
            )

    def find(self, digest: bytes) -> Float[np.ndarray, "n w"] | None:
        """Returns the features of a picture, by the `digest_of` its file; None: they are not there."""
        return self._folder.find(self._key(digest), self._shape, self._dtype)

    def keep(self, digest: bytes, features: Float[np.ndarray, "n w"]) -> None:
        """Puts the features of a picture there, where that is possible."""
        assert (features.shape, features.dtype) == (self._shape, self._dtype), "features are of the tower"
        self._folder.keep(self._key(digest), features)

    def _key(self, digest: bytes) -> str:
        assert len(digest) == DIGEST_BYTES, "a digest is a SHA-256"
        picture = hashlib.sha256(self._tower.encode() + digest).hexdigest()
        return f"{self._tower[:_SHOWN_DIGITS]}-{picture}"


def digest_of(data: bytes) -> UInt8[np.ndarray, " 32"]:
    """Returns the SHA-256 of a picture's file: as an array, for batches have it beside the pixels.

    >>> digest_of(b"").shape
    (32,)
    """
    return np.frombuffer(hashlib.sha256(data).digest(), np.uint8)
