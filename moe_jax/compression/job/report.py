"""Reports of compressions: of one model, and of a sweep."""

import dataclasses
from typing import Any

from moe_jax.compression.layer_figures import LayerFigures
from moe_jax.compression.methods.delta_base import DENSE, MEAN, OWN
from moe_jax.model_io.leaves_to_write import zero_experts_line

# Measured on stories260K, upcycled and trained for 300 steps: 0.995 at a learning rate of 1e-3, 0.89 at 6e-3. For
# independent experts it is 1/sqrt(E) to their own mean, at most 0.71, and 0 to a base that is not theirs.
LOW_COSINE = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerReport(LayerFigures):
    """Figures of one layer.

    Attributes:
      layer: its index.
      base: the base that the deltas are relative to.
      bytes_before, bytes_after: of its experts and universal FFN, on the disk if the model is there.
    """

    layer: int
    base: str
    bytes_before: int
    bytes_after: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of a compressed model.

    Attributes:
      layers: the layers that were compressed.
      bytes_before, bytes_after: of all weights, on the disk if the model is there.
    """

    layers: tuple[LayerReport, ...]
    bytes_before: int
    bytes_after: int

    @property
    def expert_bytes_before(self) -> int:
        """Number of bytes of the experts of the compressed layers before compression."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def expert_bytes_after(self) -> int:
        """Number of bytes of the experts of the compressed layers after compression."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings to the user, one line each."""
        found = []
        zero = {layer.layer: layer.zero_experts for layer in self.layers if layer.zero_experts}
        if zero:
            found.append(zero_experts_line(zero))
        cosines = {layer: layer.cosine_mean for layer in self.layers if layer.base in (DENSE, OWN, MEAN)}
        low = {layer: cosine for layer, cosine in cosines.items() if cosine is not None and cosine < LOW_COSINE}
        if low:
            least = min(low.values())
            where = ", ".join(str(layer.layer) for layer in list(low)[:4]) + (", ..." if len(low) > 4 else "")
            found.append(
                f"the experts seem to have no common origin: cosine to the base {least:.2f} in layers {where}, where "
                f"upcycled experts have above {LOW_COSINE}; deltas from one base are the wrong tool for such a model, "
                "the right one is --method resmoe"
            )
        if any(layer.uniform_usage for layer in self.layers):
            found.append(
                "how the experts are used is not known: they were taken to be used alike, and as similar as the "
                "weights of the router say; --calibrate TEXT measures it"
            )
        if self.expert_bytes_after > self.expert_bytes_before:
            found.append(
                f"the experts take {self.expert_bytes_after / self.expert_bytes_before:.0%} of the room they took: "
                "the deltas are not light enough"
            )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Returns the figures for the lineage and for programs."""
        return {
            "expert_bytes_before": self.expert_bytes_before,
            "expert_bytes_after": self.expert_bytes_after,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "warnings": list(self.warnings),
            "layers": [
                {"layer": layer.layer, "base": layer.base, **dataclasses.asdict(layer)} for layer in self.layers
            ],
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One compressed model.

    Attributes:
      method: its name.
      option, value: the option that was varied, such as `drop` and 0.9.
      expert_bytes: of the compressed layers' experts on the disk.
      kept: their share of the bytes before compression.
      relative_error: ||W^ - W|| / ||W||, averaged over layers.
      nll, perplexity: of the text; at most `sweep.WORST_NLL`, which also stands for values that are not finite.
    """

    method: str
    option: str
    value: float
    expert_bytes: int
    kept: float
    relative_error: float
    nll: float
    perplexity: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """All compressed models of a sweep.

    Attributes:
      nll, perplexity: of the text, without compression.
      expert_bytes: of the experts without compression.
      points: one for every method and value.
      warnings: of all of them; see `Report`.
    """

    nll: float
    perplexity: float
    expert_bytes: int
    points: tuple[Point, ...]
    warnings: tuple[str, ...]
