"""`hqq`: codes whose zero points are found by half-quadratic splitting, without a text (methods.md 4)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from moe_jax.compression.coding.half_quadratic import HalfQuadratic
from moe_jax.compression.coding.schemes import Quantized
from moe_jax.compression.coding.storage import QUANTIZED
from moe_jax.compression.methods.without_centre import WithoutCentre
from moe_jax.experts.forms.quantized import BITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class HQQ(WithoutCentre):
    """Codes with zero points by half-quadratic splitting (HQQ), a baseline: --calibrate changes nothing.

    Attributes:
      bits: of a code: 8, 4, 3, 2 or 1.
      group_size: entries along the input axis that share a scale and a zero point; as published 64.
      scale_bits: of a scale: 16, or 8, with a bfloat16 step for each row of groups. Zero points have 8 bits.
    """

    swept: ClassVar[tuple[str, tuple[int, ...]]] = ("bits", BITS)
    forms: ClassVar[tuple[str, ...]] = QUANTIZED
    codes_format: ClassVar[Mapping[str, Any]] = {"group_size": 64, "zero_points": True}
    coder: ClassVar[HalfQuadratic] = HalfQuadratic()

    bits: int
    group_size: int = 64
    scale_bits: int = 16

    @property
    def scheme(self) -> Quantized:
        """See `WithoutCentre`."""
        given = {"group_size": self.group_size, "scale_bits": self.scale_bits}
        return Quantized(bits=self.bits, **{**self.codes_format, **given})
