"""`nf4`: the levels of normal numbers, by the largest magnitude of every group (methods.md 4)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from moe_jax.compression.coding.normal_float import NormalFloat
from moe_jax.compression.coding.schemes import Quantized
from moe_jax.compression.coding.storage import QUANTIZED
from moe_jax.compression.methods.without_centre import WithoutCentre


@dataclasses.dataclass(frozen=True, kw_only=True)
class NF4(WithoutCentre):
    """NF4 with scales of eight bits (QLoRA's double quantisation), a baseline: --calibrate changes nothing.

    Attributes:
      group_size: entries along the input axis that share a scale; as published 64.
    """

    swept: ClassVar[tuple[str, tuple[int, ...]]] = ("group_size", (64,))
    forms: ClassVar[tuple[str, ...]] = tuple(form for form in QUANTIZED if form.endswith(":4"))
    codes_format: ClassVar[Mapping[str, Any]] = {"group_size": 64, "table": True, "scale_bits": 8}
    coder: ClassVar[NormalFloat] = NormalFloat()

    group_size: int = 64

    @property
    def scheme(self) -> Quantized:
        """See `WithoutCentre`."""
        return Quantized(bits=4, **{**self.codes_format, "group_size": self.group_size})
