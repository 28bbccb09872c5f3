"""Methods that leave full experts with fewer neurons: `sp` and `mlp-fusion` (methods.md 5)."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import scipy.sparse
from jaxtyping import Bool, Float, Int
from scipy.cluster.vq import vq

from moe_jax.compression.coding.pruning import largest_mask
from moe_jax.compression.coding.storage import NARROWED, AnyLayout, full_experts
from moe_jax.compression.methods.interface import Analysis, Base, Method, Tick
from moe_jax.compression.options.of_whole_experts import MLPFusionOptions, StructuredPruningOptions
from moe_jax.compression.report import NO_BASE, LayerFigures, Measure
from moe_jax.compression.source_layer import SourceLayer, Write, design_matrices, neuron_rows
from moe_jax.core.errors import InputError
from moe_jax.experts.forms.sparse import kept_entries
from moe_jax.experts.shapes import FFNConfig
from moe_jax.models import MoEConfig


def check_full(layers: Iterable[SourceLayer]) -> None:
    """Raises `InputError` if the user wants the universal FFN to become one of the experts."""
    for layer in layers:
        if layer.num_experts > layer.moe.bank_experts:
            raise InputError("--extended does not go with this method: it makes full experts, which share nothing")


def full_target(layer: SourceLayer, **changes: Any) -> MoEConfig:
    """The layer with full experts and other changes; a universal FFN stands beside them, as wide as it is."""
    return full_experts(layer.moe, **changes)


def routed_kernels(layer: SourceLayer, name: str) -> Iterator[np.ndarray]:
    """One matrix of all experts that the router chooses from, float32[in, out]."""
    for expert, kernel in enumerate(layer.kernels(name)):
        if expert == layer.moe.routed_experts:
            return  # the universal FFN
        yield kernel.astype(np.float32, copy=False)


def routed_biases(layer: SourceLayer, name: str) -> np.ndarray | None:
    """Biases of these experts, [E, out]; None where the FFN has none."""
    biases = layer.biases(name)
    return None if biases is None else biases[: layer.moe.routed_experts]


def write_universal(layer: SourceLayer, write: Write) -> None:
    """Writes the universal FFN on its own, if it is the last expert of the bank."""
    if not layer.moe.extended:
        return
    for name in layer.shapes:
        *_, last = layer.kernels(name)
        write(f"universal/{name}/kernel", layer.stored(name, last))
        biases = layer.biases(name)
        if biases is not None:
            write(f"universal/{name}/bias", biases[-1])


def neurons_of(name: str, kernel: np.ndarray, neurons: Sequence[int] | np.ndarray) -> np.ndarray:
    """Some neurons of a kernel [in, out], in the order given."""
    return kernel[neurons] if name == "down" else kernel[:, neurons]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredPruning(StructuredPruningOptions, Method):
    """The method with the options `StructuredPruningOptions`."""

    origin: ClassVar[str | None] = NO_BASE
    layouts: ClassVar[tuple[AnyLayout, ...]] = (NARROWED,)

    def check(self, layers: Sequence[SourceLayer]) -> None:
        check_full(layers)

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        """`kept`: bool[E, m, f], which neurons each matrix keeps."""
        norms = np.empty((layer.moe.routed_experts, len(layer.shapes), layer.moe.expert.dim))
        for index, name in enumerate(layer.shapes):
            biases = routed_biases(layer, name) if name != "down" else None
            for expert, kernel in enumerate(routed_kernels(layer, name)):
                norms[expert, index] = np.abs(neuron_rows(name, kernel)).sum(axis=1, dtype=np.float64)
                if biases is not None:
                    norms[expert, index] += np.abs(biases[expert].astype(np.float64))
        if self.design == "concat":
            norms = np.broadcast_to(norms.sum(axis=1, keepdims=True), norms.shape)
        count = kept_entries(norms.shape[2], self.keep)
        return {"kept": np.stack([[largest_mask(row, count) for row in expert] for expert in norms])}

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        """Experts are as wide as the widest in layers of one shape; the others get neurons of zeros."""
        widths: dict[FFNConfig, int] = {}
        for layer in layers:
            widest = int(_kept_by_all(analyses[layer.index]).sum(axis=1).max())
            widths[layer.moe.expert] = max(1, widest, widths.get(layer.moe.expert, 0))
        return {
            layer.index: full_target(layer, expert=dataclasses.replace(layer.moe.expert, dim=widths[layer.moe.expert]))
            for layer in layers
        }

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        measure = Measure(layer.moe.routed_experts, layer.moe.expert.dim)
        write_universal(layer, write)
        neurons, width = [np.flatnonzero(expert) for expert in _kept_by_all(analysis)], target.expert.dim
        shapes = target.expert.shapes(layer.shapes["up"][0])
        for index, name in enumerate(layer.shapes):
            kernels = np.zeros((len(neurons), *shapes[name]), layer.dtype(name))
            for expert, kernel in enumerate(routed_kernels(layer, name)):
                count, kept = len(neurons[expert]), analysis["kept"][expert, index]
                places = slice(count) if name == "down" else (slice(None), slice(count))
                rounded = layer.stored(name, kernel)
                kernels[expert][places] = neurons_of(name, rounded, neurons[expert])
                pruned = rounded.astype(np.float32) * (kept[:, None] if name == "down" else kept)
                measure.add(expert, kernel, None, pruned)
            write(f"experts/{name}/kernel", kernels)
            biases = routed_biases(layer, name)
            if biases is not None and name != "down":
                whole, biases = biases, np.zeros((len(neurons), width), biases.dtype)
                for expert, places in enumerate(neurons):
                    biases[expert, : len(places)] = whole[expert, places]
            if biases is not None:
                write(f"experts/{name}/bias", biases)
        return measure.figures(choice=f"{width} neurons")


def _kept_by_all(analysis: Analysis) -> Bool[np.ndarray, "E f"]:
    """Neurons that all matrices keep."""
    return np.all(analysis["kept"], axis=1)


MOST_ITERATIONS = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPFusion(MLPFusionOptions, Method):
    """The method with the options `MLPFusionOptions`."""

    origin: ClassVar[str | None] = NO_BASE
    layouts: ClassVar[tuple[AnyLayout, ...]] = (NARROWED,)

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
        write_universal(layer, write)
        count, experts = target.expert.dim, layer.moe.routed_experts
        stored = {
            name: np.zeros((experts, *shape), layer.dtype(name))
            for name, shape in target.expert.shapes(layer.shapes["up"][0]).items()
        }
        biases = {name: own for name in layer.shapes if (own := routed_biases(layer, name)) is not None}
        biases = {
            name: own if name == "down" else np.zeros((experts, count), own.dtype) for name, own in biases.items()
        }
        measure = Measure(experts, layer.moe.expert.dim)
        designs = design_matrices(layer)[:experts]
        layer.forget()
        for expert in range(experts):
            design = designs[expert].astype(np.float32, copy=False)
            designs[expert] = np.empty((0, 0))
            labels = cluster(design, count, seed=self.seed)
            sums, sizes = _sums(design, labels, count)
            start = 0
            for name, kernels in stored.items():
                rows = slice(start, start + layer.shapes["up"][0])
                centroids = sums[:, rows] / np.maximum(sizes, 1)[:, None]
                made = sums[:, rows] if name == "down" else centroids
                kernels[expert] = layer.stored(name, neuron_rows(name, made))
                means = np.ascontiguousarray(neuron_rows(name, centroids[labels]))
                measure.add(expert, np.ascontiguousarray(neuron_rows(name, design[:, rows])), None, means)
                start = rows.stop
                if name in biases and name != "down":
                    biases[name][expert] = sums[:, start] / np.maximum(sizes, 1)
                    start += 1
        for name, kernels in stored.items():
            write(f"experts/{name}/kernel", kernels)
        for name, values in biases.items():
            write(f"experts/{name}/bias", values)
        return measure.figures(choice=f"{count} neurons")


def cluster(points: Float[np.ndarray, "n D"], count: int, *, seed: int) -> Int[np.ndarray, " n"]:
    """Cluster of every point, by Lloyd's algorithm; every point its own where there are as many clusters.

    OTT's k-means traces its loop anew for every call, which takes seconds each. The first centroids are points drawn
    with the seed; clusters may stay empty where points coincide.
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
