"""A model on a batch, the same in training and evaluation."""

from typing import Any

import jax
from jaxtyping import Array, Int

from moe_jax.nn import Decoder
from moe_jax.nn.decoder import DecoderOutput

Batch = dict[str, Array]
"""tokens, targets, segment_ids, positions Int32[B, T] and weights Float32[B, T]; see `PackedBatches`. For a model with
an encoder also what `PairBatches` adds."""


def run_model(
    model: Decoder, batch: Batch, key: jax.Array | None = None, *, last_only: Int[Array, " B"] | None = None
) -> DecoderOutput:
    """What the model gives for a batch; without `positions`, every row is one document. The rest as in the model."""
    given: dict[str, Any] = {"key": key, "last_only": last_only}
    if "inputs" not in batch:
        return model(batch["tokens"], positions=batch.get("positions"), segment_ids=batch["segment_ids"], **given)
    given |= {"inputs": batch["inputs"], "inputs_valid": batch["inputs_valid"]}
    return model(batch["tokens"], valid=batch["segment_ids"] > 0, **given)
