"""The schemes in which residuals, or experts themselves, are coded, and the banks that store them (methods.md 5)."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, get_args

from moe_jax.compression.coding.pruning import common_counts, kept_entries
from moe_jax.core.errors import InputError, check_member
from moe_jax.experts import BankConfig, FFNConfig, forms
from moe_jax.experts.forms.positions import smallest_encoding
from moe_jax.experts.forms.sparse import VALUE_BITS

DEFAULT_GROUP_SIZE = 128
"""Codes that share a scale."""

DESIGNS = ("concat", "separate")


Design = Literal["concat", "separate"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruned:
    """The entries of largest absolute value.

    Attributes:
      keep: share of the entries that stays, in (0, 1].
      bits: of their values; None: floats.
      design: `concat`: one threshold for the whole design matrix of an expert; `separate`: one for each matrix.
    """

    keep: float
    bits: int | None = None
    design: Design = "concat"

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_member("design", self.design, DESIGNS)
        if self.bits is not None and self.bits not in VALUE_BITS:
            raise InputError(f"bits={self.bits} of kept entries must be one of {', '.join(map(str, VALUE_BITS))}")

    @property
    def needs_shares(self) -> bool:
        """Whether the bank depends on where the largest entries are."""
        return self.design == "concat"

    def counts(self, sizes: Sequence[int], shares: Sequence[float] | None) -> tuple[int, ...]:
        """Entries that stay of each matrix.

        Args:
          sizes: entries of each.
          shares: of each in the entries that stay, if `needs_shares`.
        """
        if not self.needs_shares:
            return tuple(kept_entries(size, self.keep) for size in sizes)
        assert shares is not None
        return common_counts(shares, sizes, self.keep)

    def bank(
        self, expert: FFNConfig, d_model: int, *, base: Literal["shared", "none"], shares: Sequence[float] | None = None
    ) -> BankConfig:
        """The bank of a layer.

        Args:
          expert: its FFN.
          d_model: d.
          base: whether there is a centre.
          shares: see `counts`.
        """
        shapes = expert.shapes(d_model)
        counts = self.counts([math.prod(shape) for shape in shapes.values()], shares)
        form = forms.Sparse(
            rate=1 - self.keep,
            entries=counts,
            encoding=smallest_encoding(shapes.values(), counts),
            bits=self.bits,
            group_size=None if self.bits is None else DEFAULT_GROUP_SIZE,
        )
        return BankConfig(form, base=base)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank:
    """Truncated singular value decompositions.

    Attributes:
      keep: share of the numbers that are stored, in (0, 1]; the ranks follow.
      design: `concat`: of the whole design matrix of an expert, whose factor over the neurons is stored once;
        `separate`: of each matrix.
    """

    keep: float
    design: Design = "concat"

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_member("design", self.design, DESIGNS)

    @property
    def needs_shares(self) -> bool:
        """See `Pruned`."""
        return False

    def rank(self, expert: FFNConfig, d_model: int) -> int:
        """r, with as many numbers as that share of entries: of [f, m d] for m matrices, or of [d, f] (methods.md 5)."""
        matrices = len(expert.matrices) if self.design == "concat" else 1
        f, width = expert.dim, matrices * d_model
        return min(max(1, int(self.keep * f * width / (f + width))), f, width)

    def bank(
        self, expert: FFNConfig, d_model: int, *, base: Literal["shared", "none"], shares: Sequence[float] | None = None
    ) -> BankConfig:
        """See `Pruned`."""
        form = forms.JointLowRank if self.design == "concat" else forms.LowRank
        return BankConfig(form(rank=self.rank(expert, d_model)), base=base)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
    """All entries in a few bits.

    Attributes:
      bits: of a code: 8, 4, 3, 2 or 1.
      group_size: entries along the input axis that share a scale, a multiple of 8; None: the whole kernel.
      table: every kernel has a table of levels that is fitted to it; for 4, 3 or 2 bits.
      scale_bits: of a scale: 16, or 8.
      zero_points: groups have zero points.
      row_scales: rows have scales, too.
    """

    bits: int
    group_size: int | None = DEFAULT_GROUP_SIZE
    table: bool = False
    scale_bits: int = 16
    zero_points: bool = False
    row_scales: bool = False

    def __post_init__(self) -> None:
        self._bank("shared")  # checks them

    @property
    def needs_shares(self) -> bool:
        """See `Pruned`."""
        return False

    def bank(
        self, expert: FFNConfig, d_model: int, *, base: Literal["shared", "none"], shares: Sequence[float] | None = None
    ) -> BankConfig:
        """See `Pruned`."""
        return self._bank(base)

    def _bank(self, base: Literal["shared", "none"]) -> BankConfig:
        return BankConfig(forms.Quantized(**dataclasses.asdict(self)), base=base)


Scheme = Pruned | LowRank | Quantized

SCHEMES: dict[str, type[Scheme]] = {"up": Pruned, "svd": LowRank, "quantized": Quantized}
"""By the names that the residuals of ResMoE have."""


Levels = Literal["any", "even", "fitted"]
LEVELS: tuple[str, ...] = get_args(Levels)
"""Of codes: of every group the better of two grids, always the one with a zero, or a table fitted to every kernel."""


def check_levels(levels: str, bits: int, *, zero_points: bool = False) -> None:
    """Raises `InputError` if codes of so many bits have no such levels."""
    check_member("levels", levels, LEVELS)
    if bits == 1 and levels == "even":
        raise InputError("levels=even: one bit has no zero; choose 2 bits or more")
    if zero_points and levels != "any":
        raise InputError(f"levels={levels} do not go with zero points, which say where levels lie")


def check_keep(keep: float | None) -> None:
    """Raises `InputError` unless `keep` is a share."""
    if keep is None:
        raise InputError("keep is missing: the share of the experts that stays, in (0, 1]")
    if not 0.0 < keep <= 1.0:
        raise InputError(f"keep={keep:g} must lie in (0, 1]: it is the share of the experts that stays")
