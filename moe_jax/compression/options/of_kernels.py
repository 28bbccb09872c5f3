"""Options of methods that store every expert on its own: in codes, with fewer entries, or as factors."""

import dataclasses
from typing import ClassVar, Literal, get_args

from moe_jax.compression.options.in_common import SHARES, MethodOptions, Of, OfCodes, OfLinearMaps, Rounding
from moe_jax.core.code_options import BITS, DEFAULT_GROUP_SIZE, ExpertCodesOptions, Levels, check_levels
from moe_jax.core.errors import InputError, check_member, check_positive
from moe_jax.core.form_options import (
    DESIGNS,
    BasisActivation,
    LowRankOptions,
    SparseOptions,
    check_keep,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnstructuredPruningOptions(MethodOptions):
    """The weights of largest absolute value, stored sparsely.

    Attributes:
      keep: share of the weights that stays, in (0, 1].
      design: `concat`: one threshold for the whole design matrix of an expert, whose shares of the matrices are
        averaged over experts and layers of one shape; `separate`: one for each matrix.
      bits: of the values that stay: 8, 4, 3 or 2; by default floats.
    """

    implementation: ClassVar[str] = "without_base.UnstructuredPruning"
    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", SHARES)

    keep: float
    design: Literal["concat", "separate"] = "concat"
    bits: int | None = None

    def __post_init__(self) -> None:
        SparseOptions.check_size(keep=self.keep, bits=self.bits)
        check_member("design", self.design, DESIGNS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SVDOptions(MethodOptions):
    """Truncated singular value decompositions of the kernels; biases stay as they are.

    Attributes:
      keep: share of the numbers that are stored, in (0, 1]; the ranks follow. With 1, factors take as much as the
        experts and are not yet of full rank.
      design: `concat`: of the design matrix of an expert, whose factor over the neurons is stored once; `separate`: of
        every kernel.
    """

    implementation: ClassVar[str] = "without_base.SVD"
    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", SHARES)

    keep: float
    design: Literal["concat", "separate"] = "concat"

    def __post_init__(self) -> None:
        LowRankOptions.check_size(keep=self.keep, bits=None)
        check_member("design", self.design, DESIGNS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainQuantizeOptions(OfCodes, OfLinearMaps, MethodOptions):
    """Every weight rounded to the nearest level; the scale of a group is the one of least squared error.

    Attributes:
      levels: `any`: of every group the better of two grids, one of which has no zero; `even`: always the other one, the
        only one that formats of other libraries have (`export --format compressed-tensors`); `fitted`: a table of
        levels for every kernel, fitted to it, of 4, 3 or 2 bits.
    """

    implementation: ClassVar[str] = "without_base.PlainQuantize"
    swept: ClassVar[tuple[str, tuple[int, ...]]] = ("bits", (8, 4, 3, 2))

    bits: int
    group_size: int = DEFAULT_GROUP_SIZE
    feedback: bool = True
    levels: Levels = "any"
    scale_bits: int = 16
    zero_points: bool = False
    row_scales: bool = False
    rounding: Rounding = "nearest"
    rounding_steps: int | None = None
    of: Of = "experts"
    rest_bits: int | None = None
    embedding_bits: int | None = None

    def __post_init__(self) -> None:
        check_levels(self.levels, self.bits, zero_points=self.zero_points)
        self.learnt_steps  # noqa: B018  (checks rounding)
        self.codes_options  # noqa: B018  (checks them)
        self.check_of()
        if self.rounding == "learnt" and self.of == "rest":
            raise InputError("rounding=learnt is for experts: with of=rest there is nothing to learn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HQQOptions(OfCodes, MethodOptions):
    """Codes with zero points by half-quadratic splitting (HQQ), a baseline: --calibrate changes nothing.

    Attributes:
      group_size: entries along the input axis that share a scale and a zero point; as published 64.
      scale_bits: of a scale: 16, or 8, with a bfloat16 step for each row of groups. Zero points have 8 bits.
    """

    implementation: ClassVar[str] = "without_base.HQQ"
    swept: ClassVar[tuple[str, tuple[int, ...]]] = ("bits", BITS)

    bits: int
    group_size: int = 64
    scale_bits: int = 16

    def __post_init__(self) -> None:
        ExpertCodesOptions(bits=self.bits, group_size=self.group_size, scale_bits=self.scale_bits, zero_points=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NF4Options(MethodOptions):
    """NF4 with scales of eight bits (QLoRA's double quantisation), a baseline: --calibrate changes nothing.

    Attributes:
      group_size: entries along the input axis that share a scale; as published 64.
    """

    implementation: ClassVar[str] = "without_base.NF4"
    swept: ClassVar[tuple[str, tuple[int, ...]]] = ("group_size", (64,))

    group_size: int = 64

    def __post_init__(self) -> None:
        ExpertCodesOptions(bits=4, group_size=self.group_size, table=True, scale_bits=8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoBEOptions(MethodOptions):
    """Factors of gate and up, one mixed of bases that all experts of a layer share (MoBE), a baseline.

    Found by Adam (what differs from the paper is said at the top of its file); down stays whole. --calibrate changes
    nothing. Of the paper, the division of experts into groups with bases of their own is left out. Experts wider than
    the model, which it has none of, have their own factor on the side of the model.

    Attributes:
      keep: share of the numbers of gate and up that is stored, in (0, 1]; the rank follows.
      rank: instead of `keep`; by default the shorter side of a kernel, as published.
      bases: that the experts of a layer share; by default a quarter of their number, about as published.
      activation: of the mixed bases.
      steps: of Adam; published are 10000 to 30000.
      rate: of Adam at first, for kernels of standard deviation 1; published 0.07.
    """

    implementation: ClassVar[str] = "mobe.MoBE"
    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.15, 0.25, 0.35, 0.5, 0.65))

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
        check_positive(self, "rank", "bases", "steps")
        if not 0 < self.rate < 1:
            raise InputError(f"rate={self.rate:g} must lie in (0, 1)")
        check_member("activation", self.activation, get_args(BasisActivation))
