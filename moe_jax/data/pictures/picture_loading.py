"""Pictures of documents, made pixels as they are needed; those that cannot be read are named, or left out."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float, UInt8

from moe_jax.core.bad_documents import BadDocument, OnBad
from moe_jax.core.errors import InputError, shown
from moe_jax.data.pictures.picture_sources import PictureFiles, PictureSource
from moe_jax.data.sections import DataSection
from moe_jax.data.tokenizer import Document
from moe_jax.files.storage_path import as_path
from moe_jax.images.decoding import decode_picture
from moe_jax.images.feature_cache import digest_of
from moe_jax.images.image_config import ImageProcessing
from moe_jax.images.pixel_cache import PixelCache
from moe_jax.images.processing import pixels_of
from moe_jax.models import ModelConfig

MOST_BAD = 0.01
"""Share of the pictures that may be bad where they are skipped; of the first ones, as chance has it, a few more."""
_FEW_BAD = 3  # whatever their share
# Of as many as have this share of bad ones on average, chance makes more than this many deviations more only rarely.
_DEVIATIONS = 3
_SAID = tuple(10**power for power in range(7))  # of the bad ones, the first, the tenth, the hundredth are named


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
      pixels: keeps pixels that are made; None: they are made whenever they are needed.
      note: called with a line on what is left out.
    """

    def __init__(
        self,
        files: PictureFiles,
        processing: ImageProcessing,
        *,
        on_bad: OnBad = "stop",
        known: KnownFeatures | None = None,
        pixels: PixelCache | None = None,
        note: Callable[[str], object] = lambda line: None,
    ):
        self._files, self._processing, self._known, self._note = files, processing, known, note
        self._pixels = pixels
        self._skips = on_bad == "skip"
        self._guard = threading.Lock()
        self.seen = self.bad = 0
        self._said = False

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

    def check(self, pictures: Sequence[PictureSource]) -> None:
        """Raises `BadDocument` if one is missing; whether it can be read is known when it is loaded."""
        for picture in pictures:
            self._files.check(picture)

    def size(self, picture: PictureSource) -> tuple[int, int]:
        """Returns width and height of a picture, which is read for it; raises `BadDocument` if it cannot be."""
        data = self._files.read(picture)
        with _bad_at(picture.where):
            height, width, _ = decode_picture(data, picture.shown).shape
        return width, height

    def _load(self, picture: PictureSource) -> LoadedPicture:
        data = self._files.read(picture)
        digest = digest_of(data)
        features = None if self._known is None else self._known.find(digest.tobytes())
        if features is not None:
            return LoadedPicture(digest, None, features)
        how: Any = {"remark": partial(self._say_once, picture.where)}
        with _bad_at(picture.where):
            if self._pixels is not None:
                return LoadedPicture(digest, self._pixels.pixels(data, picture.shown, self._processing, **how))
            return LoadedPicture(digest, pixels_of(decode_picture(data, picture.shown, **how), self._processing))

    def _say_once(self, where: str, remark: str) -> None:
        """Says of the first picture with more frames than one which of them is taken."""
        with self._guard:
            is_first, self._said = not self._said, True
        if is_first:
            self._note(f"{where}: {remark}, as of all others")

    def _count_bad(self, error: BadDocument) -> None:
        with self._guard:
            self.bad += 1
            self.seen += 1
            bad, seen = self.bad, self.seen
        expected = MOST_BAD * seen
        if bad > max(_FEW_BAD, expected + _DEVIATIONS * math.sqrt(expected)):
            raise BadDocument(
                f'{error} (the picture number {bad} of {seen} that cannot be read: with data.on_bad_image = "skip" at '
                f"most {MOST_BAD:.0%} are left out)"
            )
        if bad in _SAID:
            count = "" if bad == 1 else f" ({bad:,} of {seen:,} pictures by now)"
            self._note(f'left out, as data.on_bad_image = "skip" asks{count}: {error}')


@contextlib.contextmanager
def _bad_at(where: str) -> Iterator[None]:
    """Turns what is wrong with a picture into a `BadDocument` with the place of its row."""
    try:
        yield
    except InputError as error:
        raise BadDocument(f"{where}: {error}") from None


def cache_folder(section: DataSection, key: str) -> Path | None:
    """Returns the folder that a key of the recipe's data names, to keep what is made of pictures; None: it names none.

    Raises `InputError` unless it is on a disk, and a folder if there is something.
    """
    given = getattr(section, key)
    if given is None:
        return None
    folder = as_path(given)
    if folder.on_disk is None or (folder.exists() and not folder.is_dir()):
        raise InputError(f"data.{key} = {shown(given)}: expected a folder on a disk")
    return folder


def picture_loader(section: DataSection, config: ModelConfig, **how: Any) -> PictureLoader:
    """Returns what reads the pictures of a recipe's data; further arguments as of `PictureLoader`.

    Raises `FileNotFoundError` or `NotADirectoryError` if their folder is not there.
    """
    folder = None if section.image_folder is None else as_path(section.image_folder)
    processing, kept = picture_processing(section, config), cache_folder(section, "pixel_cache")
    most = int(section.cache_gib * 2**30)
    pixels = None if kept is None else PixelCache(kept, max_bytes=most, note=how.get("note", lambda line: None))
    return PictureLoader(PictureFiles(folder), processing, **{"on_bad": section.on_bad_image, "pixels": pixels, **how})


def picture_processing(section: DataSection, config: ModelConfig) -> ImageProcessing:
    """Returns how the pictures of a recipe's data become pixels; raises `InputError` if the model takes none."""
    processing = config.check_sees("pictures in the data").processing
    if section.image_aspect is None:
        return processing
    return dataclasses.replace(processing, pad=section.image_aspect == "pad")
