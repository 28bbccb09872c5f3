"""`ders-quantize`: every delta as codes of a few bits and a scale per group (methods.md 4)."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

from moe_jax.compression.allocation.budget import all_alike
from moe_jax.compression.coding.coder import LeastError, Levels, check_levels
from moe_jax.compression.coding.expert_coders import expert_coders
from moe_jax.compression.coding.shared_base import codes_of_options
from moe_jax.compression.layer_figures import LayerFigures
from moe_jax.compression.methods.delta_base import Base, compress_deltas
from moe_jax.compression.methods.interface import Analysis, Method
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.errors import InputError, check_member
from moe_jax.experts import BaseCodes
from moe_jax.experts.bank_config import Code
from moe_jax.experts.forms import Quantized
from moe_jax.experts.forms.coding import DEFAULT_GROUP_SIZE, Layout, Wanted
from moe_jax.experts.forms.quantized import BITS
from moe_jax.models import MoEConfig

SCALES = ("mse", "absmax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantize(Method):
    """Quantised deltas over a shared base.

    Attributes:
      bits: of a code: 8, 4, 3, 2 or 1.
      group_size: entries along the input axis that share a scale; 0: the whole kernel.
      scale: `mse`: of every group the grid of levels and the scale that give the least squared error; `absmax`: the
        largest level stands for the largest absolute value of the group. One bit has no choice: its scale, the mean
        absolute value, already has the least error.
      feedback: with a calibration, each row of codes makes up for the errors of those before it (GPTQ). Otherwise every
        entry is rounded on its own, and the text says only how much each row counts.
      levels: `any`: of every group the better of two grids, one of which has no zero; `even`: always the other one, the
        only one that formats of other libraries have (`export --format compressed-tensors`); `fitted`: a table of
        levels for every kernel, fitted to it, of 4, 3 or 2 bits; so has a centre of so many.
      scale_bits: of a scale: 16, or 8, with a bfloat16 step for each row of groups; those of a centre in codes, too.
      zero_points: every group has a zero point of eight bits beside its scale: its levels need not lie around zero.
      row_scales: every row of a kernel has a bfloat16 scale, too: by the sizes of its entries, and with a calibration
        by these or by those of its inputs (AWQ), whichever changes the outputs less.
      centre_bits: of a code of the centre: 8, 4, 3 or 2, or `nf4`; residuals are taken from what these codes stand for.
        By default it is stored in the dtype of the model.
      centre_group_size: of the centre's codes: entries along the input axis that share a scale, by default 128.
    """

    swept: ClassVar[tuple[str, tuple[int, ...]]] = ("bits", BITS)
    layouts: ClassVar[tuple[Layout, ...]] = Quantized.layouts()

    bits: int
    group_size: int = DEFAULT_GROUP_SIZE
    scale: Literal["mse", "absmax"] = "mse"
    feedback: bool = True
    levels: Levels = "any"
    scale_bits: int = 16
    zero_points: bool = False
    row_scales: bool = False
    centre_bits: Code | None = None
    centre_group_size: int | None = None

    def __post_init__(self) -> None:
        check_member("scale", self.scale, SCALES)
        check_levels(self.levels, self.bits, zero_points=self.zero_points)
        if self.scale != "mse" and self.levels != "any":
            raise InputError(f"levels={self.levels} have scales of least squared error: leave scale={self.scale} out")
        self._wanted  # noqa: B018  (checks bits and group size)
        self._codes  # noqa: B018  (checks those of the centre)

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        return all_alike(layers, self._wanted, analyses, base="shared", codes=self._codes)

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        fit, even = self.scale == "mse", self.levels == "even"
        coders = partial(expert_coders, fit=fit, feedback=self.feedback, even=even)
        return compress_deltas(layer, base, target.bank, write, coders, rounded=LeastError(fit=fit), refit=True)

    @property
    def _codes(self) -> BaseCodes | None:
        table = self.levels == "fitted"
        return codes_of_options(self.centre_bits, self.centre_group_size, table=table, scale_bits=self.scale_bits)

    @property
    def _wanted(self) -> Wanted:
        return Wanted(
            form=Quantized,
            bits=self.bits,
            group_size=self.group_size or None,
            table=self.levels == "fitted",
            scale_bits=self.scale_bits,
            zero_points=self.zero_points,
            row_scales=self.row_scales,
        )
