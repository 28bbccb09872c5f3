"""From what routers report to the auxiliary loss and the load of every layer."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moe_jax.functional.routing import RouterStats
from moe_jax.models.config import ModelConfig, MoEConfig
from moe_jax.models.segments import segments_of

StackedStats = tuple[RouterStats, ...]
"""One entry per MoE position of every segment, in order; its arrays are stacked over the repeats."""


class RouterStatistics(NamedTuple):
    """One router on all tokens of a text.

    Attributes:
      usage: share of the assignments that every expert got; float64, sums to 1.
      score: mean probability of every expert, over all tokens; float64, sums to 1.
      similarity: cosine between the logits of two experts over the tokens; float64.
    """

    usage: Float[np.ndarray, " E"]
    score: Float[np.ndarray, " E"]
    similarity: Float[np.ndarray, "E E"]


def auxiliary_loss(config: ModelConfig, router: StackedStats) -> Float[Array, ""]:
    """Sum over the layers of `balance_coef * balance + z_coef * z + cv_coef * cv` (METHODS 1), float32."""
    total = jnp.zeros((), jnp.float32)
    for (moe, _), stats in zip(_positions(config), router, strict=True):
        losses = moe.balance_coef * stats.balance + moe.z_coef * stats.z + moe.cv_coef * stats.cv
        total = total + jnp.sum(losses)
    return total


def load_per_layer(config: ModelConfig, router: StackedStats) -> dict[int, Float[Array, " E"]]:
    """Share of the assignments per expert, by layer index."""
    return {layer: stats.load for layer, stats in stats_per_layer(config, router).items()}


def stats_per_layer(config: ModelConfig, router: StackedStats) -> dict[int, RouterStats]:
    """What every router did, unstacked, by layer index; arrays may be NumPy's."""
    per_layer = {}
    for (_, layers), stats in zip(_positions(config), router, strict=True):
        for repeat, layer in enumerate(layers):
            per_layer[layer] = RouterStats(*(field[repeat] for field in stats))
    return dict(sorted(per_layer.items()))


def _positions(config: ModelConfig) -> list[tuple[MoEConfig, list[int]]]:
    """Every MoE position of every segment, with the layers it stands for."""
    return [
        (layer.mlp, [segment.layer(repeat, position) for repeat in range(segment.repeats)])
        for segment in segments_of(config.layers)
        for position, layer in enumerate(segment.pattern)
        if isinstance(layer.mlp, MoEConfig)
    ]
