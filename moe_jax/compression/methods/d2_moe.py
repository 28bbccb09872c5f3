"""`d2-moe`: a base weighted by what the experts are given on a text, and low-rank deltas (methods.md 5)."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from moe_jax.compression.allocation.budget import all_alike
from moe_jax.compression.calibration.moments import moments
from moe_jax.compression.layer_figures import LayerFigures
from moe_jax.compression.methods.delta_base import Base, compress_deltas
from moe_jax.compression.methods.interface import Analysis, Method, check_calibrated
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.errors import InputError
from moe_jax.experts.forms import LowRank
from moe_jax.experts.forms.coding import Layout, Wanted
from moe_jax.models import MoEConfig

WEIGHTED_MEAN = "mean of the experts, weighted by their inputs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class D2MoE(Method):
    """A mean of the experts, weighted by what they are given on --calibrate, and deltas of low rank.

    D2-MoE (Gu et al., 2025, "Delta Decompression for MoE-based LLMs Compression", arXiv 2502.17298), with the second
    moments of inputs in place of Fisher information, which takes gradients, and without the pruning of the base.

    Attributes:
      keep: share of the numbers of an expert that its delta has, in (0, 1]; the ranks follow. The base comes on top.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.05, 0.1, 0.15, 0.25, 0.35, 0.5))
    layouts: ClassVar[tuple[Layout, ...]] = LowRank.layouts(design="separate")
    origin: ClassVar[str | None] = WEIGHTED_MEAN
    needs_calibration: ClassVar[bool] = True

    keep: float

    def __post_init__(self) -> None:
        self._wanted  # noqa: B018  (checks the share)

    def check(self, layers: Sequence[SourceLayer]) -> None:
        if any(layer.num_experts > layer.moe.bank_experts for layer in layers):
            raise InputError(
                "--extended does not go with this method: what the universal FFN counts for in a mean is not known"
            )
        check_calibrated(layers)

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        return all_alike(layers, self._wanted, analyses, base="shared")

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        """The coders of a calibrated layer whiten the deltas."""
        began = time.monotonic()
        figures = compress_deltas(layer, _WeightedMean(layer), target.bank, write)
        return dataclasses.replace(figures, seconds=time.monotonic() - began, choice=target.bank.form.describe())

    @property
    def _wanted(self) -> Wanted:
        return Wanted(form=LowRank, keep=self.keep, design="separate")


class _WeightedMean(Base):
    """`weighted_mean` as the base of a layer."""

    def __init__(self, layer: SourceLayer):
        super().__init__(layer, None)
        self.origin = WEIGHTED_MEAN

    def kernel(self, name: str) -> np.ndarray:
        return weighted_mean(self._layer, name)


def weighted_mean(layer: SourceLayer, name: str) -> Float[np.ndarray, "i o"]:
    """The mean of a matrix, float32, each input's row weighted with its second moment in every expert.

    It is the matrix B of least `sum_k tr((W_k - B)^T diag(H_k) (W_k - B))`; where all moments are 0, the plain mean.

    Raises:
      InputError: if a weight is not finite.
    """
    weights = np.stack([np.diagonal(moment).astype(np.float64) for moment in moments(layer, name)])
    totals = weights.sum(axis=0)
    shares = np.divide(weights, totals, out=np.full_like(weights, 1 / len(weights)), where=totals > 0)
    mean = np.zeros(layer.shapes[name], np.float32)
    for share, kernel in zip(shares.astype(np.float32), layer.kernels(name), strict=True):
        mean += share[:, None] * kernel.astype(np.float32, copy=False)
    return mean
