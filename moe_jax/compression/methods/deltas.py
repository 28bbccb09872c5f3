"""Methods that store a delta per expert: `ders-sparsify`, `ders-quantize` and `d2-moe` (methods.md 4 and 5).

Everything random is drawn with NumPy on the host, from a separate Philox stream for every layer, matrix and expert. So
the result depends neither on the order in which these are processed nor on whether a job was resumed.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float

from moe_jax.compression.calibration.expert_statistics import moments
from moe_jax.compression.coding.coder import ExpertCoder
from moe_jax.compression.coding.pruning import largest_mask
from moe_jax.compression.coding.write_experts import write_experts
from moe_jax.compression.methods.interface import (
    Analysis,
    Base,
    HasCentre,
    Method,
    all_alike,
    check_calibrated,
)
from moe_jax.compression.options.around_centre import D2MoEOptions, QuantizeOptions, SparsifyOptions
from moe_jax.compression.report import LayerFigures, Measure
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.draws import draw_positions
from moe_jax.core.errors import InputError
from moe_jax.experts import BankConfig, FFNConfig
from moe_jax.experts.forms import LowRank, Quantized, Sparse
from moe_jax.experts.forms.coding import Layout, Residual, Wanted
from moe_jax.experts.forms.sparse import encode_positions, smallest_encoding
from moe_jax.models import MoEConfig


def _figures(bank: BankConfig, measure: Measure) -> LayerFigures:
    return measure.figures(analysed=None, choice=None if bank.base_codes is None else bank.describe())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantize(QuantizeOptions, HasCentre, Method):
    """The method with the options `QuantizeOptions`."""

    layouts: ClassVar[tuple[Layout, ...]] = Quantized.layouts()

    def check(self, layers: Sequence[SourceLayer]) -> None:
        if self.learnt_steps is not None:
            check_calibrated(layers)

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        wanted = Wanted(form=Quantized, **self.codes_options)
        return all_alike(layers, wanted, analyses, base="shared", codes=self.codes)

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        fit, even = self.scale == "mse", self.levels == "even"
        options: Any = {"refit": True, "fit": fit, "feedback": self.feedback, "even": even}
        options["learnt_steps"] = self.learnt_steps
        return _figures(target.bank, write_experts(layer, target.bank, write, base=base.kernel, **options))


# What a stream of random numbers is for. Part of its key: changing one changes what a seed gives. Upcycling uses 0-9.
_COUNT, _POSITIONS = 10, 11
_MATRICES = ("gate", "up", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sparsify(SparsifyOptions, HasCentre, Method):
    """The method with the options `SparsifyOptions`."""

    layouts: ClassVar[tuple[Layout, ...]] = Sparse.layouts()

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        """Layers of equal shape have room for the same count, the largest, in the fewest bytes."""
        entries: dict[FFNConfig, int] = {}
        if self.keep == "random":
            for layer in layers:
                counts = [
                    self._count(layer.index, name, expert, math.prod(shape))
                    for name, shape in layer.shapes.items()
                    for expert in range(layer.num_experts)
                ]
                entries[layer.moe.expert] = max(1, entries.get(layer.moe.expert, 0), *counts)
        return {layer.index: layer.target(self._bank(layer, entries.get(layer.moe.expert))) for layer in layers}

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        form = target.bank.form
        assert isinstance(form, Sparse)

        def encode(
            name: str, expert: int, residual: Residual, coder: ExpertCoder
        ) -> tuple[dict[str, np.ndarray], np.ndarray]:
            delta = residual.values
            entries = form.kept_entries(layer.matrices[name])
            chosen = self._choose(layer.index, name, expert, delta, entries, coder.importances)
            with np.errstate(over="ignore"):  # said in our own words below
                values = (delta.reshape(-1)[chosen.positions] * chosen.factors).astype(residual.dtype)
            if not np.isfinite(values).all():
                raise InputError(
                    f"values of the {name} delta of expert {expert} in layer {layer.index} are too large for "
                    f"{values.dtype} when they are divided by the kept share; use --keep magnitude"
                )
            approximation = np.zeros(delta.shape, np.float32)
            approximation.reshape(-1)[chosen.positions] = values.astype(np.float32)
            return {**encode_positions(chosen.positions, delta.shape, form.encoding), "values": values}, approximation

        measure = write_experts(layer, target.bank, write, base=base.kernel, encode=encode)
        return _figures(target.bank, measure)

    def _bank(self, layer: SourceLayer, entries: int | None) -> BankConfig:
        form = Sparse(rate=self.drop, entries=entries)
        counts = [form.kept_entries(matrix) for matrix in layer.matrices.values()]
        encoding = smallest_encoding(layer.shapes.values(), counts)
        return BankConfig(dataclasses.replace(form, encoding=encoding), base_codes=self.codes)

    def _choose(
        self,
        layer: int,
        name: str,
        expert: int,
        delta: np.ndarray,
        entries: int,
        importances: Float[np.ndarray, " i"] | None,
    ) -> "_Chosen":
        if self.keep == "magnitude":
            magnitudes = delta if importances is None else delta * importances[:, None]
            return _Chosen(np.flatnonzero(largest_mask(magnitudes, entries)), np.float32(1))
        random = self._stream(layer, _POSITIONS, name, expert)
        positions = draw_positions(random, delta.size, entries)
        if self.keep == "exact":
            return _Chosen(positions, np.float32(delta.size / entries))
        # A random part of a random set of positions: the rest only fills the storage up.
        filling = entries - self._count(layer, name, expert, delta.size)
        factors = np.full(entries, 1 / (1 - self.drop), np.float32)
        factors[random.choice(entries, filling, replace=False, shuffle=False)] = 0
        return _Chosen(positions, factors)

    def _count(self, layer: int, name: str, expert: int, size: int) -> int:
        """How many entries independent draws keep; known without weights, before anything is written."""
        return int(self._stream(layer, _COUNT, name, expert).binomial(size, 1 - self.drop))

    def _stream(self, layer: int, purpose: int, name: str, expert: int) -> np.random.Generator:
        key = (layer, purpose, _MATRICES.index(name), expert)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=key)))


class _Chosen(NamedTuple):
    """Flat positions, ascending, and what the entries there are multiplied by."""

    positions: np.ndarray
    factors: np.ndarray | np.float32


WEIGHTED_MEAN = "mean of the experts, weighted by their inputs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class D2MoE(D2MoEOptions, Method):
    """The method with the options `D2MoEOptions`."""

    layouts: ClassVar[tuple[Layout, ...]] = LowRank.layouts(design="separate")
    origin: ClassVar[str | None] = WEIGHTED_MEAN

    def check(self, layers: Sequence[SourceLayer]) -> None:
        if any(layer.num_experts > layer.moe.bank_experts for layer in layers):
            raise InputError(
                "--extended does not go with this method: what the universal FFN counts for in a mean is not known"
            )
        check_calibrated(layers)

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        return all_alike(layers, self.wanted, analyses, base="shared")

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        """The coders of a calibrated layer whiten the deltas."""
        measure = write_experts(layer, target.bank, write, base=partial(weighted_mean, layer))
        return measure.figures(choice=target.bank.form.describe())

    @property
    def wanted(self) -> Wanted:
        return Wanted(form=LowRank, keep=self.keep, design="separate")


def weighted_mean(layer: SourceLayer, name: str) -> Float[np.ndarray, "i o"]:
    """The mean of a matrix, float32, each input's row weighted with its second moment in every expert.

    It is the matrix B of least `sum_k tr((W_k - B)^T diag(H_k) (W_k - B))`; where all moments are 0, the plain mean.
    """
    weights = np.stack([np.diagonal(moment).astype(np.float64) for moment in moments(layer, name)])
    totals = weights.sum(axis=0)
    shares = np.divide(weights, totals, out=np.full_like(weights, 1 / len(weights)), where=totals > 0)
    mean = np.zeros(layer.shapes[name], np.float32)
    for share, kernel in zip(shares.astype(np.float32), layer.kernels(name), strict=True):
        mean += share[:, None] * kernel.astype(np.float32, copy=False)
    return mean
