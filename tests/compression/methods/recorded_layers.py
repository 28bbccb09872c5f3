"""Layers with a recording of what their banks were given, drawn and not computed by a model."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from moe_jax.compression.calibration.recording import Calibration, LayerCalibration, LayerRows
from moe_jax.model_io.model_source import ModelSource
from moe_jax.nn.moe import RouterStatistics

TOKENS = 1100  # more than one part of them is computed at a time


def recorded(source: ModelSource, *, seed: int = 0, tokens: int = TOKENS, unused: int = 0) -> LayerCalibration:
    """Correlated inputs, and a drawn choice of experts for layer 0: some are dropped, the last `unused` not chosen."""
    random, moe, d = np.random.default_rng(seed), source.config.moe(0), source.config.d_model
    experts, k = moe.num_experts, moe.top_k
    inputs = random.standard_normal((tokens, 4)) @ random.standard_normal((4, d))
    inputs += 0.3 * random.standard_normal(inputs.shape) + 0.5 * random.standard_normal(d)
    popular = random.dirichlet(np.ones(experts - unused))
    chosen = [random.choice(experts - unused, k, replace=False, p=popular) for _ in range(tokens)]
    chosen = np.stack(chosen).astype(np.int32)
    chosen[::7, -1] = -1
    weights = random.uniform(0.1, 1, chosen.shape).astype(np.float32)
    weights[chosen < 0] = 0
    usage = np.bincount(chosen[chosen >= 0], minlength=experts) / (chosen >= 0).sum()
    statistics = RouterStatistics(usage, usage, np.eye(experts))
    if moe.merged_experts is not None:  # outputs of the router are chosen, and the bank knows what they stand for
        chosen = np.where(chosen >= 0, np.asarray(source.read("layers/0/mlp/groups"))[chosen], -1)
    return LayerCalibration(statistics, LayerRows(inputs.astype(jnp.bfloat16), chosen, weights))


def calibration_of(layer: LayerCalibration, folder: Path) -> Calibration:
    """As `compress` takes it."""
    text = folder / "text.txt"
    text.write_text("of what the rows are")
    return Calibration((text,), {0: layer})
