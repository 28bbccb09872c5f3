"""Requests of lm-eval for texts about pictures, as a model's tokens and pixels."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from jaxtyping import UInt8
from lm_eval.api.instance import Instance

from moe_jax.core.bad_documents import BadDocument, naming
from moe_jax.core.errors import shown
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.generation.pictures import Pictures, place_pixels
from moe_jax.harness.pictures.picture_sources import APART, VISUAL, PictureSource, tokens_with_places
from moe_jax.images.processing import pixels_of
from moe_jax.models import ModelConfig
from moe_jax.nn.projector import tokens_per_picture

_NAMES = ("question_id", "id")


class PicturePrompts:
    """Makes prompts of requests; those without pictures are plain texts.

    Args:
      config: of the model.
      tokenizer: of the model.
      begin: gives the tokens of the beginning of a text.
      sources: of the pictures of every task, by its name.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        begin: Callable[[str], list[int]],
        sources: Mapping[str, PictureSource],
    ):
        self._config, self._tokenizer, self._begin, self._sources = config, tokenizer, begin, sources
        self._each = 0 if config.vision is None else tokens_per_picture(config.vision, config.d_model)

    def name_of(self, request: Instance) -> str:
        """Returns words for a request's document, with the name that it has in its file."""
        document: Mapping[str, Any] = request.doc
        names = [f", {key} {shown(document[key])}" for key in _NAMES if document.get(key) is not None]
        return f"{request.task_name}, document {request.doc_id} (from 0){''.join(names[:1])}"

    def tokens(self, request: Instance) -> tuple[list[int], int]:
        """Returns the tokens of a prompt, and how many more there will be with its pictures.

        Raises:
          BadDocument: if places and pictures differ in number.
          InputError: if there are pictures, and the model takes none.
        """
        text, names = cast(str, request.args[0]), self._named(request)
        if not names and not self._is_about_pictures(request):
            return self._begin(text), 0
        vision = self._config.check_sees(f"task {request.task_name!r}")
        ids = tokens_with_places(text, len(names), vision, self._tokenizer, self._begin)
        return ids, len(names) * (self._each - 1)

    def check(self, request: Instance) -> None:
        """Raises `BadDocument` for a picture that cannot be read."""
        for name in self._named(request):
            self._source(request).picture(name)

    def seen(
        self, requests: Sequence[Instance], prompts: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], Pictures | None]:
        """Returns a batch of prompts of `tokens` with room for their pictures, and these, as generation takes both.

        Raises:
          BadDocument: with the name of the document, for a picture that cannot be read.
        """
        asked = [(request, name) for request in requests for name in self._named(request)]
        if not asked:
            return [list(prompt) for prompt in prompts], None
        vision = self._config.check_sees("a task")
        placeholder = APART if vision.placeholder is None else vision.placeholder
        pixels = (self._pixels(request, name) for request, name in asked)
        rows, pictures = place_pixels(self._config, prompts, pixels, count=len(asked), placeholder=placeholder)
        # A token that a feature stands in the place of may be any.
        return [[max(token, 0) for token in row] for row in rows], pictures

    def key_of(self, request: Instance) -> tuple[Any, ...]:
        """Returns what the answer to a request depends on: of pictures their content, and not their names."""
        names = self._named(request)
        if not names:
            return tuple(request.args)
        source = self._source(request)
        with naming(self.name_of(request)):
            return (*request.args[:2], [source.digest(name) for name in names], source.pad)

    def _pixels(self, request: Instance, name: str) -> UInt8[np.ndarray, "H W 3"]:
        source, vision = self._source(request), self._config.check_sees("a task")
        processing = vision.processing
        if source.pad is not None:
            processing = dataclasses.replace(processing, pad=source.pad)
        with naming(self.name_of(request)):
            return pixels_of(source.picture(name), processing)

    def _source(self, request: Instance) -> PictureSource:
        return self._sources.get(request.task_name or "", PictureSource())

    def _is_about_pictures(self, request: Instance) -> bool:
        return len(request.args) > 2

    def _named(self, request: Instance) -> list[str]:
        args = cast(tuple[Any, ...], request.args)
        found = args[2].get(VISUAL) if len(args) > 2 else None
        if found is not None and not isinstance(found, list):
            raise BadDocument(f"its pictures are {shown(found)}, expected a list of names")
        return found or []
