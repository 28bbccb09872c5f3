"""`binary`: experts of one bit around a centre that they share, in codes (methods.md 4).

The centre is the mean of the experts, weighted by what they are given (`deltas.weighted_mean`); residuals are taken
from its codes. Each has one sign for an entry, and scales of rows and of groups, which are refined with the second
moments of its inputs (`coding.binary_codes`).

MoBiE (Zhao et al., 2026, arXiv 2604.06798) shares a basis of a joint SVD among experts instead of a centre, weights
errors by gradients too (here with `--gradients`), and keeps errors out of what the router sees; salient columns there
have a second code, which there is no place for here. So this is not that method, but has its aim.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from moe_jax.compression.coding.binary_codes import refined
from moe_jax.compression.coding.coder import ExpertCoder
from moe_jax.compression.coding.write_experts import Made, write_experts
from moe_jax.compression.methods.deltas import WEIGHTED_MEAN, weighted_mean
from moe_jax.compression.methods.interface import Analysis, Base, HasCentre, Method, all_alike, check_calibrated
from moe_jax.compression.options.around_centre import BinaryOptions
from moe_jax.compression.report import LayerFigures
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.errors import InputError
from moe_jax.experts.forms import Quantized
from moe_jax.experts.forms.coding import Layout, Residual, Wanted
from moe_jax.models import MoEConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binary(BinaryOptions, HasCentre, Method):
    """The method with the options `BinaryOptions`."""

    layouts: ClassVar[tuple[Layout, ...]] = Quantized.layouts(bits=1)
    codes_format: ClassVar[Mapping[str, Any]] = {"row_scales": True}
    origin: ClassVar[str | None] = WEIGHTED_MEAN
    planned_centre_bits: ClassVar[int | None] = 4

    def check(self, layers: Sequence[SourceLayer]) -> None:
        if any(layer.num_experts > layer.moe.bank_experts for layer in layers):
            raise InputError(
                "--extended does not go with this method: what the universal FFN counts for in a mean is not known"
            )
        check_calibrated(layers)

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        wanted = Wanted(
            form=Quantized, bits=1, group_size=self.group_size, scale_bits=self.scale_bits, **self.codes_format
        )
        return all_alike(layers, wanted, analyses, base="shared", codes=self.codes)

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        measure = write_experts(layer, target.bank, write, base=partial(weighted_mean, layer), encode=self._encode)
        return measure.figures(choice=target.bank.describe())

    def _encode(self, name: str, expert: int, residual: Residual, coder: ExpertCoder) -> Made:
        own: Any = {"group_size": self.group_size, "scale_bits": self.scale_bits}
        start = coder.quantize(residual.values, bits=1, row_scales=True, **own)
        assert coder.moment is not None
        leaves, made = refined(np.asarray(residual.values, np.float32), start, coder.moment, **own)
        return dict(leaves), made
