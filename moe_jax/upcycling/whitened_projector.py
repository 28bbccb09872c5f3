"""A projector that begins with what differs between pictures: its first product half whitens the features of some.

Most of the power of a tower's features is the same in all pictures, and most of the rest lies in few directions. Where
a projector is drawn at random, its steps of training are spent on these, while colours and shapes are in the others.
Whitened wholly, all directions would be equally large, and hundreds of them say little: half way, those in which
pictures differ more are still larger, and training finds sooner what it needs.
"""

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from moe_jax.core.errors import InputError
from moe_jax.files.storage_path import as_path
from moe_jax.images.picture_files import read_picture
from moe_jax.images.processing import pixels_of
from moe_jax.model_io.loading import load_tower
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import VisionConfig
from moe_jax.nn.projector import shape_of_features
from moe_jax.nn.vision import features_of

_MOST_PICTURES, _MOST_BYTES = 1024, 2 << 30  # of their features
_GROUP = 8
_SUFFIXES = frozenset(".png .jpg .jpeg .webp .gif .bmp .tif .tiff".split())
_KEPT = 0.993
"""Share of the variance of features whose directions are made equally large; others stay smaller."""


def features_in(folder: str | os.PathLike[str], tower: ModelSource, vision: VisionConfig) -> Float[np.ndarray, "N n w"]:
    """Returns what a tower makes of the first pictures in a folder, by name: of 1,024, or as many as 2 GiB hold.

    Args:
      folder: of pictures; what has another suffix than those of pictures is passed over.
      tower: the image encoder.
      vision: how it is looked at.

    Raises:
      FileNotFoundError: if there is no such folder, or no picture in it.
      InputError: for a picture that cannot be read.
    """
    place = as_path(folder)
    if not place.is_dir():
        raise FileNotFoundError(f"no folder of pictures at {folder}")
    files = sorted(file for file in place.iterdir() if file.suffix.lower() in _SUFFIXES)
    if not files:
        raise FileNotFoundError(f"no picture in {folder}: expected files {', '.join(sorted(_SUFFIXES))}")
    count, width = shape_of_features(vision)
    files = files[: max(_GROUP, min(_MOST_PICTURES, _MOST_BYTES // (4 * count * width)))]
    graphdef, state = nnx.split(load_tower(tower))

    @jax.jit
    def look(state: nnx.State, pixels: UInt8[Array, "B H W 3"]) -> Float[Array, "B n w"]:
        return features_of(vision, nnx.merge(graphdef, state), pixels)

    made = np.empty((len(files), count, width), np.float32)
    for start in range(0, len(files), _GROUP):
        group = [pixels_of(read_picture(file), vision.processing) for file in files[start : start + _GROUP]]
        padded = np.stack([*group, *[group[0]] * (_GROUP - len(group))])
        made[start : start + len(group)] = np.asarray(look(state, padded))[: len(group)]
    return made


def whiten(
    steps: Sequence[Any], features: Float[np.ndarray, "N n w"], embeddings: Float[np.ndarray, "V d"], *, seed: int
) -> None:
    """Changes a projector that was drawn: its first product half whitens features, and its last one gives embeddings.

    What the first product makes of the features has mean 0 and variance 1, in directions that a rotation mixes. What
    the last one makes has the mean of the embeddings and their variance, if what it gets has the variance that it was
    drawn for. A projector with one product does both.

    Args:
      steps: of the projector, with their parameters.
      features: of N pictures, before the projector.
      embeddings: of tokens, of the language model.
      seed: of the rotation.

    Raises:
      InputError: if no step is a product, or there are too few pictures for the variance of features.
    """
    products = [index for index, step in enumerate(steps) if hasattr(step, "kernel")]
    if not products:
        raise InputError("--pictures: the projector has no linear step, which they are for")
    x = jnp.asarray(features)
    for step in steps[: products[0]]:
        x = step(x)
    first, last = steps[products[0]], steps[products[-1]]
    rows = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    if len(rows) <= rows.shape[1]:
        least = -(-(rows.shape[1] + 1) // x.shape[1])
        raise InputError(f"--pictures: {len(features)} pictures, expected at least {least} to whiten their features")
    kernel, bias = _whitening(rows, first.kernel[...].shape[1], seed)
    mean = np.mean(embeddings, axis=0)
    deviation = float(np.std(embeddings - mean))
    if len(products) == 1:
        kernel, bias = kernel * deviation, bias * deviation + mean
    _put(first, kernel, bias)
    if len(products) > 1:
        x = jnp.asarray(rows[: 1 << 12], jnp.float32)
        for step in steps[products[0] : products[-1]]:
            x = step(x)
        given = np.asarray(last.kernel[...], np.float64)
        made = np.asarray(x, np.float64) @ given
        scale = deviation / max(float(np.std(made - made.mean(axis=0))), 1e-12)
        _put(last, given * scale, mean - made.mean(axis=0) * scale)


def _whitening(
    rows: Float[np.ndarray, "M w"], width: int, seed: int
) -> tuple[Float[np.ndarray, "w d"], Float[np.ndarray, " d"]]:
    """Returns a product and its bias that make the rows of mean 0, and every entry of variance 1.

    A direction of variance v is divided by the fourth root of v, half way to whitening, and then all are mixed.
    """
    mean = rows.mean(axis=0)
    power, directions = np.linalg.eigh(np.cov((rows - mean).T))
    power, directions = np.maximum(power[::-1], 0), directions[:, ::-1]
    kept = int(np.searchsorted(np.cumsum(power) / power.sum(), _KEPT)) + 1
    kept = min(kept, width)
    # Directions near the last that is kept are not made larger than they are sure to be.
    scaled = directions[:, :kept] / (power[:kept] + power[kept - 1]) ** 0.25
    rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=(width, width)))[0][:kept]
    kernel = scaled @ rotation
    kernel /= np.sqrt(np.einsum("wd,wv,vd->d", kernel, np.cov(rows.T), kernel, optimize=True))
    return kernel, -mean @ kernel


def _put(step: Any, kernel: Float[np.ndarray, "w d"], bias: Float[np.ndarray, " d"]) -> None:
    """Sets the parameters of a product; one without a bias does without the mean."""
    step.kernel[...] = jnp.asarray(kernel, step.kernel[...].dtype)
    if getattr(step, "bias", None) is not None:
        step.bias[...] = jnp.asarray(bias, step.bias[...].dtype)
