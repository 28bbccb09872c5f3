"""The pictures of a task's documents: files inside of a folder, or base64 in the documents themselves."""

import base64
import binascii
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from moe_jax.core.bad_documents import BadDocument
from moe_jax.core.errors import InputError, first_sentence, shown
from moe_jax.core.template_sandbox import Template, TemplateFails
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.files.storage_path import nearest_path
from moe_jax.images.decoding import MAX_BYTES, decode_picture
from moe_jax.images.picture_files import PictureFolder
from moe_jax.models.config import VisionConfig

PLACE = "<image>"
"""Stands for a picture in the prompt of a task, whatever the model's own token for one is."""
VISUAL = "visual"
"""lm-eval's name for the pictures of a request."""
_MOST = 64


class PicturesOf:
    """A task's `doc_to_image`: the name of a field, or a template that gives the name of a picture, or a list of these.

    It is a function of a document, as lm-eval takes one. lm-eval itself reads what a template gives as Python.
    """

    def __init__(self, given: str | Sequence[str]):
        self._given = [given] if isinstance(given, str) else list(given)
        self._said = str(given)

    def __call__(self, document: Mapping[str, Any]) -> list[str]:
        """Returns the names of the pictures, or their `data:` texts; none for a field that is null.

        Raises:
          BadDocument: for anything but texts, or more than there can be.
        """
        found: list[Any] = []
        for one in self._given:
            if "{" in one:
                value: Any = _rendered(one, document)
            elif one in document:
                value = document[one]
            else:
                raise BadDocument(f"it has no {one!r}, which names its picture")
            found += value if isinstance(value, list) else [] if value is None else [value]
        if len(found) > _MOST or not all(isinstance(one, str) and one for one in found):
            raise BadDocument(f"its pictures are {shown(found)}, expected names of at most {_MOST}")
        return found

    def __str__(self) -> str:
        return self._said


_template = functools.lru_cache(maxsize=64)(functools.partial(Template, of_task=True))


def _rendered(source: str, document: Mapping[str, Any]) -> str:
    try:
        return _template(source).render(document).text
    except TemplateFails as error:
        raise BadDocument(f"doc_to_image {shown(source)} fails: {first_sentence(error)}") from None


class PictureSource:
    """Reads the pictures that the documents of a task name.

    Args:
      folder: the folder that the names are inside of; None: documents hold their pictures.
      pad: whether pictures are padded to squares before they are resized; None: as the model's config says.
    """

    def __init__(self, folder: PictureFolder | None = None, pad: bool | None = None):
        self._folder, self.pad = folder, pad

    def picture(self, name: str | Image.Image) -> UInt8[np.ndarray, "H W 3"]:
        """Returns a picture, decoded; that of a data set of the Hub is decoded already.

        Raises:
          BadDocument: if there is none, for a name that leads out of the folder, or for a damaged one.
        """
        if isinstance(name, Image.Image):
            return np.asarray(name.convert("RGB"))
        try:
            return decode_picture(self._bytes(name), self._place(name))
        except (FileNotFoundError, InputError) as error:
            raise BadDocument(str(error)) from None

    def digest(self, name: str | Image.Image) -> str:
        """Returns what tells a picture from others, whatever its name; raises `BadDocument` if there is none."""
        if isinstance(name, Image.Image):
            return hashlib.sha256(f"{name.size}".encode() + name.convert("RGB").tobytes()).hexdigest()
        try:
            return hashlib.sha256(self._bytes(name)).hexdigest()
        except (FileNotFoundError, InputError) as error:
            raise BadDocument(str(error)) from None

    def _place(self, name: str) -> str:
        return "its picture" if name.startswith("data:") else f"{self._folder.path if self._folder else ''}/{name}"

    def _bytes(self, name: str) -> bytes:
        if name.startswith("data:"):
            return _in_text(name)
        if self._folder is None:
            raise InputError(f"it names the picture {shown(name)}, but no folder is given: --image-folder DIR")
        return self._folder.read(name)


def sources_of(tasks: Mapping[str, Any], folder: Path | None, aspect: str | None) -> dict[str, PictureSource]:
    """Returns where the pictures of lm-eval's tasks come from, by the names of those that are about pictures.

    Args:
      tasks: by name.
      folder: of the pictures of all tasks; None: as each task says.
      aspect: `pad` or `square`, of all tasks; None: as each task says, or else the model.

    Raises:
      FileNotFoundError, NotADirectoryError: if there is no such folder.
    """
    sources = {}
    for name, task in tasks.items():
        if getattr(task, "MULTIMODAL", False):
            kwargs = task.get_config("dataset_kwargs") or {}
            place, wanted = folder or kwargs.get("image_folder"), aspect or kwargs.get("image_aspect")
            pad = None if wanted is None else wanted == "pad"
            sources[name] = PictureSource(None if place is None else _held(Path(place)), pad)
    return sources


def _held(folder: Path) -> PictureFolder:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no folder of pictures at {folder}{nearest_path(folder)}; name one: --image-folder DIR"
        )
    return PictureFolder(folder)


def _in_text(text: str) -> bytes:
    """Returns the bytes of a `data:image/png;base64,...` (RFC 2397)."""
    kind, comma, content = text.partition(",")
    if not comma or not kind.endswith(";base64"):
        raise InputError(f"its picture begins with {shown(text[:40])}, expected data:image/...;base64,...")
    if len(content) > MAX_BYTES * 4 // 3 + 4:
        raise InputError(f"its picture is larger than the {MAX_BYTES // 2**20} MB of a picture")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"its picture is not base64: {error}") from None


def tokens_with_places(
    text: str, pictures: int, vision: VisionConfig, tokenizer: Tokenizer, begin: Callable[[str], list[int]]
) -> list[int]:
    """Returns the tokens of a prompt, with one placeholder for each picture.

    For a model without a token for pictures (MoE-LLaVA's), the pieces around a picture are tokenised apart, and `APART`
    stands between them.

    Args:
      text: the prompt, in which `PLACE` stands for a picture.
      pictures: their number.
      vision: what the model sees with.
      tokenizer: of the model.
      begin: gives the tokens of the beginning of a text, after BOS where it begins so.

    Raises:
      BadDocument: if places and pictures differ in number.
    """
    pieces = text.split(PLACE)
    if len(pieces) != pictures + 1:
        raise BadDocument(f"it has {pictures:,} pictures, and its prompt has {PLACE} {len(pieces) - 1:,} times")
    if vision.placeholder is None:
        return [*begin(pieces[0]), *(id for piece in pieces[1:] for id in [APART, *tokenizer.encode(piece).tolist()])]
    ids = begin(tokenizer.token(vision.placeholder).join(pieces))
    if ids.count(vision.placeholder) != pictures:
        raise BadDocument(
            f"its prompt has token {vision.placeholder}, which stands for a picture, {ids.count(vision.placeholder):,} "
            f"times, and it has {pictures:,} pictures"
        )
    return ids


APART = -1
"""Stands for a picture among the tokens of a model that has no token for one."""
