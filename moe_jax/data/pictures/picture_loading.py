"""Pictures of documents, made pixels as they are needed; those that cannot be read are named, or left out."""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float, UInt8

from moe_jax.core.bad_documents import BadDocument, OnBad
from moe_jax.core.errors import InputError
from moe_jax.data.pictures.picture_sources import PictureFiles, PictureSource
from moe_jax.data.tokenizer import Document
from moe_jax.images.decoding import decode_picture
from moe_jax.images.feature_cache import digest_of
from moe_jax.images.image_config import ImageProcessing
from moe_jax.images.processing import pixels_of

MOST_BAD = 0.01
"""Share of the pictures that may be bad where they are skipped."""
_COUNTED_FROM = 300  # pictures; of fewer, a few may be bad whatever their share


class LoadedPicture(NamedTuple):
    """A picture as a batch has it.

    Attributes:
      digest: of the bytes of its file (`feature_cache.digest_of`).
      pixels: None: its features are known.
      features: what the tower makes of it; None: not known.
    """

    digest: UInt8[np.ndarray, " 32"]
    pixels: UInt8[np.ndarray, "H W 3"] | None
    features: Float[np.ndarray, "n w"] | None = None


class KnownFeatures(Protocol):
    """Features of pictures that a tower looked at before.

    Attributes:
      shape: n and w, the number and width of a picture's features.
      dtype: of them.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def find(self, digest: bytes) -> Float[np.ndarray, "n w"] | None:
        """Returns the features of a picture; None: they are not known."""
        ...


class PictureLoader:
    """Reads and decodes the pictures of documents. Several threads may use it.

    Args:
      files: where names of pictures lead to.
      processing: how pictures become pixels.
      on_bad: whether a picture that cannot be read ends everything.
      known: features that need no pixels.
      note: called with a line on what is left out.
    """

    def __init__(
        self,
        files: PictureFiles,
        processing: ImageProcessing,
        *,
        on_bad: OnBad = "stop",
        known: KnownFeatures | None = None,
        note: Callable[[str], object] = lambda line: None,
    ):
        self._files, self._processing, self._known, self._note = files, processing, known, note
        self._skips = on_bad == "skip"
        self._guard = threading.Lock()
        self.seen = self.bad = 0

    def __call__(self, documents: Sequence[Document]) -> tuple[list[Document], list[LoadedPicture]]:
        """Returns the documents whose pictures can be read, and these pictures in their order.

        Raises:
          BadDocument: with the place of the row and the picture's name, for one that cannot be read; if such are
            skipped, where they are more than `MOST_BAD` of all.
        """
        kept, pictures = [], []
        for document in documents:
            try:
                own = [self._load(picture) for picture in document.pictures]
            except BadDocument as error:
                if not self._skips:
                    raise
                self._count_bad(error)
                continue
            kept.append(document)
            pictures += own
            with self._guard:
                self.seen += len(own)
        return kept, pictures

    def _load(self, picture: PictureSource) -> LoadedPicture:
        data = self._files.read(picture)
        digest = digest_of(data)
        features = None if self._known is None else self._known.find(digest.tobytes())
        if features is not None:
            return LoadedPicture(digest, None, features)
        try:
            return LoadedPicture(digest, pixels_of(decode_picture(data, picture.shown), self._processing))
        except InputError as error:
            raise BadDocument(f"{picture.where}: {error}") from None

    def _count_bad(self, error: BadDocument) -> None:
        with self._guard:
            self.bad += 1
            self.seen += 1
            bad, seen = self.bad, self.seen
        if bad > MOST_BAD * max(seen, _COUNTED_FROM):
            raise BadDocument(
                f'{error} (the picture number {bad} of {seen} that cannot be read: with data.on_bad_image = "skip" at '
                f"most {MOST_BAD:.0%} are left out)"
            )
        if bad == 1:
            self._note(f'left out, as data.on_bad_image = "skip" asks, and later ones without a word: {error}')
