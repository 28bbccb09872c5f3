"""Methods that store every expert on its own, in a form in which ResMoE stores residuals."""

import abc
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from moe_jax.compress.base import NO_BASE, Base
from moe_jax.compress.deltas import Write
from moe_jax.compress.design import aligned_experts
from moe_jax.compress.figures import LayerFigures
from moe_jax.compress.method import Analysis, Method, Tick
from moe_jax.compress.residual_forms import Form, describe
from moe_jax.compress.residual_trials import mean_shares
from moe_jax.compress.source_layer import SourceLayer
from moe_jax.compress.write_experts import write_experts
from moe_jax.experts.config import BankConfig, FFNConfig
from moe_jax.models import MoEConfig


class WithoutCentre(Method):
    """What `Form` says of residuals is said of the experts themselves; their neurons stay in order."""

    origin: ClassVar[str | None] = NO_BASE

    @abc.abstractmethod
    def form(self) -> Form:
        """How every expert is stored.

        Raises:
          InputError: if an option is out of range.
        """

    def bank(self, layer: SourceLayer, shares: Sequence[float] | None) -> BankConfig:
        """The bank of a layer; `shares` of the matrices in what stays, where the form needs them."""
        return self.form().bank(layer.moe.expert, layer.shapes["up"][0], base="none", shares=shares)

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        """See `Method`."""
        form = self.form()
        if not form.needs_shares:
            return {}
        assert form.keep is not None
        nothing = dict.fromkeys(layer.shapes, np.zeros((1, 1), np.float32))
        return {"shares": mean_shares(aligned_experts(layer, unaligned(layer)), nothing, form.keep)}

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        """See `Method`. Layers of equal shape stay equal."""
        shares: dict[FFNConfig, list[np.ndarray]] = {}
        for layer in layers:
            if "shares" in analyses[layer.index]:
                shares.setdefault(layer.moe.expert, []).append(analyses[layer.index]["shares"])
        means = {expert: np.mean(found, axis=0) for expert, found in shares.items()}
        return {layer.index: layer.target(self.bank(layer, means.get(layer.moe.expert))) for layer in layers}

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        """See `Method`."""
        began = time.monotonic()
        measure = write_experts(layer, target.bank, unaligned(layer), write, refit=False)
        return measure.figures(seconds=time.monotonic() - began, choice=describe(target.bank))


def unaligned(layer: SourceLayer) -> Int[np.ndarray, "E f"]:
    """The orders of neurons that leave them as they are."""
    return np.tile(np.arange(layer.moe.expert.dim, dtype=np.int32), (layer.num_experts, 1))
