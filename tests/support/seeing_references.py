"""Models of Transformers that see, and ours of the same weights, side by side."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from moe_jax.conversion import HuggingFaceDirectory
from moe_jax.model_io.loading import load_model, model_leaves
from tests.families.reference import gradients
from tests.support.vision_models import normalised


def their_pixels(source: HuggingFaceDirectory, pictures: list[np.ndarray]) -> torch.Tensor:
    """Pixels as Transformers' model takes them."""
    vision = source.config.vision
    assert vision is not None
    pixels = normalised(pictures, vision.processing.mean, vision.processing.std)
    return pixels[None] if vision.family == "smolvlm" else pixels


def check_loss_and_gradients(
    theirs: Any, source: HuggingFaceDirectory, seen: Any, folder: pathlib.Path, sees: Callable[[str], bool]
) -> None:
    """Compares the loss and every gradient; those of leaves that see must not be zero.

    `theirs` is not to be used afterwards: its weights give way to their gradients.
    """
    text = np.where(seen.slots > 0, -100, seen.ids)[:, 1:]  # pictures are not scored
    shifted = torch.tensor(np.pad(text, ((0, 0), (1, 0)), constant_values=-100), dtype=torch.long)
    expected = theirs(torch.tensor(seen.ids), pixel_values=their_pixels(source, seen.pictures), labels=shifted).loss
    expected.backward()
    batch = {
        **{"tokens": seen.ids[:, :-1], "slots": seen.slots[:, :-1], "pixels": seen.pixels},
        **{"targets": np.maximum(text, 0), "weights": (text >= 0).astype(np.float32)},
    }
    graphdef, params = nnx.split(load_model(source))
    run = jax.jit(jax.value_and_grad(lambda params, batch: nnx.merge(graphdef, params).loss(batch)))
    loss, gradient = run(params, jax.tree.map(jnp.asarray, batch))
    np.testing.assert_allclose(loss, expected.item(), rtol=2e-5)
    found = gradients(theirs, folder)
    largest = max(np.abs(leaf).max() for leaf in found.values())
    leaves = dict(model_leaves(nnx.merge(graphdef, gradient)))
    seeing = [path for path in leaves if sees(path)]
    assert len(seeing) >= 4 and all(np.abs(found[path]).max() > 0 for path in seeing)
    for path, leaf in leaves.items():
        scale = max(np.abs(found[path]).max(), 1e-2 * largest)
        np.testing.assert_allclose(leaf, found[path], atol=1e-4 * scale, rtol=0, err_msg=path)
