"""Methods that store every expert on its own, in a form in which ResMoE stores residuals (methods.md 5)."""

import abc
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np

from moe_jax.compression.alignment.design_matrix import aligned_experts, unaligned
from moe_jax.compression.allocation.budget import same_scheme
from moe_jax.compression.allocation.trials import mean_shares
from moe_jax.compression.calibration.expert_coders import ExpertCoder
from moe_jax.compression.coding.schemes import (
    DEFAULT_GROUP_SIZE,
    Levels,
    LowRank,
    Pruned,
    Quantized,
    Scheme,
    check_levels,
)
from moe_jax.compression.coding.storage import LOW_RANK, QUANTIZED, SPARSE
from moe_jax.compression.coding.write_experts import write_experts
from moe_jax.compression.layer_figures import LayerFigures
from moe_jax.compression.methods.delta_base import NO_BASE, Base
from moe_jax.compression.methods.interface import Analysis, Method, Tick
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.models import MoEConfig


class WithoutCentre(Method):
    """The experts themselves in a scheme; their neurons stay in order.

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
    def scheme(self) -> Scheme:
        """How every expert is stored.

        Raises:
          InputError: if an option is out of range.
        """

    def __post_init__(self) -> None:
        self.scheme  # noqa: B018  (checks the options)

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        """See `Method`."""
        scheme = self.scheme
        if not (isinstance(scheme, Pruned) and scheme.needs_shares):
            return {}
        nothing = dict.fromkeys(layer.shapes, np.zeros((1, 1), np.float32))
        return {"shares": mean_shares(aligned_experts(layer, unaligned(layer)), nothing, scheme.keep)}

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        """See `Method`."""
        return same_scheme(layers, self.scheme, analyses, base="none")

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        """See `Method`."""
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
class UnstructuredPruning(WithoutCentre):
    """The weights of largest absolute value, stored sparsely.

    Attributes:
      keep: share of the weights that stays, in (0, 1].
      design: `concat`: one threshold for the whole design matrix of an expert, whose shares of the matrices are
        averaged over experts and layers of one shape; `separate`: one for each matrix.
      bits: of the values that stay: 8, 4, 3 or 2; by default floats.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.05, 0.1, 0.15, 0.25, 0.35, 0.5))
    forms: ClassVar[tuple[str, ...]] = SPARSE

    keep: float
    design: Literal["concat", "separate"] = "concat"
    bits: int | None = None

    @property
    def scheme(self) -> Pruned:
        """See `WithoutCentre`."""
        return Pruned(keep=self.keep, bits=self.bits, design=self.design)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SVD(WithoutCentre):
    """Truncated singular value decompositions of the kernels; biases stay as they are.

    Attributes:
      keep: share of the numbers that are stored, in (0, 1]; the ranks follow. With 1, factors take as much as the
        experts and are not yet of full rank.
      design: `concat`: of the design matrix of an expert, whose factor over the neurons is stored once; `separate`: of
        every kernel.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.05, 0.1, 0.15, 0.25, 0.35, 0.5))
    forms: ClassVar[tuple[str, ...]] = LOW_RANK

    keep: float
    design: Literal["concat", "separate"] = "concat"

    @property
    def scheme(self) -> LowRank:
        """See `WithoutCentre`."""
        return LowRank(keep=self.keep, design=self.design)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainQuantize(WithoutCentre):
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
    forms: ClassVar[tuple[str, ...]] = QUANTIZED

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
    def scheme(self) -> Quantized:
        """See `WithoutCentre`."""
        return Quantized(
            bits=self.bits,
            group_size=self.group_size or None,
            table=self.levels == "fitted",
            scale_bits=self.scale_bits,
            zero_points=self.zero_points,
            row_scales=self.row_scales,
        )
