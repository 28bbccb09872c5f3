"""`hc-smoe`: experts whose outputs on a text are alike, merged (methods.md 5)."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int
from scipy.cluster.hierarchy import cut_tree, linkage

from moe_jax.compression.alignment.design_matrix import unaligned
from moe_jax.compression.calibration.expert_outputs import expert_outputs
from moe_jax.compression.methods.interface import Tick, check_calibrated
from moe_jax.compression.methods.merging.expert_merging import Aligned, Groups, Merging
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.nn.router_stats import RouterStatistics

MOST_TOKENS = 2048
"""Over which outputs are averaged: every expert is applied to all of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HCSMoE(Merging):
    """Experts of similar mean outputs on --calibrate, clustered hierarchically and merged by usage; neurons stay.

    HC-SMoE (Chen et al., 2024, "Retraining-Free Merging of Sparse MoE via Hierarchical Clustering", arXiv 2410.08589):
    Euclidean distances and average linkage.
    """

    needs_calibration: ClassVar[bool] = True

    def check(self, layers: Sequence[SourceLayer]) -> None:
        super().check(layers)
        check_calibrated(layers)

    def group(self, layer: SourceLayer, statistics: RouterStatistics, count: int) -> Groups:
        clusters = cluster_by_distance(mean_outputs(layer), count)
        used = [np.flatnonzero(clusters == cluster) for cluster in range(count)]
        dominant = [members[np.argmax(statistics.usage[members])] for members in used]
        order = np.argsort(dominant)
        return Groups(np.argsort(order)[clusters].astype(np.int32), np.asarray(dominant, np.int32)[order])

    def align(self, layer: SourceLayer, groups: Groups, tick: Tick) -> Aligned:
        return Aligned(unaligned(layer)[: layer.moe.routed_experts])

    def weights(self, statistics: RouterStatistics) -> Float[np.ndarray, " E"]:
        return statistics.usage


def mean_outputs(layer: SourceLayer) -> Float[np.ndarray, "E d"]:
    """Returns every expert's mean output, float64, for `MOST_TOKENS` of the layer's tokens, whoever they are routed to.

    Raises:
      InputError: if a weight is not finite.
    """
    rows = layer.rows
    assert rows is not None
    count = len(rows.inputs)
    tokens = np.linspace(0, count - 1, min(MOST_TOKENS, count)).round().astype(np.int64)
    sums = [
        sum(given.sum(axis=0, dtype=np.float64) for _, given in outputs(tokens)) for outputs in expert_outputs(layer)
    ]
    return np.stack(sums) / len(tokens)


def cluster_by_distance(points: Float[np.ndarray, "n d"], count: int) -> Int[np.ndarray, " n"]:
    """Cluster of every point: the two clusters of least mean distance are united, until `count` are left."""
    if len(points) == count:
        return np.arange(count)
    return cut_tree(linkage(points, method="average", metric="euclidean"), n_clusters=count)[:, 0]
