"""`resmoe`: a barycenter expert and one residual per expert (methods.md 5; ResMoE, arXiv 2503.06881).

A layer is analysed first: its experts are aligned, which is what takes long, and under a budget every form of residual
is tried on it. What is kept of that are the orders of the neurons and a few figures.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from moe_jax.compression.alignment.barycenter import free_support_barycenter
from moe_jax.compression.budget import Budget, trials
from moe_jax.compression.coding.pruning import mean_shares, squared
from moe_jax.compression.coding.write_experts import write_experts
from moe_jax.compression.methods.interface import (
    Analysis,
    Base,
    HasCentre,
    Method,
    Tick,
    alignment_progress,
    all_alike,
)
from moe_jax.compression.options.around_centre import ResMoEOptions
from moe_jax.compression.options.in_common import IDENTITY
from moe_jax.compression.report import BARYCENTER, LayerFigures
from moe_jax.compression.source_layer import (
    SourceLayer,
    Write,
    aligned_experts,
    aligned_kernels,
    design_matrices,
    mean_kernel,
    unaligned,
)
from moe_jax.core.form_options import residual_options
from moe_jax.experts.forms import LowRank, Quantized, Sparse
from moe_jax.experts.forms.coding import Encodable, Layout, Wanted
from moe_jax.experts.forms.protocol import form_named
from moe_jax.models import MoEConfig

RESIDUALS = (Sparse, LowRank, Quantized)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResMoE(ResMoEOptions, HasCentre, Method):
    """The method with the options `ResMoEOptions`."""

    origin: ClassVar[str | None] = BARYCENTER
    layouts: ClassVar[tuple[Layout, ...]] = tuple(layout for form in RESIDUALS for layout in form.layouts())

    @functools.cached_property
    def choice(self) -> Wanted | Budget:
        """The form and size of the residuals, or the budget by which these are chosen for every layer."""
        asked = self.residual_form[0]
        form = None if asked is None else residual_forms()[asked.option_name()]
        if not self.has_budget:
            return Wanted(form=form or RESIDUALS[0], design=self.design, **self.size)
        forms = RESIDUALS if form is None else (form,)
        sizes = tuple(size for one in forms for size in one.sizes_to_try(self.design))
        return Budget(target_bytes=self.target_bytes, budget_bits=self.budget_bits, sizes=sizes, codes=self.codes)

    def check(self, layers: Sequence[SourceLayer]) -> None:
        if isinstance(self.choice, Budget):
            self.choice.check(layers)

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        """Aligns the experts; under a budget, tries all forms and sizes."""
        began = time.monotonic()
        found = aligned(layer, self.solver, tick)
        permutations = found["permutations"]
        if isinstance(self.choice, Budget):
            tried = trials(layer, permutations, self.choice.sizes, refit=self.refit, codes=self.codes)
            found["errors"] = np.array([trial.error for trial in tried])
            found["shares"] = np.stack([trial.shares for trial in tried])
        elif self.choice.needs_shares:
            centres = {name: mean_kernel(aligned_kernels(layer, name, permutations)) for name in layer.shapes}
            found["shares"] = mean_shares(aligned_experts(layer, permutations), centres, self.choice.keep or 1.0)
        found["seconds"] = np.asarray(time.monotonic() - began)
        return found

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        if isinstance(self.choice, Budget):
            return self.choice.divide(layers, analyses)
        return all_alike(layers, self.choice, analyses, base="shared", codes=self.codes)

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        measure = write_experts(
            layer,
            target.bank,
            write,
            permutations=analysis["permutations"],
            refit=self.refit,
            feedback=self.feedback,
            even=self.levels == "even",
        )
        return measure.figures(
            objective=float(analysis["objective"]),
            rounds=int(analysis["rounds"]),
            converged=bool(analysis["converged"]),
            analysed=analysis["seconds"],
            choice=target.bank.describe(),
        )


def residual_forms() -> dict[str, type[Encodable]]:
    """The forms of residuals by their names as values of `--residual`, those first that a budget chooses from."""
    forms: Any = {name: form_named(options.kind) for name, options in residual_options().items()}
    return forms


def aligned(layer: SourceLayer, solver: str, tick: Tick) -> dict[str, np.ndarray]:
    """Orders of the neurons around the barycenter, or with `IDENTITY` as they are, and how they were found."""
    orders, objective, rounds, converged = unaligned(layer), 0.0, 0, True
    if solver == IDENTITY:
        for name in layer.shapes:
            centre = mean_kernel(aligned_kernels(layer, name, orders))
            objective += sum(squared(kernel - centre) for kernel in aligned_kernels(layer, name, orders))
        objective /= layer.num_experts
    else:
        designs = design_matrices(layer)
        layer.forget()
        found = free_support_barycenter(designs, solver=solver, progress=alignment_progress(tick, len(designs)))
        orders, rounds, converged = found.permutations, found.rounds, found.converged
        objective = found.objective[-1]
    return {
        "permutations": orders,
        "objective": np.asarray(objective),
        "rounds": np.asarray(rounds),
        "converged": np.asarray(converged),
    }
