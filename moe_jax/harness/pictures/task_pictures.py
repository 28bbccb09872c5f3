"""The pictures of a task's documents: which they name or hold, and where the names lead to."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from moe_jax.core.bad_documents import BadDocument
from moe_jax.core.errors import InputError, first_sentence, shown
from moe_jax.core.template_sandbox import Template, TemplateFails
from moe_jax.data.pictures.picture_sources import picture_of
from moe_jax.files.storage_path import nearest_path
from moe_jax.images.decoding import decode_picture, pixels_in
from moe_jax.images.picture_files import PictureFolder

_MOST = 64
_WHAT = "its picture"


class PicturesOf:
    """A task's `doc_to_image`: the name of a field, or a template that gives the name of a picture, or a list of these.

    It is a function of a document, as lm-eval takes one. lm-eval itself reads what a template gives as Python.
    """

    def __init__(self, given: str | Sequence[str]):
        self._given = [given] if isinstance(given, str) else list(given)
        self._said = str(given)

    def __call__(self, document: Mapping[str, Any]) -> list[Any]:
        """Returns what names or holds the pictures (`picture_of`); nothing for a field that is null.

        Raises:
          BadDocument: for anything else, or more than there can be.
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
        if len(found) > _MOST:
            raise BadDocument(f"it has {len(found):,} pictures, more than {_MOST}")
        for picture in found:
            if isinstance(picture, Image.Image):
                continue
            try:
                picture_of(picture, _WHAT)
            except InputError as error:
                raise BadDocument(str(error)) from None
        return found

    def __str__(self) -> str:
        return self._said


_template = functools.lru_cache(maxsize=64)(functools.partial(Template, of_task=True))


def _rendered(source: str, document: Mapping[str, Any]) -> str:
    try:
        return _template(source).render(document).text
    except TemplateFails as error:
        raise BadDocument(f"doc_to_image {shown(source)} fails: {first_sentence(error)}") from None


class TaskPictures:
    """Reads the pictures that the documents of a task name or hold.

    Attributes:
      pad: whether pictures are padded to squares before they are resized; None: as the model's config says.
    """

    def __init__(self, folder: PictureFolder | None = None, pad: bool | None = None):
        """Takes the folder that names are inside of; None: documents hold their pictures."""
        self._folder, self.pad = folder, pad

    def picture(self, given: Any) -> UInt8[np.ndarray, "H W 3"]:
        """Returns a picture, decoded; that of a data set of the Hub is decoded already.

        Raises:
          BadDocument: if there is none, for a name that leads out of the folder, or for a damaged one.
        """
        try:
            if isinstance(given, Image.Image):
                return pixels_in(given, "a picture")
            data, place = self._read(given)
            return decode_picture(data, place)
        except InputError as error:
            raise BadDocument(str(error)) from None

    def digest(self, given: Any) -> str:
        """Returns what tells a picture from others, whatever its name; raises errors as `picture`."""
        if isinstance(given, Image.Image):
            pixels = self.picture(given)
            return hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).hexdigest()
        return hashlib.sha256(self._read(given)[0]).hexdigest()

    def _read(self, given: Any) -> tuple[bytes, str]:
        """Returns the bytes of a picture's file, and its name in messages."""
        try:
            source = picture_of(given, _WHAT)
            if source.data is not None:
                return source.data, _WHAT
            if self._folder is None:
                raise InputError(f"{_WHAT} is {shown(source.name)}, but no folder is given: --image-folder DIR")
            return self._folder.read(source.name or ""), f"{self._folder.path}/{source.name}"
        except (FileNotFoundError, InputError) as error:
            raise BadDocument(str(error)) from None


def pictures_of_tasks(tasks: Mapping[str, Any], folder: Path | None, aspect: str | None) -> dict[str, TaskPictures]:
    """Returns where the pictures of lm-eval's tasks come from, by the names of those that are about pictures.

    Args:
      tasks: by name.
      folder: of the pictures of all tasks; None: as each task says.
      aspect: `pad` or `square`, of all tasks; None: as each task says, or else the model.

    Raises:
      FileNotFoundError, NotADirectoryError: if there is no such folder.
      InputError: for a task about sounds, or one that asks how likely answers about pictures are.
    """
    found = {}
    for name, task in tasks.items():
        if task.get_config("doc_to_audio"):
            raise InputError(f"task {name!r} is about sounds, which no model here hears")
        if getattr(task, "MULTIMODAL", False) and task.OUTPUT_TYPE != "generate_until":
            raise InputError(
                f"task {name!r} is {task.OUTPUT_TYPE}, and only what is written about pictures is evaluated"
            )
        if getattr(task, "MULTIMODAL", False):
            kwargs = task.get_config("dataset_kwargs") or {}
            place, wanted = folder or kwargs.get("image_folder"), aspect or kwargs.get("image_aspect")
            pad = None if wanted is None else wanted == "pad"
            found[name] = TaskPictures(None if place is None else _held(Path(place)), pad)
    return found


def _held(folder: Path) -> PictureFolder:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no folder of pictures at {folder}{nearest_path(folder)}; name one: --image-folder DIR"
        )
    return PictureFolder(folder)
