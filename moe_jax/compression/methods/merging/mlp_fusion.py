"""`mlp-fusion`: neurons clustered by k-means (Ai et al., 2025, arXiv 2307.08941; methods.md 5)."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import scipy.sparse
from jaxtyping import Float, Int
from scipy.cluster.vq import vq

from moe_jax.compression.alignment.design_matrix import design_matrices, neuron_rows
from moe_jax.compression.coding.storage import NARROWED, AnyLayout
from moe_jax.compression.layer_figures import LayerFigures, Measure
from moe_jax.compression.methods.delta_base import NO_BASE, Base
from moe_jax.compression.methods.interface import Analysis, Method
from moe_jax.compression.methods.merging.full_experts import check_full, full_target, routed_biases, write_universal
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.errors import InputError
from moe_jax.experts.forms.coding import check_keep
from moe_jax.experts.forms.sparse import kept_entries
from moe_jax.models import MoEConfig

MOST_ITERATIONS = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPFusion(Method):
    """The rows of the design matrix are clustered; a centroid stands for its cluster, and the experts become narrower.

    A cluster's centroid makes its row of gate and up; its row of down is the centroid's as often as the cluster has
    neurons. Clusters are found by Lloyd's algorithm from neurons drawn at random.

    Attributes:
      keep: number of clusters as a share of the neurons, in (0, 1].
      seed: of the neurons that clusters begin with.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.05, 0.1, 0.15, 0.25, 0.35, 0.5))
    origin: ClassVar[str | None] = NO_BASE
    layouts: ClassVar[tuple[AnyLayout, ...]] = (NARROWED,)

    keep: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_keep(self.keep)
        if self.seed < 0:
            raise InputError(f"seed={self.seed} must not be negative")

    def check(self, layers: Sequence[SourceLayer]) -> None:
        check_full(layers)

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        return {
            layer.index: full_target(
                layer, expert=dataclasses.replace(layer.moe.expert, dim=kept_entries(layer.moe.expert.dim, self.keep))
            )
            for layer in layers
        }

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        began = time.monotonic()
        write_universal(layer, write)
        count, experts = target.expert.dim, layer.moe.routed_experts
        stored = {
            name: np.zeros((experts, *shape), layer.dtype(name))
            for name, shape in target.expert.shapes(layer.shapes["up"][0]).items()
        }
        biases = {name: _room(layer, name, count) for name in layer.shapes if layer.moe.expert.bias}
        measure = Measure(experts, layer.moe.expert.dim)
        designs = design_matrices(layer)[:experts]
        layer.forget()
        for expert in range(experts):
            design = designs[expert].astype(np.float32, copy=False)
            designs[expert] = np.empty((0, 0))
            labels = cluster(design, count, seed=self.seed)
            self._fuse(layer, design, labels, expert, stored, biases, measure)
        for name, kernels in stored.items():
            write(f"experts/{name}/kernel", kernels)
        for name, values in biases.items():
            write(f"experts/{name}/bias", values)
        return measure.figures(seconds=time.monotonic() - began, choice=f"{count} neurons")

    def _fuse(
        self,
        layer: SourceLayer,
        design: Float[np.ndarray, "f D"],
        labels: Int[np.ndarray, " f"],
        expert: int,
        stored: Mapping[str, np.ndarray],
        biases: Mapping[str, np.ndarray],
        measure: Measure,
    ) -> None:
        """Fills in one expert, and measures every neuron against its centroid."""
        count = next(iter(stored.values())).shape[2]
        sums, sizes = _sums(design, labels, count)
        d_model, start = layer.shapes["up"][0], 0
        for name, kernels in stored.items():
            rows = slice(start, start + d_model)
            centroids = sums[:, rows] / np.maximum(sizes, 1)[:, None]
            made = sums[:, rows] if name == "down" else centroids
            kernels[expert] = layer.stored(name, neuron_rows(name, made))
            means = np.ascontiguousarray(neuron_rows(name, centroids[labels]))
            measure.add(expert, np.ascontiguousarray(neuron_rows(name, design[:, rows])), None, means)
            start = rows.stop
            if name in biases and name != "down":
                biases[name][expert] = sums[:, start] / np.maximum(sizes, 1)
                start += 1


def cluster(points: Float[np.ndarray, "n D"], count: int, *, seed: int) -> Int[np.ndarray, " n"]:
    """Cluster of every point, by Lloyd's algorithm; every point its own where there are as many clusters.

    OTT's k-means traces its loop anew for every call, which takes seconds each; SciPy's distances are one matrix
    product as well.

    Args:
      points: float32.
      count: of clusters; some may stay empty where points coincide.
      seed: of the points that are the first centroids.
    """
    if count >= len(points):
        return np.arange(len(points))
    centroids = points[np.random.default_rng(seed).choice(len(points), count, replace=False)]
    labels = np.full(len(points), -1)
    for _ in range(MOST_ITERATIONS):
        before, (labels, _) = labels, vq(points, centroids, check_finite=False)
        if np.array_equal(labels, before):
            break
        sums, sizes = _sums(points, labels, count)
        centroids[sizes > 0] = sums[sizes > 0] / sizes[sizes > 0, None]
    return labels


def _sums(
    design: Float[np.ndarray, "f D"], labels: Int[np.ndarray, " f"], count: int
) -> tuple[Float[np.ndarray, "k D"], Int[np.ndarray, " k"]]:
    """Sum of the points of every cluster, and their number."""
    ones = np.ones(len(labels), np.float32)
    member = scipy.sparse.csr_array((ones, (labels, np.arange(len(labels)))), shape=(count, len(labels)))
    return member @ design, np.bincount(labels, minlength=count)


def _room(layer: SourceLayer, name: str, count: int) -> np.ndarray:
    biases = routed_biases(layer, name)
    assert biases is not None
    return biases if name == "down" else np.zeros((len(biases), count), biases.dtype)
