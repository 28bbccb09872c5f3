"""`sp`: structured pruning, whole neurons at a time (methods.md 5)."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Int

from moe_jax.compression.alignment.design_matrix import neuron_rows
from moe_jax.compression.coding.pruning import largest_mask
from moe_jax.compression.coding.storage import NARROWED, AnyLayout
from moe_jax.compression.layer_figures import LayerFigures, Measure
from moe_jax.compression.methods.delta_base import NO_BASE, Base
from moe_jax.compression.methods.interface import Analysis, Method, Tick
from moe_jax.compression.methods.merging.full_experts import (
    check_full,
    full_target,
    neurons_of,
    routed_biases,
    routed_kernels,
    write_universal,
)
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.errors import check_member
from moe_jax.experts.forms.coding import DESIGNS, check_keep
from moe_jax.experts.forms.sparse import kept_entries
from moe_jax.experts.shapes import FFNConfig
from moe_jax.models import MoEConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredPruning(Method):
    """The neurons whose rows of the design matrix have the largest L1 norms; the experts become narrower.

    Pruned for each matrix, a neuron that one of them has dropped contributes nothing, for act(0) = 0: only neurons that
    all matrices keep are stored. An input bias is part of its matrix's row and goes with it; the output bias stays.
    Errors are those of what the method stands for, the matrices pruned each on its own.

    Attributes:
      keep: share of the neurons that stays, in (0, 1].
      design: `concat`: a neuron stays or goes as a whole; `separate`: every matrix drops its own.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.05, 0.1, 0.15, 0.25, 0.35, 0.5))
    origin: ClassVar[str | None] = NO_BASE
    layouts: ClassVar[tuple[AnyLayout, ...]] = (NARROWED,)

    keep: float
    design: Literal["concat", "separate"] = "concat"

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_member("design", self.design, DESIGNS)

    def check(self, layers: Sequence[SourceLayer]) -> None:
        check_full(layers)

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        """`kept`: bool[E, m, f], which neurons each matrix keeps."""
        norms = np.stack([_row_norms(layer, name) for name in layer.shapes], axis=1)
        if self.design == "concat":
            norms = np.broadcast_to(norms.sum(axis=1, keepdims=True), norms.shape)
        count = kept_entries(norms.shape[2], self.keep)
        return {"kept": np.stack([[largest_mask(row, count) for row in expert] for expert in norms])}

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        """Experts are as wide as the widest in layers of one shape; the others get neurons of zeros."""
        widths: dict[FFNConfig, int] = {}
        for layer in layers:
            widest = int(_stored(analyses[layer.index]).sum(axis=1).max())
            widths[layer.moe.expert] = max(1, widest, widths.get(layer.moe.expert, 0))
        return {
            layer.index: full_target(layer, expert=dataclasses.replace(layer.moe.expert, dim=widths[layer.moe.expert]))
            for layer in layers
        }

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        began = time.monotonic()
        measure = Measure(layer.moe.routed_experts, layer.moe.expert.dim)
        write_universal(layer, write)
        neurons = [np.flatnonzero(expert) for expert in _stored(analysis)]
        for index, name in enumerate(layer.shapes):
            _write_matrix(layer, name, neurons, analysis["kept"][:, index], target.expert.dim, write, measure)
        return measure.figures(seconds=time.monotonic() - began, choice=f"{target.expert.dim} neurons")


def _stored(analysis: Analysis) -> Bool[np.ndarray, "E f"]:
    """Neurons that all matrices keep."""
    return np.all(analysis["kept"], axis=1)


def _row_norms(layer: SourceLayer, name: str) -> np.ndarray:
    """L1 norms of a matrix's rows of the design matrix, float64[E, f]."""
    biases = routed_biases(layer, name) if name != "down" else None
    norms = []
    for expert, kernel in enumerate(routed_kernels(layer, name)):
        norm = np.abs(neuron_rows(name, kernel)).sum(axis=1, dtype=np.float64)
        norms.append(norm if biases is None else norm + np.abs(biases[expert].astype(np.float64)))
    return np.stack(norms)


def _write_matrix(
    layer: SourceLayer,
    name: str,
    neurons: Sequence[Int[np.ndarray, " n"]],
    kept: Bool[np.ndarray, "E f"],
    width: int,
    write: Write,
    measure: Measure,
) -> None:
    dtype, narrow = layer.dtype(name), dataclasses.replace(layer.moe.expert, dim=width)
    shape = narrow.shapes(layer.shapes["up"][0])[name]
    kernels = np.zeros((len(neurons), *shape), dtype)
    for expert, kernel in enumerate(routed_kernels(layer, name)):
        count = len(neurons[expert])
        places = slice(count) if name == "down" else (slice(None), slice(count))
        rounded = layer.stored(name, kernel)
        kernels[expert][places] = neurons_of(name, rounded, neurons[expert])
        pruned = rounded.astype(np.float32) * (kept[expert][:, None] if name == "down" else kept[expert])
        measure.add(expert, kernel, None, pruned)
    write(f"experts/{name}/kernel", kernels)
    biases = routed_biases(layer, name)
    if biases is None:
        return
    if name != "down":
        whole, biases = biases, np.zeros((len(neurons), width), biases.dtype)
        for expert, places in enumerate(neurons):
            biases[expert, : len(places)] = whole[expert, places]
    write(f"experts/{name}/bias", biases)
