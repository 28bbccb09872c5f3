"""Runs a model on a batch, in the same way in training and evaluation."""

from typing import Any

import jax
from jaxtyping import Array, Int

from moe_jax.nn import Decoder
from moe_jax.nn.decoder import DecoderOutput
from moe_jax.nn.stack import StackOutput

Batch = dict[str, Array]
"""tokens, targets, segment_ids, positions Int32[B, T] and weights Float32[B, T]; see `PackedBatches`. For a model with
an encoder also the arrays that `PairBatches` adds.
"""


def run_model(
    model: Decoder, batch: Batch, key: jax.Array | None = None, *, last_only: Int[Array, " B"] | None = None
) -> DecoderOutput:
    """Returns the model's output for a batch; without `positions`, a row is one document. Arguments as in the model."""
    return model(**_arguments(batch), key=key, last_only=last_only)


def run_to_head(model: Decoder, batch: Batch, key: jax.Array | None = None) -> StackOutput:
    """Returns the activations that the head takes, for a batch.

    `Decoder.token_losses` and `Decoder.weighted_loss` compute losses from them without the logits of all tokens at
    once.
    """
    return model.activations(**_arguments(batch), key=key)


def _arguments(batch: Batch) -> dict[str, Any]:
    given: dict[str, Any] = {"tokens": batch["tokens"]}
    if "inputs" not in batch:
        return given | {"positions": batch.get("positions"), "segment_ids": batch["segment_ids"]}
    given |= {"inputs": batch["inputs"], "inputs_valid": batch["inputs_valid"]}
    return given | {"valid": batch["segment_ids"] > 0}
