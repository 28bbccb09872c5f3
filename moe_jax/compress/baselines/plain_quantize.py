"""`quantize`: the experts themselves in codes of a few bits, what a user would try first."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from moe_jax.compress.baselines.without_centre import WithoutCentre
from moe_jax.compress.residual_forms import DEFAULT_GROUP_SIZE, Form
from moe_jax.compress.source_layer import SourceLayer
from moe_jax.compress.storage import QUANTIZED
from moe_jax.experts.config import BankConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainQuantize(WithoutCentre):
    """Every weight rounded to the nearest level; the scale of a group is the one of least squared error.

    Attributes:
      bits: of a code: 8, 4, 3, 2 or 1.
      group_size: entries along the input axis that share a scale; 0: the whole kernel.
    """

    swept: ClassVar[tuple[str, tuple[int, ...]]] = ("bits", (8, 4, 3, 2))
    forms: ClassVar[tuple[str, ...]] = QUANTIZED

    bits: int
    group_size: int = DEFAULT_GROUP_SIZE

    def __post_init__(self) -> None:
        self.form()
        self._bank()

    def form(self) -> Form:
        """See `WithoutCentre`."""
        return Form(residual="quantized", bits=self.bits)

    def bank(self, layer: SourceLayer, shares: Sequence[float] | None) -> BankConfig:
        """See `WithoutCentre`."""
        return self._bank()

    def _bank(self) -> BankConfig:
        return BankConfig(kind="quantized", base="none", bits=self.bits, group_size=self.group_size or None)
