"""`resmoe`: a barycenter expert and one residual per expert (methods.md 5; ResMoE, arXiv 2503.06881).

A layer is analysed first: its experts are aligned, which is what takes long, and under a budget every form of residual
is tried on it. What is kept of that are the orders of the neurons and a few figures.
"""

import dataclasses
import functools
import re
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np

from moe_jax.compression.alignment.barycenter import SOLVERS, free_support_barycenter
from moe_jax.compression.budget import Budget, trials
from moe_jax.compression.coding.coder import LEVELS, Levels, check_levels
from moe_jax.compression.coding.pruning import mean_shares, squared
from moe_jax.compression.coding.write_experts import write_experts
from moe_jax.compression.methods.interface import (
    Analysis,
    AroundCentre,
    Base,
    Method,
    OfCodes,
    Tick,
    alignment_progress,
    all_alike,
)
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
from moe_jax.core.errors import InputError, check_member, shown
from moe_jax.experts.bank_config import Code
from moe_jax.experts.forms import LowRank, Quantized, Sparse
from moe_jax.experts.forms.coding import DESIGNS, Encodable, Layout, Wanted
from moe_jax.experts.forms.protocol import encodable_forms
from moe_jax.experts.forms.quantized import check_scale_bits
from moe_jax.models import MoEConfig

# A solver that leaves the neurons in the order in which they are: the centre is the average expert.
IDENTITY = "identity"
DEFAULT_BITS = 4
# What a budget chooses from, and without one is offered first.
RESIDUALS = (Sparse, LowRank, Quantized)
_OPTION = "|".join(str(form.residual_option) for form in RESIDUALS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResMoE(AroundCentre, OfCodes, Method):
    """Residuals around a barycenter of the experts.

    How much is kept is said by `keep`, by the bits of a quantized residual, or by a budget, under which form, share and
    bits are chosen for every layer so that the relative squared errors of all layers add up to the least.

    Attributes:
      keep: share of the entries of the residuals that stay, in (0, 1]; of low-rank ones the numbers that are stored.
        Required without a budget.
      residual: `up`: the largest entries; `svd`: low-rank; `quantized` or `quantized:BITS`: all in a few bits. By
        default `up`, and under a budget all of them.
      bits: of a quantized residual, by default 4, or of the values of a pruned one, by default floats.
      design: `concat`: one threshold, or factorisation, for the whole design matrix of an expert; `separate`: one for
        each matrix of it. The threshold of `concat` divides what is kept among the matrices, on average over experts
        and layers of one shape: so no storage is left empty, and equal layers stay equal.
      refit: the centre of pruned residuals is refitted to what was pruned, and one in codes to the codes of quantized
        residuals.
      solver: of the alignment, see `barycenter`; `identity` takes the neurons as they are.
      zero_points: groups of a quantized residual have zero points of eight bits: levels need not lie around zero.
      row_scales: every row of a quantized residual has a bfloat16 scale, too: by the sizes of its entries, and with a
        calibration by these or by those of its inputs (AWQ), whichever changes the outputs less.
      target_bytes: instead of `keep`, a budget for the experts of all compressed layers, everything included.
      budget_bits: the same as average bits per weight of these experts; by default no budget.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.05, 0.1, 0.15, 0.25, 0.35, 0.5))
    origin: ClassVar[str | None] = BARYCENTER
    layouts: ClassVar[tuple[Layout, ...]] = tuple(layout for form in RESIDUALS for layout in form.layouts())

    keep: float | None = None
    residual: str | None = dataclasses.field(default=None, metadata={"metavar": _OPTION})
    bits: int | None = None
    design: Literal["concat", "separate"] = "concat"
    refit: bool = True
    solver: Literal["auto", "alternation", "assignment", "sinkhorn", "identity"] = "auto"
    feedback: bool = True
    levels: Levels = "any"
    scale_bits: int = 16
    zero_points: bool = False
    row_scales: bool = False
    target_bytes: int | None = None
    budget_bits: float | None = None
    centre_bits: Code | None = None
    centre_group_size: int | None = None

    def __post_init__(self) -> None:
        check_member("solver", self.solver, (*SOLVERS, IDENTITY))
        check_member("design", self.design, DESIGNS)
        check_member("levels", self.levels, LEVELS)
        self.choice  # noqa: B018  (checks the rest, but for the codes of the centre)
        self.codes  # noqa: B018  (checks these)

    @functools.cached_property
    def choice(self) -> Wanted | Budget:
        """The form and size of the residuals, or the budget by which these are chosen for every layer.

        Raises:
          InputError: unless there is exactly one way in which it is said how much is kept.
        """
        form, bits = self._residual()
        given = [name for name in ("target_bytes", "budget_bits") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} say the same in two ways; give one of them")
        if given and (self.keep is not None or bits is not None):
            raise InputError(f"{given[0]} chooses keep and bits itself; leave them out")
        in_codes = not given and form is not None and "table" in form.asks_for
        if self.levels != "any" and not in_codes:
            raise InputError(f"levels={self.levels} go with --residual quantized, without a budget")
        for name in ("zero_points", "row_scales"):
            if getattr(self, name) and not in_codes:
                raise InputError(f"{name} go with --residual quantized, without a budget")
        check_scale_bits(self.scale_bits)
        if self.scale_bits == 8 and self.centre_bits is None and not in_codes:
            raise InputError("scale_bits=8 goes with --residual quantized, without a budget, or with --centre-bits")
        if given:
            sizes = tuple(
                size for one in (RESIDUALS if form is None else (form,)) for size in one.sizes_to_try(self.design)
            )
            return Budget(target_bytes=self.target_bytes, budget_bits=self.budget_bits, sizes=sizes, codes=self.codes)
        form = form or RESIDUALS[0]
        if self.keep is None and "keep" in form.asks_for:
            raise InputError("resmoe needs --keep, --target-bytes or --budget-bits, or --residual quantized:BITS")
        if not in_codes:
            return Wanted(form=form, keep=self.keep, bits=bits, design=self.design)
        bits = DEFAULT_BITS if bits is None else bits
        check_levels(self.levels, bits, zero_points=self.zero_points)
        return Wanted(
            form=form,
            keep=self.keep,
            bits=bits,
            table=self.levels == "fitted",
            scale_bits=self.scale_bits,
            zero_points=self.zero_points,
            row_scales=self.row_scales,
        )

    def _residual(self) -> tuple[type[Encodable] | None, int | None]:
        """The form of the residuals, if one was given, and bits, which both options can hold."""
        if self.residual is None:
            return None, self.bits
        name, _, bits = self.residual.partition(":")
        forms = residual_forms()
        if not bits:
            check_member("residual", name, tuple(forms))
            return forms[name], self.bits
        if (
            "table" not in forms.get(name, Sparse).asks_for
            or self.bits is not None
            or not re.fullmatch(r"\d{1,3}", bits)
        ):
            raise InputError(f"residual {shown(self.residual)}: expected {', '.join(forms)} or quantized:BITS")
        return forms[name], int(bits)

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
    return {form.option_name(): form for form in (*RESIDUALS, *encodable_forms())}


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
