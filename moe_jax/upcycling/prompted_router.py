"""Routers made from texts: an expert begins with the tokens that look like those of its text (methods.md 2.6)."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.checks.streamed_layers import StreamedModel
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import show_bytes
from moe_jax.core.memory import available_memory
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.model_io.model_source import ModelSource

MOST_TOKENS = 512
"""Number of tokens of a text that are read at most: all texts go through the model at once."""


class Prompt(NamedTuple):
    """A text for an expert.

    Attributes:
      ids: ids of its tokens.
      first: index of the first token that is counted; BOS may be before it.
    """

    ids: Int[np.ndarray, " n"]
    first: int = 0

    def fingerprint(self) -> str:
        """Returns a text that is the same for the same tokens only."""
        return hashlib.sha256(np.asarray([self.first, *self.ids], np.int64).tobytes()).hexdigest()


def router_kernels(
    source: ModelSource, prompts: Sequence[Prompt], layers: Sequence[int], progress: Progress = no_progress
) -> dict[int, Float[np.ndarray, "d C"]]:
    """Returns routers for a dense model's layers, made from the hidden states of texts.

    The column of a text is the mean, over its tokens, of the inputs of the layer's FFN (after the norm before it,
    where there is one), divided by its Euclidean norm. So the logit of a token is the length of its own hidden state
    times the cosine between it and the text's mean. This is our definition of what mergekit calls gate mode "hidden";
    there, as far as we know, states are those between layers, and negative prompts can be subtracted.

    The model runs once for all texts, in float32, with one layer in memory at a time.

    Args:
      source: the dense model.
      prompts: one text for each copy of the FFN.
      layers: indices of the layers that become MoEs.
      progress: called after every layer.

    Raises:
      InputError: if the model sees tokens after the present one, a text has no tokens or equals another one, the mean
        of its hidden states is zero or not finite, or a layer does not fit into memory.
    """
    config = source.config
    if config.has_encoder or any(layer.attention.mask != "causal" for layer in config.layers):
        raise InputError("routers are made from texts by models that read from left to right, and this one does not")
    most = min(MOST_TOKENS, config.max_positions)
    rows = [prompt.ids[:most] for prompt in prompts]
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True), start=1):
        if len(row) <= prompt.first:
            raise InputError(f"text {number} for the router has no tokens")
        for other in range(number - 1):
            if np.array_equal(rows[other], row):
                raise InputError(
                    f"texts {other + 1} and {number} for the router are equal in their first {most} tokens, so that it "
                    "could not tell their experts apart"
                )
    # The tokens of a text do not see the padding after it.
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    model = StreamedModel(config, source.specs(), tokens, with_logits=False)
    available = available_memory()
    if available is not None and model.memory > available:
        raise InputError(
            f"the texts for the router need {show_bytes(model.memory)} in the largest layer, {show_bytes(available)} "
            "are free; give shorter texts, or use a larger machine"
        )
    kernels: dict[int, np.ndarray] = {}
    last = max(layers)

    def see(layer: int, states: Float[Array, "C T d"]) -> None:
        if layer in layers:
            wide = np.asarray(states, np.float64)
            means = [
                row[prompt.first : len(ids)].mean(axis=0) for row, prompt, ids in zip(wide, prompts, rows, strict=True)
            ]
            kernels[layer] = _normalised(np.stack(means, axis=1), layer)
        progress("reading texts for the router", layer + 1, last + 1)

    model.mlp_inputs(source.read, see, stop=last + 1)
    return kernels


def _normalised(columns: Float[np.ndarray, "d C"], layer: int) -> Float[np.ndarray, "d C"]:
    norms = np.linalg.norm(columns, axis=0)
    if not (np.isfinite(norms).all() and norms.all()):
        raise InputError(f"layer {layer}: the hidden states of a text have no direction: they are zero or not finite")
    return (columns / norms).astype(np.float32)
