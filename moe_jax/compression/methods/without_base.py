"""Methods that store every expert on its own, in a form in which ResMoE stores residuals (methods.md 4 and 5)."""

import abc
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from moe_jax.compression.alignment.design_matrix import aligned_experts, unaligned
from moe_jax.compression.allocation.budget import all_alike
from moe_jax.compression.allocation.trials import mean_shares
from moe_jax.compression.coding.coder import Levels, check_levels
from moe_jax.compression.coding.expert_coders import ExpertCoder
from moe_jax.compression.coding.half_quadratic import HalfQuadratic
from moe_jax.compression.coding.normal_float import NormalFloat
from moe_jax.compression.coding.write_experts import write_experts
from moe_jax.compression.layer_figures import LayerFigures
from moe_jax.compression.methods.delta_base import NO_BASE, Base
from moe_jax.compression.methods.interface import Analysis, Method, Tick
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.experts.forms import LowRank, Quantized, Sparse
from moe_jax.experts.forms.coding import DEFAULT_GROUP_SIZE, Layout, Wanted
from moe_jax.experts.forms.quantized import BITS
from moe_jax.models import MoEConfig


class WithoutBase(Method):
    """The experts themselves in a form; their neurons stay in order.

    Attributes:
      feedback: see `write_experts`.
      levels: see `PlainQuantize`.
      coder: that of all kernels, for a method that has one of its own and looks at no inputs.
    """

    feedback: bool = True
    levels: Levels = "any"
    origin: ClassVar[str | None] = NO_BASE
    coder: ClassVar[ExpertCoder | None] = None

    @property
    @abc.abstractmethod
    def wanted(self) -> Wanted:
        """How every expert is stored.

        Raises:
          InputError: if an option is out of range.
        """

    def __post_init__(self) -> None:
        self.wanted  # noqa: B018  (checks the options)

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        if not self.wanted.needs_shares:
            return {}
        nothing = dict.fromkeys(layer.shapes, np.zeros((1, 1), np.float32))
        return {"shares": mean_shares(aligned_experts(layer, unaligned(layer)), nothing, self.wanted.keep or 1.0)}

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        return all_alike(layers, self.wanted, analyses, base="none")

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        began = time.monotonic()
        measure = write_experts(
            layer,
            target.bank,
            unaligned(layer),
            write,
            refit=False,
            feedback=self.feedback,
            even=self.levels == "even",
            coder=self.coder,
        )
        return measure.figures(seconds=time.monotonic() - began, choice=target.bank.form.describe())


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnstructuredPruning(WithoutBase):
    """The weights of largest absolute value, stored sparsely.

    Attributes:
      keep: share of the weights that stays, in (0, 1].
      design: `concat`: one threshold for the whole design matrix of an expert, whose shares of the matrices are
        averaged over experts and layers of one shape; `separate`: one for each matrix.
      bits: of the values that stay: 8, 4, 3 or 2; by default floats.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.05, 0.1, 0.15, 0.25, 0.35, 0.5))
    layouts: ClassVar[tuple[Layout, ...]] = Sparse.layouts()

    keep: float
    design: Literal["concat", "separate"] = "concat"
    bits: int | None = None

    @property
    def wanted(self) -> Wanted:
        return Wanted(form=Sparse, keep=self.keep, bits=self.bits, design=self.design)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SVD(WithoutBase):
    """Truncated singular value decompositions of the kernels; biases stay as they are.

    Attributes:
      keep: share of the numbers that are stored, in (0, 1]; the ranks follow. With 1, factors take as much as the
        experts and are not yet of full rank.
      design: `concat`: of the design matrix of an expert, whose factor over the neurons is stored once; `separate`: of
        every kernel.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.05, 0.1, 0.15, 0.25, 0.35, 0.5))
    layouts: ClassVar[tuple[Layout, ...]] = LowRank.layouts()

    keep: float
    design: Literal["concat", "separate"] = "concat"

    @property
    def wanted(self) -> Wanted:
        return Wanted(form=LowRank, keep=self.keep, design=self.design)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainQuantize(WithoutBase):
    """Every weight rounded to the nearest level; the scale of a group is the one of least squared error.

    Attributes:
      bits: of a code: 8, 4, 3, 2 or 1.
      group_size: entries along the input axis that share a scale; 0: the whole kernel.
      feedback: with a calibration, each row of codes makes up for the errors of those before it (GPTQ). Otherwise every
        entry is rounded on its own, and the text says only how much each row counts.
      levels: `any`: of every group the better of two grids, one of which has no zero; `even`: always the other one, the
        only one that formats of other libraries have (`export --format compressed-tensors`); `fitted`: a table of
        levels for every kernel, fitted to it, of 4, 3 or 2 bits.
      scale_bits: of a scale: 16, or 8, with a bfloat16 step for each row of groups.
      zero_points: every group has a zero point of eight bits beside its scale: its levels need not lie around zero.
      row_scales: every row of a kernel has a bfloat16 scale, too: by the sizes of its entries, and with a calibration
        by these or by those of its inputs (AWQ), whichever changes the outputs less.
    """

    swept: ClassVar[tuple[str, tuple[int, ...]]] = ("bits", (8, 4, 3, 2))
    layouts: ClassVar[tuple[Layout, ...]] = Quantized.layouts()

    bits: int
    group_size: int = DEFAULT_GROUP_SIZE
    feedback: bool = True
    levels: Levels = "any"
    scale_bits: int = 16
    zero_points: bool = False
    row_scales: bool = False

    def __post_init__(self) -> None:
        check_levels(self.levels, self.bits, zero_points=self.zero_points)
        super().__post_init__()

    @property
    def wanted(self) -> Wanted:
        return Wanted(
            form=Quantized,
            bits=self.bits,
            group_size=self.group_size or None,
            table=self.levels == "fitted",
            scale_bits=self.scale_bits,
            zero_points=self.zero_points,
            row_scales=self.row_scales,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HQQ(WithoutBase):
    """Codes with zero points by half-quadratic splitting (HQQ), a baseline: --calibrate changes nothing.

    Attributes:
      bits: of a code: 8, 4, 3, 2 or 1.
      group_size: entries along the input axis that share a scale and a zero point; as published 64.
      scale_bits: of a scale: 16, or 8, with a bfloat16 step for each row of groups. Zero points have 8 bits.
    """

    swept: ClassVar[tuple[str, tuple[int, ...]]] = ("bits", BITS)
    layouts: ClassVar[tuple[Layout, ...]] = Quantized.layouts()
    codes_format: ClassVar[Mapping[str, Any]] = {"group_size": 64, "zero_points": True}
    coder: ClassVar[HalfQuadratic] = HalfQuadratic()

    bits: int
    group_size: int = 64
    scale_bits: int = 16

    @property
    def wanted(self) -> Wanted:
        given = {"group_size": self.group_size, "scale_bits": self.scale_bits}
        return Wanted(form=Quantized, bits=self.bits, **{**self.codes_format, **given})


@dataclasses.dataclass(frozen=True, kw_only=True)
class NF4(WithoutBase):
    """NF4 with scales of eight bits (QLoRA's double quantisation), a baseline: --calibrate changes nothing.

    Attributes:
      group_size: entries along the input axis that share a scale; as published 64.
    """

    swept: ClassVar[tuple[str, tuple[int, ...]]] = ("group_size", (64,))
    layouts: ClassVar[tuple[Layout, ...]] = Quantized.layouts(bits=4)
    codes_format: ClassVar[Mapping[str, Any]] = {"group_size": 64, "table": True, "scale_bits": 8}
    coder: ClassVar[NormalFloat] = NormalFloat()

    group_size: int = 64

    @property
    def wanted(self) -> Wanted:
        return Wanted(form=Quantized, bits=4, **{**self.codes_format, "group_size": self.group_size})
