"""Options of the forms of experts, known without JAX: how they are named, and the limits of their numbers.

A form of `experts.forms` inherits its options from here. `FORM_OPTIONS` are those of the library by kind, and of all
forms that have been registered.
"""

import dataclasses
from typing import Any, ClassVar, Literal, get_args

from moe_jax.core.code_options import VALUE_BITS, ExpertCodesOptions
from moe_jax.core.errors import InputError, check_positive, clipped, nearest, shown

Design = Literal["concat", "separate"]
DESIGNS: tuple[str, ...] = get_args(Design)
"""One threshold, or factorisation, for all matrices of an expert, or one for each."""
BasisActivation = Literal["silu", "tanh"]
"""Activations of the mixed bases of `MixtureOfBases`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormOptions:
    """The options of a form of experts.

    Attributes:
      kind: the name under which the form is registered.
      over_base: an expert consists of a base that all share and a part of its own; false: its kernels are whole.
      delta_option: how `upcycle --delta` names the form, such as `low-rank:R`; None: upcycling does not offer it.
      delta_number: name and type of the option that follows the colon there; None: none does.
    """

    kind: ClassVar[str] = ""
    over_base: ClassVar[bool] = True
    delta_option: ClassVar[str | None] = None
    delta_number: ClassVar[tuple[str, type] | None] = None


class ResidualOptions:
    """How residuals around a shared base in some form are asked for.

    Attributes:
      residual_option: how `--residual` names the form, with `[:BITS]` if bits may follow; None: by its kind.
      asks_for: the fields of `Wanted` that say how large it is.
      takes_residuals: whether residuals are stored in it; otherwise only whole experts are.
    """

    kind: ClassVar[str]
    takes_residuals: ClassVar[bool] = False
    residual_option: ClassVar[str | None] = None
    asks_for: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def option_name(cls) -> str:
        """The name of the form as a value of `--residual`."""
        return (cls.residual_option or cls.kind).partition("[")[0]

    @classmethod
    def check_size(cls, *, keep: float | None, bits: int | None, **codes: Any) -> None:
        """Raises `InputError` for a size that the form cannot have; by default for any, as it has one alone."""
        del codes
        for name, value in (("keep", keep), ("bits", bits)):
            if value is not None and name not in cls.asks_for:
                raise InputError(f"{name} does not go with {cls.kind}: experts in this form have one size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullOptions(FormOptions):
    """The options of full kernels: none."""

    kind: ClassVar[str] = "full"
    over_base: ClassVar[bool] = False
    delta_option: ClassVar[str | None] = "full"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactorsOptions(FormOptions):
    """The options of a product of two factors.

    Attributes:
      rank: r.
    """

    rank: int

    def __post_init__(self) -> None:
        check_positive(self, "rank")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankOptions(ResidualOptions, FactorsOptions):
    """The options of low-rank experts."""

    takes_residuals: ClassVar[bool] = True
    kind: ClassVar[str] = "low-rank"
    delta_option: ClassVar[str | None] = "low-rank:R"
    delta_number: ClassVar[tuple[str, type] | None] = ("rank", int)
    residual_option: ClassVar[str | None] = "svd"
    asks_for: ClassVar[tuple[str, ...]] = ("keep",)

    @classmethod
    def check_size(cls, *, keep: float | None, bits: int | None, **codes: Any) -> None:
        del codes
        check_keep(keep)
        if bits is not None:
            raise InputError("bits do not go with an svd residual: its factors are floats")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseOptions(ResidualOptions, FormOptions):
    """The options of sparse entries of an expert's own.

    Attributes:
      rate: the share of entries that are zero, in [0, 1).
    """

    takes_residuals: ClassVar[bool] = True
    kind: ClassVar[str] = "sparse"
    delta_option: ClassVar[str | None] = "sparse:RATE"
    delta_number: ClassVar[tuple[str, type] | None] = ("rate", float)
    residual_option: ClassVar[str | None] = "up"
    asks_for: ClassVar[tuple[str, ...]] = ("keep", "bits", "encoding")

    rate: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate < 1.0:
            raise InputError(f"rate={self.rate} must lie in [0, 1): it is the share of entries left out")

    @classmethod
    def check_size(cls, *, keep: float | None, bits: int | None, **codes: Any) -> None:
        del codes
        check_keep(keep)
        if keep is not None and 1.0 - keep == 1.0:  # as a rate
            raise InputError(f"keep={keep:g} is too little to be told from nothing; give at least 1e-15")
        if bits is not None and bits not in VALUE_BITS:
            raise InputError(f"bits={bits} of kept entries must be one of {', '.join(map(str, VALUE_BITS))}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedOptions(ExpertCodesOptions, ResidualOptions, FormOptions):
    """The options of experts in codes, as a form."""

    takes_residuals: ClassVar[bool] = True
    kind: ClassVar[str] = "quantized"
    residual_option: ClassVar[str | None] = "quantized[:BITS]"
    asks_for: ClassVar[tuple[str, ...]] = ("bits", "group_size", "table", "scale_bits", "zero_points", "row_scales")

    @classmethod
    def check_size(cls, *, keep: float | None, bits: int | None, **codes: Any) -> None:
        if keep is not None:
            raise InputError("keep does not go with a quantized residual, of which every entry stays: give bits")
        options: Any = {"bits": bits, **codes}
        ExpertCodesOptions(**options)


FORM_OPTIONS: dict[str, type[FormOptions]] = {
    one.kind: one for one in (SparseOptions, LowRankOptions, QuantizedOptions, FullOptions)
}
"""Options of forms by kind; those first that residuals have by default."""


def delta_options() -> dict[str, str]:
    """The values of `upcycle --delta`, such as `low-rank:R`, by kind, in alphabetical order."""
    return {kind: form.delta_option for kind, form in sorted(FORM_OPTIONS.items()) if form.delta_option is not None}


def read_delta(text: str) -> FormOptions:
    """Reads a value of `upcycle --delta`, such as `low-rank:16`: returns the options of the form.

    Raises:
      InputError: if it is none of `delta_options`, or its number cannot be read or is out of range.
    """
    kind, colon, number = text.partition(":")
    offered = delta_options()
    if kind not in offered or bool(colon) != (":" in offered[kind]) or bool(number) != bool(colon):
        if kind in offered:
            raise InputError(f"delta {shown(text)}: expected {offered[kind]}")
        hint = nearest(kind, offered).replace("'?)", f"{colon}{clipped(number)}'?)")
        raise InputError(f"unknown delta {shown(text)}{hint}; it is one of {', '.join(offered.values())}")
    form: Any = FORM_OPTIONS[kind]
    if form.delta_number is None:
        return form()
    name, read = form.delta_number
    try:
        value = read(number)
    except ValueError:
        expected = "a whole number" if read is int else "a number"
        raise InputError(f"delta {shown(text)}: expected {expected} after the colon") from None
    return form(**{name: value})


def residual_options() -> dict[str, type[ResidualOptions]]:
    """The forms of residuals by their names as values of `--residual`, those first that a budget chooses from."""
    forms = (form for form in FORM_OPTIONS.values() if issubclass(form, ResidualOptions))
    return {form.option_name(): form for form in forms if form.takes_residuals and form.over_base}


def check_keep(keep: float | None) -> None:
    """Raises `InputError` unless `keep` is a share."""
    if keep is None:
        raise InputError("keep is missing: the share of the experts that stays, in (0, 1]")
    if not 0.0 < keep <= 1.0:
        raise InputError(f"keep={keep:g} must lie in (0, 1]: it is the share of the experts that stays")
