"""Requests of lm-eval for texts about pictures, as a model's tokens and pixels."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from jaxtyping import UInt8
from lm_eval.api.instance import Instance

from moe_jax.core.bad_documents import BadDocument, naming
from moe_jax.core.errors import shown
from moe_jax.data.pictures.picture_sources import ANY_PICTURE, MARK
from moe_jax.data.rows import Example
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.generation.pictures import Pictures
from moe_jax.harness.pictures.task_pictures import TaskPictures
from moe_jax.images.processing import pixels_of
from moe_jax.models import ModelConfig

VISUAL = "visual"
"""lm-eval's name for the pictures of a request."""
_NAMES = ("question_id", "id")


class Prompt(NamedTuple):
    """A prompt for generation.

    Attributes:
      ids: its tokens.
      slots: for every token, which feature of its pictures takes its place, counted from 1; 0: none.
    """

    ids: list[int]
    slots: list[int]


class PicturePrompts:
    """Makes prompts of requests that are about pictures.

    Args:
      config: of the model.
      tokenizer: of the model.
      pictures: of every task, by its name.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, pictures: Mapping[str, TaskPictures]):
        self._config, self._tokenizer, self._pictures = config, tokenizer, pictures

    def name_of(self, request: Instance) -> str:
        """Returns words for a request's document, with the name that it has in its file."""
        document: Mapping[str, Any] = request.doc
        names = [f", {key} {shown(document[key])}" for key in _NAMES if document.get(key) is not None]
        return f"{request.task_name}, document {request.doc_id} (from 0){''.join(names[:1])}"

    def prompt(self, request: Instance, *, begins: bool) -> Prompt:
        """Returns the tokens of a prompt, with as many for a picture as it has features.

        Args:
          request: for a text.
          begins: whether BOS stands before it, where texts begin so.

        Raises:
          BadDocument: if places and pictures differ in number.
          InputError: if there are pictures, and the model takes none.
        """
        text, given = cast(str, request.args[0]), self._given(request)
        self._config.check_sees(f"task {request.task_name!r} asks about pictures")
        wrong = f"it has {len(given):,} pictures, and another number of places for them ({MARK})"
        if MARK in text and not given:
            raise BadDocument(wrong)
        example = Example(text, begins=begins, ends=False, pictures=(ANY_PICTURE,) * len(given))
        try:
            (made,) = self._tokenizer.documents([example])
        except BadDocument:
            raise BadDocument(wrong) from None
        return Prompt(made.ids.tolist(), [0] * len(made.ids) if made.slots is None else made.slots.tolist())

    def check(self, request: Instance) -> None:
        """Raises `BadDocument` for a picture that cannot be read."""
        for one in self._given(request):
            self._pictures_of(request).picture(one)

    def seen(self, requests: Sequence[Instance], slots: Sequence[Sequence[int]]) -> Pictures | None:
        """Returns the pictures of a batch of prompts, as generation takes them; None: there are none.

        Args:
          requests: of the batch.
          slots: of the tokens of every prompt.

        Raises:
          BadDocument: with the name of the document, for a picture that cannot be read.
        """
        given = [self._given(request) for request in requests]
        if not any(given):
            return None
        size = self._config.check_sees("a task").processing.size
        pixels = np.zeros((len(given), max(map(len, given)), *size, 3), np.uint8)
        for row, (request, pictures) in enumerate(zip(requests, given, strict=True)):
            for place, one in enumerate(pictures):
                pixels[row, place] = self._pixels(request, one)
        return Pictures(pixels, [list(one) for one in slots])

    def key_of(self, request: Instance) -> tuple[Any, ...]:
        """Returns what the answer to a request depends on: of pictures their content, and not their names."""
        given = self._given(request)
        if not given:
            return tuple(request.args)
        pictures = self._pictures_of(request)
        with naming(self.name_of(request)):
            return (*request.args[:2], [pictures.digest(one) for one in given], pictures.pad)

    def _pixels(self, request: Instance, given: Any) -> UInt8[np.ndarray, "H W 3"]:
        pictures, processing = self._pictures_of(request), self._config.check_sees("a task").processing
        if pictures.pad is not None:
            processing = dataclasses.replace(processing, pad=pictures.pad)
        with naming(self.name_of(request)):
            return pixels_of(pictures.picture(given), processing)

    def _pictures_of(self, request: Instance) -> TaskPictures:
        return self._pictures.get(request.task_name or "", TaskPictures())

    def _given(self, request: Instance) -> list[Any]:
        found = cast(tuple[Any, ...], request.args)[2].get(VISUAL) if is_about_pictures(request) else None
        return [] if found is None else found if isinstance(found, list) else [found]


def is_about_pictures(request: Instance) -> bool:
    """Whether a request may have pictures."""
    return len(request.args) > 2
