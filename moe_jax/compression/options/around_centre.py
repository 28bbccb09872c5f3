"""Options of methods that store a base or a centre of the experts, and what each of them differs by."""

import dataclasses
import re
from typing import Any, ClassVar, Literal

from moe_jax.compression.options.in_common import (
    IDENTITY,
    SHARES,
    SOLVERS,
    AroundCentre,
    MethodOptions,
    Of,
    OfCodes,
    OfLinearMaps,
    Rounding,
    check_budget,
)
from moe_jax.core.code_options import (
    BITS,
    DEFAULT_GROUP_SIZE,
    LEVELS,
    TABLE_BITS,
    Code,
    ExpertCodesOptions,
    Levels,
    check_levels,
    check_scale_bits,
)
from moe_jax.core.errors import InputError, check_member, check_positive, shown
from moe_jax.core.form_options import (
    DESIGNS,
    LowRankOptions,
    QuantizedOptions,
    ResidualOptions,
    SparseOptions,
    residual_options,
)

SCALES = ("mse", "absmax")
KEEP = ("random", "exact", "magnitude")
RESIDUALS: tuple[type[ResidualOptions], ...] = (SparseOptions, LowRankOptions, QuantizedOptions)
"""The forms that a budget chooses from; the first is the default without one."""
DEFAULT_BITS = 4
"""Bits of a quantized residual, where none are given."""
_OPTION = "|".join(str(form.residual_option) for form in RESIDUALS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparsifyOptions(AroundCentre, MethodOptions):
    """Sparse deltas over a shared base.

    Attributes:
      drop: share p of the entries that are left out, in [0, 1); required.
      keep: which entries stay. `random`: each with probability 1-p, divided by 1-p (DARE). `exact`: as many in every
        kernel, drawn at random and divided by their share; both are right on average. `magnitude`: the largest ones
        as they are, which is the least error; of a layer that was calibrated, those of the inputs that count most.
      seed: of everything random.
    """

    implementation: ClassVar[str] = "deltas.Sparsify"
    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("drop", (0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99))

    drop: float
    keep: Literal["random", "exact", "magnitude"] = "random"
    seed: int = 0
    centre_bits: Code | None = None
    centre_group_size: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.drop < 1.0:
            raise InputError(f"drop={self.drop:g} must lie in [0, 1): it is the share of entries left out")
        check_member("keep", self.keep, KEEP)
        if self.seed < 0:
            raise InputError(f"seed={self.seed} must not be negative")
        if self.seed and self.keep == "magnitude":
            raise InputError(f"seed={self.seed} goes with keep=random or exact: the largest entries are not drawn")
        self.centre  # noqa: B018  (checks the codes of the centre)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeOptions(AroundCentre, OfCodes, MethodOptions):
    """Quantised deltas over a shared base.

    Attributes:
      scale: `mse`: of every group the grid of levels and the scale that give the least squared error; `absmax`: the
        largest level stands for the largest absolute value of the group. One bit has no choice: its scale, the mean
        absolute value, already has the least error.
    """

    implementation: ClassVar[str] = "deltas.Quantize"
    swept: ClassVar[tuple[str, tuple[int, ...]]] = ("bits", BITS)

    bits: int
    group_size: int = DEFAULT_GROUP_SIZE
    scale: Literal["mse", "absmax"] = "mse"
    feedback: bool = True
    levels: Levels = "any"
    scale_bits: int = 16
    zero_points: bool = False
    row_scales: bool = False
    rounding: Rounding = "nearest"
    rounding_steps: int | None = None
    centre_bits: Code | None = None
    centre_group_size: int | None = None

    def __post_init__(self) -> None:
        check_member("scale", self.scale, SCALES)
        check_levels(self.levels, self.bits, zero_points=self.zero_points)
        if self.scale != "mse" and self.levels != "any":
            raise InputError(f"levels={self.levels} have scales of least squared error: leave scale={self.scale} out")
        self.learnt_steps  # noqa: B018  (checks rounding)
        self.codes_options  # noqa: B018  (checks bits and group size)
        self.centre  # noqa: B018  (checks the codes of the centre)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinaryOptions(AroundCentre, MethodOptions):
    """Deltas of one bit over a mean in codes, both by inputs on --calibrate; scales of groups and of rows, refined.

    Attributes:
      group_size: entries along the input axis that share a scale.
      scale_bits: of a scale of groups: 16, or 8, with a bfloat16 step for each row of groups; those of the mean, too.
      centre_bits: of a code of the mean: 8, 4, 3 or 2, or `nf4`.
      centre_group_size: of the mean's codes: entries along the input axis that share a scale, by default 128.
    """

    implementation: ClassVar[str] = "binary.Binary"
    swept: ClassVar[tuple[str, tuple[int, ...]]] = ("group_size", (128, 64))
    needs_calibration: ClassVar[bool] = True

    group_size: int = DEFAULT_GROUP_SIZE
    scale_bits: int = 16
    centre_bits: Code = "4"
    centre_group_size: int | None = None

    def __post_init__(self) -> None:
        ExpertCodesOptions(bits=1, group_size=self.group_size, scale_bits=self.scale_bits, row_scales=True)
        self.centre  # noqa: B018  (checks the codes of the centre)


@dataclasses.dataclass(frozen=True, kw_only=True)
class D2MoEOptions(MethodOptions):
    """A mean of the experts, weighted by what they are given on --calibrate, and deltas of low rank.

    D2-MoE (Gu et al., 2025, "Delta Decompression for MoE-based LLMs Compression", arXiv 2502.17298), with the second
    moments of inputs in place of Fisher information, which takes gradients, and without the pruning of the base.

    Attributes:
      keep: share of the numbers of an expert that its delta has, in (0, 1]; the ranks follow. The base comes on top.
    """

    implementation: ClassVar[str] = "deltas.D2MoE"
    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", SHARES)
    needs_calibration: ClassVar[bool] = True

    keep: float

    def __post_init__(self) -> None:
        LowRankOptions.check_size(keep=self.keep, bits=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResMoEOptions(AroundCentre, OfCodes, MethodOptions):
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

    implementation: ClassVar[str] = "resmoe.ResMoE"
    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", SHARES)

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
        form = self._check_form()
        if not self.has_budget:
            form.check_size(**self.size)
        self.centre  # noqa: B018  (checks the codes of the centre)

    @property
    def has_budget(self) -> bool:
        """Whether a budget says how much is kept."""
        return self.target_bytes is not None or self.budget_bits is not None

    @property
    def size(self) -> dict[str, Any]:
        """Fields of `Wanted` that say how large residuals are; without a budget."""
        form, bits = self.residual_form
        form = form or RESIDUALS[0]
        if "table" not in form.asks_for:
            return {"keep": self.keep, "bits": bits}
        return {
            "keep": self.keep,
            "bits": DEFAULT_BITS if bits is None else bits,
            "table": self.levels == "fitted",
            "scale_bits": self.scale_bits,
            "zero_points": self.zero_points,
            "row_scales": self.row_scales,
            "group_size": DEFAULT_GROUP_SIZE,
        }

    @property
    def residual_form(self) -> tuple[type[ResidualOptions] | None, int | None]:
        """The form of the residuals, if one was given, and bits, which both options can hold.

        Raises:
          InputError: if `residual` cannot be read.
        """
        if self.residual is None:
            return None, self.bits
        name, _, bits = self.residual.partition(":")
        forms = residual_options()
        if not bits:
            check_member("residual", name, tuple(forms))
            return forms[name], self.bits
        has_bits = name in forms and "table" in forms[name].asks_for
        if not has_bits or self.bits is not None or not re.fullmatch(r"\d{1,3}", bits):
            raise InputError(f"residual {shown(self.residual)}: expected {', '.join(forms)} or quantized:BITS")
        return forms[name], int(bits)

    def _check_form(self) -> type[ResidualOptions]:
        """Returns the form of residuals; `InputError` unless there is exactly one way to say how much is kept."""
        form, bits = self.residual_form
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
        check_budget(self.target_bytes, self.budget_bits)
        form = form or RESIDUALS[0]
        if self.keep is None and not given and "keep" in form.asks_for:
            raise InputError("resmoe needs --keep, --target-bytes or --budget-bits, or --residual quantized:BITS")
        self._check_of_use()
        if in_codes:
            check_levels(self.levels, DEFAULT_BITS if bits is None else bits, zero_points=self.zero_points)
        return form

    def _check_of_use(self) -> None:
        """Raises `InputError` for options that change nothing beside the form of residuals that was asked for.

        Where none was, nothing is said: a sweep gives an option to all methods that have it.
        """
        form = self.residual_form[0]
        if form is None:
            return
        in_codes, pruned, coded_centre = "table" in form.asks_for, "encoding" in form.asks_for, self.centre is not None
        if self.design != "concat" and in_codes:
            raise InputError(f"design={self.design} goes with --residual up or svd: every matrix has codes of its own")
        if not self.refit and not (pruned or (in_codes and coded_centre)):
            raise InputError("--no-refit goes with --residual up, or quantized with --centre-bits: no other has one")
        if not self.feedback and not (in_codes or coded_centre):
            raise InputError("--no-feedback goes with --residual quantized, or with --centre-bits: nothing is in codes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocateOptions(OfCodes, OfLinearMaps, MethodOptions):
    """Codes around a shared centre or not, of as many bits for every matrix as --calibrate says that it is worth.

    Layers that are worth little have low-rank factors around a centre in codes.

    Attributes:
      budget_bits: bits per weight of the experts of all compressed layers, everything included; of the whole model with
        `of`, and of what stays whole, too.
      target_bytes: the same in bytes; one of both.
      group_size: entries along the input axis that share a scale.
      solver: of the alignment around a centre, see `barycenter`; `identity` takes the neurons as they are.
      levels: `any`: of every group the better of two grids; `fitted`: codes of 4, 3 or 2 bits have a table of levels,
        one for every kernel, fitted to it.
      zero_points: codes may have a zero point of eight bits for every group, in the layers where that is worth its
        bytes; those of centres have none.
      row_scales: codes may have a bfloat16 scale for every row, likewise: by the sizes of its entries or of its inputs
        (AWQ), whichever changes the outputs less. To try that takes more than ten times as long.
      experts: `alike`: all experts of a layer have the same bits; `own`: in two parts of a layer, experts may have bits
        of their own.
      experts_multiple: the number of experts in every part is a multiple of it: for a mesh, the size of its axis
        `expert`. A part that this does not divide is on every device.
      tries: plans that are carried out on some rows of the text and measured, one more after what they say of the parts
        of the model; the best one is taken. 1: the best expected plan is taken without trying.
    """

    implementation: ClassVar[str] = "bits_by_matrix.Allocate"
    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("budget_bits", (2.0, 2.5, 3.0, 4.0))
    needs_calibration: ClassVar[bool] = True

    budget_bits: float | None = None
    target_bytes: int | None = None
    group_size: int = DEFAULT_GROUP_SIZE
    solver: Literal["auto", "alternation", "assignment", "sinkhorn", "identity"] = "auto"
    levels: Literal["any", "fitted"] = "any"
    scale_bits: int = 16
    zero_points: bool = False
    row_scales: bool = False
    experts: Literal["alike", "own"] = "alike"
    experts_multiple: int = 1
    of: Of = "experts"
    tries: int = 1

    def __post_init__(self) -> None:
        check_member("experts", self.experts, ("alike", "own"))
        check_positive(self, "experts_multiple", "tries")
        if self.experts_multiple > 1 and self.experts == "alike":
            raise InputError(f"experts_multiple={self.experts_multiple} goes with experts=own: else no layer has parts")
        check_member("solver", self.solver, (*SOLVERS, IDENTITY))
        check_member("levels", self.levels, ("any", "fitted"))
        check_levels(self.levels, min(TABLE_BITS), zero_points=self.zero_points)
        if (self.budget_bits is None) == (self.target_bytes is None):
            raise InputError("allocate needs --budget-bits or --target-bytes, and not both")
        check_budget(self.target_bytes, self.budget_bits)
        ExpertCodesOptions(bits=2, group_size=self.group_size, scale_bits=self.scale_bits)
        self.check_of()
