"""`resmoe`: a barycenter expert and one residual per expert (METHODS 5; ResMoE, arXiv 2503.06881).

A layer is analysed first: its experts are aligned, which is what takes long, and under a budget every form of residual
is tried on it. What is kept of that are the orders of the neurons and a few figures.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Float

from moe_jax.compress.alignment.barycenter import SOLVERS, free_support_barycenter
from moe_jax.compress.alignment.design_matrix import (
    aligned_experts,
    aligned_kernels,
    design_matrices,
    mean_kernel,
    unaligned,
)
from moe_jax.compress.allocation.knapsack import Candidate, allocate
from moe_jax.compress.allocation.trials import forms, mean_shares, trials
from moe_jax.compress.coding.pruning import squared
from moe_jax.compress.coding.schemes import DESIGNS, RESIDUALS, Form, describe_bank
from moe_jax.compress.coding.storage import LOW_RANK, QUANTIZED, SPARSE, disk_bytes
from moe_jax.compress.coding.write_experts import write_experts
from moe_jax.compress.figures import LayerFigures
from moe_jax.compress.methods.delta_base import BARYCENTER, Base
from moe_jax.compress.methods.method import Analysis, Method, Tick
from moe_jax.compress.source_layer import SourceLayer, Write
from moe_jax.errors import InputError, check_member
from moe_jax.models import MoEConfig

# A solver that leaves the neurons in the order in which they are: the centre is the average expert.
IDENTITY = "identity"
DEFAULT_BITS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResMoE(Method):
    """Residuals around a barycenter of the experts.

    How much is kept is said by `keep`, by the bits of a quantized residual, or by a budget, under which form, share and
    bits are chosen for every layer so that the relative squared errors of all layers add up to the least.

    Attributes:
      keep: share of the entries of the residuals that stay, in (0, 1]; of low-rank ones the numbers that are stored.
      residual: `up`: the largest entries; `svd`: low-rank; `quantized` or `quantized:BITS`: all in a few bits. By
        default `up`, and under a budget all of them.
      bits: of a quantized residual, by default 4, or of the values of a pruned one, by default floats.
      design: `concat`: one threshold, or factorisation, for the whole design matrix of an expert; `separate`: one for
        each matrix of it. The threshold of `concat` divides what is kept among the matrices, on average over experts
        and layers of one shape: so no storage is left empty, and equal layers stay equal.
      refit: the centre of pruned residuals is refitted to what was pruned.
      solver: of the alignment, see `barycenter`; `identity` takes the neurons as they are.
      target_bytes: a budget for the experts of all compressed layers, everything included.
      budget_bits: the same as average bits per weight of these experts.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.05, 0.1, 0.15, 0.25, 0.35, 0.5))
    origin: ClassVar[str | None] = BARYCENTER
    forms: ClassVar[tuple[str, ...]] = (*SPARSE, *LOW_RANK, *QUANTIZED)

    keep: float | None = None
    residual: str | None = dataclasses.field(default=None, metadata={"metavar": "up|svd|quantized[:BITS]"})
    bits: int | None = None
    design: Literal["concat", "separate"] = "concat"
    refit: bool = True
    solver: Literal["auto", "alternation", "assignment", "sinkhorn", "identity"] = "auto"
    target_bytes: int | None = None
    budget_bits: float | None = None

    def __post_init__(self) -> None:
        check_member("solver", self.solver, (*SOLVERS, IDENTITY))
        check_member("design", self.design, DESIGNS)
        kind, _, bits = (self.residual or "").partition(":")
        if bits:
            if kind != "quantized" or self.bits is not None or not bits.isdigit():
                raise InputError(f"residual {self.residual!r}: expected up, svd, quantized or quantized:BITS")
            # The one option with two ways to be said; from here on there is one.
            object.__setattr__(self, "residual", kind)
            object.__setattr__(self, "bits", int(bits))
        if self.residual is not None:
            check_member("residual", self.residual, RESIDUALS)
        self._check_amount()

    def _check_amount(self) -> None:
        """There is exactly one way in which it is said how much is kept."""
        budgets = {"target_bytes": self.target_bytes, "budget_bits": self.budget_bits}
        given = [name for name, value in budgets.items() if value is not None]
        for name in given:
            if budgets[name] <= 0:
                raise InputError(f"{name}={budgets[name]:g} must be above 0")
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} say the same in two ways; give one of them")
        if given and (self.keep is not None or self.bits is not None):
            raise InputError(f"{given[0]} chooses keep and bits itself; leave them out")
        if not given:
            self._form()  # checks keep and bits

    @property
    def _has_budget(self) -> bool:
        return self.target_bytes is not None or self.budget_bits is not None

    def _form(self) -> Form:
        residual = self.residual or "up"
        bits = DEFAULT_BITS if residual == "quantized" and self.bits is None else self.bits
        if self.keep is None and residual != "quantized":
            raise InputError("resmoe needs --keep, --target-bytes or --budget-bits, or --residual quantized:BITS")
        return Form(residual=residual, keep=self.keep, bits=bits, design=self.design, refit=self.refit)

    def check(self, layers: Sequence[SourceLayer]) -> None:
        """Raises `InputError` if the budget is below what the centres alone take."""
        if not self._has_budget:
            return
        centres = sum(
            math.prod(shape) * layer.dtype(name).itemsize for layer in layers for name, shape in layer.shapes.items()
        )
        budget = self._budget(layers)
        if budget < centres:
            raise InputError(
                f"a budget of {budget:,} bytes is below the {centres:,} bytes of the centres of {len(layers)} layers "
                f"alone, {8 * centres / _weights(layers):.2f} bits per expert weight; raise it or compress fewer layers"
            )

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        """See `Method`. Aligns the experts; under a budget, tries all forms."""
        began = time.monotonic()
        found = _identity(layer) if self.solver == IDENTITY else _aligned(layer, self.solver, tick)
        permutations = found["permutations"]
        if self._has_budget:
            tried = trials(layer, permutations, forms(self.residual, self.design, self.refit))
            found["errors"] = np.array([trial.error for trial in tried])
            found["shares"] = np.stack([trial.shares for trial in tried])
        elif self._form().needs_shares:
            centres = {name: mean_kernel(aligned_kernels(layer, name, permutations)) for name in layer.shapes}
            found["shares"] = mean_shares(aligned_experts(layer, permutations), centres, self.keep)
        found["seconds"] = np.float64(time.monotonic() - began)
        return found

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        """See `Method`."""
        if self._has_budget:
            chosen = self._choose(layers, analyses)
            return {layer.index: _target(layer, *chosen[layer.index]) for layer in layers}
        form, shares = self._form(), {}
        if form.needs_shares:
            for layer in layers:
                shares.setdefault(layer.moe.expert, []).append(analyses[layer.index]["shares"])
        return {
            layer.index: _target(layer, form, np.mean(shares[layer.moe.expert], axis=0) if shares else None)
            for layer in layers
        }

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        """See `Method`."""
        began = time.monotonic()
        permutations, objective = analysis["permutations"], float(analysis["objective"])
        measure = write_experts(layer, target.bank, permutations, write, refit=self.refit)
        return measure.figures(
            objective=objective,
            rounds=int(analysis["rounds"]),
            converged=bool(analysis["converged"]),
            seconds=float(analysis["seconds"]) + time.monotonic() - began,
            choice=describe_bank(target.bank),
        )

    def _choose(
        self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]
    ) -> dict[int, tuple[Form, Float[np.ndarray, " m"]]]:
        """Form and shares of every layer under the budget."""
        tried = forms(self.residual, self.design, self.refit)
        candidates = {}
        for layer in layers:
            errors, shares = analyses[layer.index]["errors"], analyses[layer.index]["shares"]
            d_model, dtype = layer.shapes["up"][0], layer.dtype("up")
            candidates[layer.index] = []
            for form, error, of_form in zip(tried, errors, shares, strict=True):
                nbytes = disk_bytes(_target(layer, form, of_form), d_model, dtype)
                candidates[layer.index].append(Candidate(nbytes, float(error), (form, of_form)))
        return {index: chosen.choice for index, chosen in allocate(candidates, self._budget(layers)).items()}

    def _budget(self, layers: Sequence[SourceLayer]) -> int:
        if self.target_bytes is not None:
            return self.target_bytes
        assert self.budget_bits is not None
        return int(self.budget_bits * _weights(layers) / 8)


def _aligned(layer: SourceLayer, solver: str, tick: Tick) -> dict[str, np.ndarray]:
    """Orders of the neurons around the barycenter, and how they were found."""
    designs = design_matrices(layer)
    layer.forget()

    def progress(round_: int, done: int, objective: float) -> None:
        # How many rounds there will be is not known: each takes half of what is left of the bar.
        tick(1 - 0.5 ** (round_ - 1 + done / len(designs)))

    found = free_support_barycenter(designs, solver=solver, progress=progress)
    return {
        "permutations": found.permutations,
        "objective": np.float64(found.objective[-1]),
        "rounds": np.int64(found.rounds),
        "converged": np.bool_(found.converged),
    }


def _identity(layer: SourceLayer) -> dict[str, np.ndarray]:
    """Neurons as they are, and what the objective then is."""
    orders = unaligned(layer)
    objective = 0.0
    for name in layer.shapes:
        centre = mean_kernel(aligned_kernels(layer, name, orders))
        objective += sum(squared(kernel - centre) for kernel in aligned_kernels(layer, name, orders))
    return {
        "permutations": orders,
        "objective": np.float64(objective / layer.num_experts),
        "rounds": np.int64(0),
        "converged": np.bool_(True),
    }


def _target(layer: SourceLayer, form: Form, shares: Sequence[float] | None) -> MoEConfig:
    expert, d_model = layer.moe.expert, layer.shapes["up"][0]
    return layer.target(form.bank(expert, d_model, base="shared", shares=shares))


def _weights(layers: Sequence[SourceLayer]) -> int:
    """Weights of the experts of all layers."""
    return sum(layer.num_experts * math.prod(shape) for layer in layers for shape in layer.shapes.values())
