"""The base of the options of all methods, and options that several methods have."""

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from moe_jax.core.code_options import BITS, BaseCodesOptions, Code, ExpertCodesOptions, Levels
from moe_jax.core.errors import InputError, check_member, check_positive, is_finite, shown

if TYPE_CHECKING:  # it imports JAX
    from moe_jax.compression.methods.interface import Method

SOLVERS = ("auto", "assignment", "alternation", "sinkhorn")
"""Solvers of the alignment of experts, see `compression.alignment.barycenter`."""
Of = Literal["experts", "rest", "model"]
"""The parts of a model that a method compresses."""
Rounding = Literal["nearest", "learnt"]
ROUNDING_STEPS = 200
"""How entries become codes; steps in which that is learnt."""
IDENTITY = "identity"
"""A solver that leaves the neurons in the order in which they are: the centre is the average expert."""
SHARES = (0.05, 0.1, 0.15, 0.25, 0.35, 0.5)
"""Shares that a sweep tries of methods that keep one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """The options of a method of compression, which is a subclass.

    Attributes:
      implementation: where the subclass is: a module of `compression.methods`, and its name. Empty: in this class.
      swept: name of the option that says how much is kept, and the values that a sweep tries.
      needs_calibration: whether the method can do nothing without a text; a sweep of all methods leaves it out then.

    Raises:
      InputError: if a value is out of range.
    """

    implementation: ClassVar[str] = ""
    swept: ClassVar[tuple[str, tuple[Any, ...]]]
    needs_calibration: ClassVar[bool] = False

    @classmethod
    def method_class(cls) -> "type[Method]":
        """The method with these options."""
        found: Any = cls
        if "implementation" in vars(cls):  # a method inherits it from its options
            module, _, name = cls.implementation.partition(".")
            found = getattr(importlib.import_module(f"moe_jax.compression.methods.{module}"), name)
        return found

    def to_method(self) -> "Method":
        """Makes the method with the values of these options."""
        return self.method_class()(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


class OfCodes:
    """Options of methods that store experts in codes. A method has those of them that are among its own fields.

    Attributes:
      bits: of a code: 8, 4, 3, 2 or 1.
      group_size: entries along the input axis that share a scale; 0: the whole kernel.
      feedback: with a calibration, each row of codes makes up for the errors of those before it (GPTQ). Otherwise every
        entry is rounded on its own, and the text says only how much each row counts.
      scale_bits: of a scale: 16, or 8, with a bfloat16 step for each row of groups.
      zero_points: every group has a zero point of eight bits beside its scale: its levels need not lie around zero.
      row_scales: every row of a kernel has a bfloat16 scale, too: by the sizes of its entries, and with a calibration
        by these or by those of its inputs (AWQ), whichever changes the outputs less.
      rounding: `nearest`: every entry, or what feedback makes of it, has the nearest level; `learnt`: without feedback,
        levels and factors of the scales are learnt on --calibrate by the error of an expert's outputs (AutoRound).
      rounding_steps: of `learnt`, by default 200, as published.
    """

    bits: int
    group_size: int
    levels: Levels
    scale_bits: int
    zero_points: bool
    row_scales: bool
    rounding: Rounding = "nearest"
    rounding_steps: int | None = None

    @property
    def learnt_steps(self) -> int | None:
        """Steps in which the rounding is learnt; None: it is not. For a method that has these options.

        Raises:
          InputError: if they do not go together, or with others.
        """
        check_member("rounding", self.rounding, get_args(Rounding))
        if self.rounding == "nearest":
            if self.rounding_steps is not None:
                raise InputError(f"rounding_steps={self.rounding_steps} goes with rounding=learnt")
            return None
        if self.levels == "fitted":
            raise InputError("rounding=learnt is for levels at equal distances, and levels=fitted have others")
        check_positive(self, "rounding_steps")
        return self.rounding_steps or ROUNDING_STEPS

    @property
    def codes_options(self) -> dict[str, Any]:
        """The options of the codes, for a method that has all of these options.

        Raises:
          InputError: if one is out of range.
        """
        options = {
            "bits": self.bits,
            "group_size": self.group_size or None,
            "table": self.levels == "fitted",
            "scale_bits": self.scale_bits,
            "zero_points": self.zero_points,
            "row_scales": self.row_scales,
        }
        made: Any = ExpertCodesOptions
        made(**options)
        return options


class OfLinearMaps:
    """Options of methods that can also put linear maps outside the experts in codes, of those that are their fields.

    Attributes:
      of: what is compressed: the `experts`; the `rest`, which are attention, dense and shared FFNs, embedding and head;
        or the whole `model`. Norms, routers and biases stay as they are.
      rest_bits: of attention, dense and shared FFNs; by default `bits`.
      embedding_bits: of the embedding and the head; by default 8, or 4 if `bits` is less than 4.
    """

    of: Of
    rest_bits: int | None = None
    embedding_bits: int | None = None
    levels: Levels
    feedback: bool = True

    @property
    def part(self) -> Of:
        """The part of the model that is compressed."""
        return self.of

    @property
    def coder_options(self) -> dict[str, bool]:
        """Options of the coders of linear maps, see `LeastOutputError`."""
        return {"even": self.levels == "even", "feedback": self.feedback}

    def check_of(self) -> None:
        """Raises `InputError` for a value out of range, or bits of what is not compressed."""
        check_member("of", self.of, get_args(Of))
        for name in ("rest_bits", "embedding_bits"):
            bits = getattr(self, name)
            if bits is not None and bits not in BITS:
                raise InputError(f"{name}={bits} must be one of {', '.join(map(str, BITS))}")
            if bits is not None and self.of == "experts":
                raise InputError(f"{name}={bits} goes with of=model or of=rest: only the experts are compressed")
            if bits == 1 and self.levels == "even":
                raise InputError(f"{name}=1 does not go with levels=even: one bit has no zero; choose 2 bits or more")


class AroundCentre:
    """Options of methods whose centre may be in codes. A method has those of them that are among its own fields.

    Attributes:
      levels: `any`: of every group the better of two grids, one of which has no zero; `even`: always the other one, the
        only one that formats of other libraries have (`export --format compressed-tensors`); `fitted`: a table of
        levels for every kernel, fitted to it, of 4, 3 or 2 bits; so has a centre of so many.
      scale_bits: of a scale: 16, or 8, with a bfloat16 step for each row of groups; those of a centre in codes, too.
      centre_bits: of a code of the centre: 8, 4, 3 or 2, or `nf4`; residuals are taken from what these codes stand for.
        By default it is stored in the dtype of the model.
      centre_group_size: of the centre's codes: entries along the input axis that share a scale, by default 128.
    """

    levels: Levels = "any"
    scale_bits: int = 16
    centre_bits: Code | None
    centre_group_size: int | None

    @property
    def centre(self) -> dict[str, Any] | None:
        """The options of the codes of the centre, see `centre_options`."""
        table = self.levels == "fitted"
        return centre_options(self.centre_bits, self.centre_group_size, table=table, scale_bits=self.scale_bits)


def centre_options(
    bits: Any, group_size: int | None, *, table: bool = False, scale_bits: int = 16
) -> dict[str, Any] | None:
    """Reads `centre_bits` and `centre_group_size`: the options of `experts.BaseCodes`, or None without codes.

    With a table where codes may have one.

    Raises:
      InputError: if they are out of range, or the second stands alone.
    """
    if bits is not None:
        code: Any = str(bits)
        codes = BaseCodesOptions(code=code, group_size=group_size)
        if codes.group_size is not None:
            codes = dataclasses.replace(codes, table=table and codes.may_have_table, scale_bits=scale_bits)
        return vars(codes)
    if group_size is not None:
        raise InputError(f"centre_group_size={group_size} goes with centre_bits: the centre has no codes without them")
    return None


def check_budget(target_bytes: int | None, budget_bits: float | None) -> None:
    """Raises `InputError` unless a budget, in bytes or in bits per weight, is finite and above 0."""
    for name, value in (("target_bytes", target_bytes), ("budget_bits", budget_bits)):
        if value is not None and not (is_finite(value) and value > 0):
            number = f"{value:g}" if isinstance(value, float) else shown(value)
            raise InputError(f"{name}={number} must be above 0, and finite")
