"""Sums of the squares of what experts are given on a calibration text, as an imatrix file of llama.cpp has them."""

import numpy as np

from moe_jax.compression.calibration.expert_statistics import squares, tokens_per_expert, total_weights
from moe_jax.compression.calibration.recording import Calibration
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.conversion.gguf.expert_importance import ExpertSums
from moe_jax.model_io.model_source import ModelSource


def summed_squares(source: ModelSource, calibration: Calibration) -> dict[int, ExpertSums]:
    """Returns what the experts of every layer of a recording were given.

    Tokens count by their router weights and those of the whole layer a little, as in `expert_statistics`; the sums are
    scaled to what readers divide them by, the number of tokens that are routed to an expert, or 1.
    """
    found = {}
    for index, recorded in calibration.layers.items():
        layer = SourceLayer(source, index, calibration=recorded)
        counts = np.maximum(tokens_per_expert(layer), 1).astype(np.float32)
        scales = (counts / np.array(list(total_weights(layer))))[:, None]
        inputs, hidden = ((np.stack(list(squares(layer, name))) * scales).astype(np.float32) for name in ("up", "down"))
        found[index] = ExpertSums(inputs, hidden, counts)
    return found
