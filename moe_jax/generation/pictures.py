"""Pictures of prompts: read, processed, and put where their placeholders are."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, UInt8

from moe_jax.core.errors import InputError, shown
from moe_jax.data.pictures.picture_sources import picture_of
from moe_jax.generation.spec import Picture
from moe_jax.images.decoding import decode_picture
from moe_jax.images.picture_files import read_picture
from moe_jax.images.processing import pixels_of
from moe_jax.images.slots import place_pictures
from moe_jax.models import ModelConfig
from moe_jax.nn.projector import tokens_per_picture

_NO_TOKEN = -1  # as of `Tokenizer.prompt`


class Pictures(NamedTuple):
    """The pictures in rows of tokens, and where they stand.

    Attributes:
      pixels: of the pictures of every row; what no slot names does nothing.
      slots: for every token of every row, which feature of its pictures takes its place, counted from 1; 0: none.
    """

    pixels: UInt8[np.ndarray, "B M H W 3"]
    slots: list[list[int]]


class PictureFeatures(NamedTuple):
    """The same, with features in place of pixels, as an image encoder makes them of these."""

    features: Float[Array, "B M n w"]
    slots: list[list[int]]


def see_prompts(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    pictures: Sequence[Picture],
    *,
    remark: Callable[[str], None] | None = None,
) -> tuple[list[list[int]], Pictures | None]:
    """Returns prompts with room for their pictures, and these; None: there are none.

    Args:
      config: of the model.
      prompts: token ids, with placeholders as in `place_pictures`: -1 for a model that has no token for pictures.
      pictures: of all prompts, in the order of their placeholders.
      remark: takes a line about what of a file is left out.

    Raises:
      InputError: if the model takes no pictures, if they differ in number from the placeholders, or for one that cannot
        be read.
      FileNotFoundError: if there is nothing at a path.
    """
    vision, prompts = config.vision, [list(prompt) for prompt in prompts]
    if vision is None:
        if pictures:
            config.check_sees("pictures in prompts")
        return prompts, None
    if vision.placeholder is None and not pictures:
        return prompts, None
    each, placeholder = tokens_per_picture(vision, config.d_model), _NO_TOKEN
    if vision.placeholder is not None:
        placeholder = vision.placeholder
    rows = place_pictures(prompts, len(pictures), placeholder=placeholder, per_picture=each)
    prompts = [row.ids for row in rows]
    if not pictures:
        return prompts, None
    pixels = np.zeros((len(rows), max(row.pictures for row in rows), *vision.processing.size, 3), np.uint8)
    left = iter(pictures)
    for index, row in enumerate(rows):
        for place in range(row.pictures):
            pixels[index, place] = pixels_of(_decoded(next(left), remark), vision.processing)
    return prompts, Pictures(pixels, [row.slots for row in rows])


def given_picture(value: Any, where: str) -> Picture:
    """Returns the picture that a part of a message names or holds, as `see_prompts` takes it.

    Args:
      value: the path of a picture, its pixels, a data URL or base64, or OpenAI's `{"url": ...}` of these.
      where: the value stands; for messages.

    Raises:
      InputError: for anything else, an address on the network, and bytes that are no picture.
    """
    if isinstance(value, np.ndarray | os.PathLike):
        return value
    source = picture_of(value, where)
    if source.data is not None:
        return decode_picture(source.data, where)
    assert source.name is not None, "a picture that is not held is named"
    return source.name


def _decoded(picture: Any, remark: Callable[[str], None] | None) -> UInt8[np.ndarray, "H W 3"]:
    if isinstance(picture, str | os.PathLike):
        return read_picture(picture, remark=remark)
    array = np.asarray(picture)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        given = f"{array.dtype}{list(array.shape)}" if isinstance(picture, np.ndarray) else shown(picture)
        raise InputError(f"a picture is {given}, expected the path of one, or its pixels uint8[H, W, 3]")
    return array
