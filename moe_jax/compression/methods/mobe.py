"""`mobe`: gate and up as products, one factor mixed of shared bases (MoBE, arXiv 2508.05257; methods.md 5)."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from moe_jax.compression.coding.bases import mixed_factors
from moe_jax.compression.coding.storage import disk_bytes
from moe_jax.compression.layer_figures import LayerFigures, Measure
from moe_jax.compression.methods.delta_base import NO_BASE, Base
from moe_jax.compression.methods.interface import Analysis, Method
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.errors import InputError, check_member, check_positive
from moe_jax.experts.forms import MixtureOfBases
from moe_jax.experts.forms.coding import Layout, check_keep
from moe_jax.experts.forms.mixture_of_bases import FUNCTIONS, MIXTURE, BasisActivation, sides
from moe_jax.models import BankConfig, MoEConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoBE(Method):
    """Factors of gate and up, one mixed of bases that all experts of a layer share (MoBE), a baseline.

    Found by Adam (`coding.bases` says what differs from the paper); down stays whole. --calibrate changes nothing. Of
    the paper, the division of experts into groups with bases of their own is left out. Experts wider than the model,
    which it has none of, have their own factor on the side of the model.

    Attributes:
      keep: share of the numbers of gate and up that is stored, in (0, 1]; the rank follows.
      rank: instead of `keep`; by default the shorter side of a kernel, as published.
      bases: that the experts of a layer share; by default a quarter of their number, about as published.
      activation: of the mixed bases.
      steps: of Adam; published are 10000 to 30000.
      rate: of Adam at first, for kernels of standard deviation 1; published 0.07.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.15, 0.25, 0.35, 0.5, 0.65))
    layouts: ClassVar[tuple[Layout, ...]] = MixtureOfBases.layouts()
    origin: ClassVar[str | None] = NO_BASE

    keep: float | None = None
    rank: int | None = None
    bases: int | None = None
    activation: BasisActivation = "silu"
    steps: int = 2000
    rate: float = 0.02

    def __post_init__(self) -> None:
        if self.keep is not None:
            check_keep(self.keep)
            if self.rank is not None:
                raise InputError("keep and rank say the same in two ways; give one of them")
        for name in ("rank", "bases", "steps"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        if not 0 < self.rate < 1:
            raise InputError(f"rate={self.rate:g} must lie in (0, 1)")
        check_member("activation", self.activation, tuple(FUNCTIONS))

    def check(self, layers: Sequence[SourceLayer]) -> None:
        """Nothing is gained where factors and bases take as much as kernels."""
        for layer in layers:
            target, d_model, dtype = self._target(layer), layer.shapes["up"][0], layer.dtype("up")
            form = target.bank.form
            assert isinstance(form, MixtureOfBases)
            if form.bases > layer.num_experts:
                raise InputError(
                    f"bases={form.bases} are more than the {layer.num_experts} experts of layer {layer.index}"
                )
            target.bank.check_fits(layer.moe.expert, d_model)
            whole = disk_bytes(layer.target(BankConfig()), d_model, dtype)
            if (taken := disk_bytes(target, d_model, dtype)) >= whole:
                raise InputError(
                    f"layer {layer.index}: rank {form.rank} and {form.bases} bases take {taken:,} bytes, whole experts "
                    f"{whole:,}: nothing is gained; choose a lower --keep, --rank or --bases"
                )

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        return {layer.index: self._target(layer) for layer in layers}

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        """Memory holds one matrix of all experts."""
        began = time.monotonic()
        form = target.bank.form
        assert isinstance(form, MixtureOfBases)
        measure = Measure(layer.num_experts, layer.moe.expert.dim)
        for name, matrix in layer.matrices.items():
            kernels = list(layer.kernels(name))
            layer.forget()
            if form.of_matrix(matrix) is form:
                leaves, made = self._factored(layer, name, np.stack(kernels).astype(np.float32), form)
            else:
                leaves = {"kernel": np.stack([layer.stored(name, kernel) for kernel in kernels])}
                made = leaves["kernel"]
            for expert, kernel in enumerate(kernels):
                measure.add(expert, kernel, None, np.asarray(made[expert], np.float32))
            for leaf, array in leaves.items():
                write(f"experts/delta/{name}/{leaf}", array)
            del kernels, leaves, made
            biases = layer.biases(name)
            if biases is not None:
                write(f"experts/{name}/bias", biases)
        return measure.figures(seconds=time.monotonic() - began, choice=form.describe())

    def _factored(
        self, layer: SourceLayer, name: str, kernels: np.ndarray, form: MixtureOfBases
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The leaves of gate or up, and the kernels [E, in, out] that they stand for."""
        mixed, own = sides(layer.matrices[name])
        turn = (lambda array: array) if mixed == "a" else (lambda array: np.ascontiguousarray(array.swapaxes(-1, -2)))
        found = mixed_factors(
            turn(kernels),
            form.rank,
            form.bases,
            form.mix,
            steps=self.steps,
            rate=self.rate,
            store=partial(layer.stored, name),
        )
        products = np.asarray(form.mix(found.bases, found.logits), np.float32) @ np.asarray(found.own, np.float32)
        leaves = {f"basis/{mixed}": turn(found.bases), MIXTURE: found.logits, own: turn(found.own)}
        return leaves, turn(products)

    def _target(self, layer: SourceLayer) -> MoEConfig:
        form = MixtureOfBases.of_size(
            layer.moe.expert,
            layer.shapes["up"][0],
            layer.num_experts,
            keep=self.keep,
            rank=self.rank,
            bases=self.bases,
            activation=self.activation,
        )
        return layer.target(BankConfig(form, base="none"))
