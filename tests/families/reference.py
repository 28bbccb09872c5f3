"""Random small models of Transformers, and ours from the same weights."""

import dataclasses
import pathlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from moe_jax.conversion import HuggingFaceDirectory
from moe_jax.model_io.loading import leaf_specs, load_model
from tests.families.cases import SMALL
from tests.support.losses import next_token_loss


def random_model(file: ModuleType, name: str, **usual: Any) -> Any:
    """A model of Transformers whose every parameter and buffer is random and large enough to matter.

    Keys of the config in `usual` take the place of those in `SMALL`, and give way to those of the case.
    """
    config = getattr(transformers, file.CONFIG)(**{**SMALL, **usual, **file.CASES[name]})
    # Other implementations of attention leave out soft caps, and round differently.
    model = getattr(transformers, file.MODEL)._from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, value in model.state_dict().items():
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in key and not key.endswith("bias"):
                # What is added to a scale of 1 is small, or all norms would double what comes in.
                is_centred = any(name in key for name in getattr(file, "ZERO_CENTRED", ()))
                value.copy_((0 if is_centred else 1) + 0.1 * noise)
            else:
                value.copy_(0.15 * noise)
    return model.float().eval()


def saved(model: Any, folder: pathlib.Path) -> HuggingFaceDirectory:
    """A model of Transformers as a checkpoint."""
    model.save_pretrained(folder)
    return HuggingFaceDirectory(folder)


def gradients(model: Any, folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Leaf path -> gradient that Transformers has for it: they are saved in the place of the parameters.

    A parameter that took no part, and a buffer, has a gradient of zeros. The values of the parameters are lost.
    """
    # Under each of its names: a tied parameter has two.
    found = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    with torch.no_grad():
        for name, value in model.state_dict().items():
            gradient = found.get(name)
            value.copy_(torch.zeros_like(value) if gradient is None else gradient)
    source = saved(model, folder)
    return {path: source.read(path) for path in source.specs()}


def mean_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Of predicting every token but the first from those before it."""
    loss, count = next_token_loss(logits[:, :-1], tokens[:, 1:], jnp.ones(tokens[:, 1:].shape, jnp.float32))
    return loss / count


class FirstLayers:
    """The first layers of a model, without its final norm: a `ModelSource`."""

    base, lineage, tokenizer_files = None, (), ()

    def __init__(self, source: HuggingFaceDirectory, count: int):
        self._source, self.path = source, source.path
        layers = source.config.layers[:count]
        self.config = dataclasses.replace(source.config, layers=layers, final_norm=False)

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        stored = self._source.specs()
        return {path: stored[path] for path in leaf_specs(self.config)}

    def read(self, path: str) -> np.ndarray:
        return self._source.read(path)


def hidden_states(source: HuggingFaceDirectory, tokens: np.ndarray) -> list[np.ndarray]:
    """Our activations after every layer, as Transformers gives them: the last ones after the final norm."""
    tokens = jnp.asarray(tokens, jnp.int32)
    found = []
    for count in range(1, source.config.num_layers + 1):
        last = count == source.config.num_layers
        model = load_model(source if last else FirstLayers(source, count))
        found.append(np.asarray(model.stack(model.embed(tokens)).x))
    return found


def first_difference(source: HuggingFaceDirectory, theirs: list[np.ndarray], tokens: np.ndarray) -> str:
    """Where our activations leave those of Transformers, for people.

    Args:
      source: the model.
      theirs: its `hidden_states` in Transformers, the first one after the embedding.
      tokens: [B, T].
    """
    model = load_model(source)
    ours = [np.asarray(model.embed(jnp.asarray(tokens, jnp.int32))), *hidden_states(source, tokens)]
    errors = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, theirs, strict=True)]
    places = ["embedding", *(f"layer {i}" for i in range(len(errors) - 1))]
    return "relative errors after " + ", ".join(f"{place}: {e:.1e}" for place, e in zip(places, errors, strict=True))
