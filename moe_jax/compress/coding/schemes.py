"""Forms of a residual, and the banks that store them (METHODS 5).

Without a centre the experts themselves are stored in these forms: those are baselines.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from moe_jax.compress.coding.pruning import common_counts, kept_entries
from moe_jax.errors import InputError, check_member
from moe_jax.experts.config import BITS, VALUE_BITS, BankConfig, FFNConfig
from moe_jax.experts.places import fewest_bytes_places

DEFAULT_GROUP_SIZE = 128
"""Codes that share a scale."""

RESIDUALS = ("up", "svd", "quantized")
DESIGNS = ("concat", "separate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """One form.

    Attributes:
      residual: `up`: the largest entries; `svd`: low-rank factors; `quantized`: all entries in a few bits.
      keep: share of the entries that stay, of low-rank factors the numbers that are stored; None for `quantized`.
      bits: of all entries, or of those that stay; None: these are floats.
      design: `concat`: one threshold, or one factorisation, for the whole design matrix of an expert; `separate`: one
        for each matrix.
      refit: the centre is refitted to what is pruned.
    """

    residual: Literal["up", "svd", "quantized"]
    keep: float | None = None
    bits: int | None = None
    design: Literal["concat", "separate"] = "concat"
    refit: bool = True

    def __post_init__(self) -> None:
        check_member("residual", self.residual, RESIDUALS)
        check_member("design", self.design, DESIGNS)
        if self.residual == "quantized":
            if self.keep is not None:
                raise InputError(
                    "keep does not go with a quantized residual, of which every entry stays: give bits"
                )
            if self.bits not in BITS:
                raise InputError(f"bits={self.bits} must be one of {', '.join(map(str, BITS))}")
            return
        check_keep(self.keep)
        if self.bits is not None and self.residual == "svd":
            raise InputError("bits do not go with an svd residual: its factors are floats")
        if self.bits is not None and self.bits not in VALUE_BITS:
            raise InputError(f"bits={self.bits} of kept entries must be one of {', '.join(map(str, VALUE_BITS))}")

    @property
    def needs_shares(self) -> bool:
        """Whether the bank depends on where the largest entries are."""
        return self.residual == "up" and self.design == "concat"

    def bank(
        self, expert: FFNConfig, d_model: int, *, base: Literal["shared", "none"], shares: Sequence[float] | None
    ) -> BankConfig:
        """The bank of a layer.

        Args:
          expert: its FFN.
          d_model: d.
          base: whether there is a centre.
          shares: of each matrix in the entries that stay, if `needs_shares`.
        """
        shapes = expert.shapes(d_model)
        if self.residual == "quantized":
            return BankConfig(kind="quantized", base=base, bits=self.bits, group_size=DEFAULT_GROUP_SIZE)
        assert self.keep is not None
        if self.residual == "svd" and self.design == "concat":
            rank = min(joint_rank(self.keep, expert, d_model), expert.dim, len(shapes) * d_model)
            return BankConfig(kind="joint-low-rank", base=base, rank=rank)
        if self.residual == "svd":
            return BankConfig(kind="low-rank", base=base, rank=separate_rank(self.keep, expert, d_model))
        sizes = [math.prod(shape) for shape in shapes.values()]
        if self.needs_shares:
            assert shares is not None
            counts = common_counts(shares, sizes, self.keep)
        else:
            counts = tuple(kept_entries(size, self.keep) for size in sizes)
        return BankConfig(
            kind="sparse",
            base=base,
            rate=1 - self.keep,
            entries=counts,
            places=fewest_bytes_places(shapes.values(), counts),
            bits=self.bits,
            group_size=None if self.bits is None else DEFAULT_GROUP_SIZE,
        )


def describe_bank(bank: BankConfig) -> str:
    """The form that a bank has, in words."""
    if bank.kind == "quantized":
        return f"quantized, {bank.bits} bits"
    if bank.kind == "sparse":
        assert bank.rate is not None
        values = "" if bank.bits is None else f", {bank.bits}-bit values"
        return f"up, keep {1 - bank.rate:.4g}{values}, {bank.places}"
    return f"svd, rank {bank.rank}"


def check_keep(keep: float | None) -> None:
    """Raises `InputError` unless `keep` is a share."""
    if keep is None:
        raise InputError("keep is missing: the share of the experts that stays, in (0, 1]")
    if not 0.0 < keep <= 1.0:
        raise InputError(f"keep={keep:g} must lie in (0, 1]: it is the share of the experts that stays")


def joint_rank(keep: float, expert: FFNConfig, d_model: int) -> int:
    """Rank of a design matrix [f, m d] that keeps as many numbers as a share of its entries: METHODS 5, SVD."""
    f, width = expert.dim, len(expert.matrices) * d_model
    return max(1, int(keep * f * width / (f + width)))


def separate_rank(keep: float, expert: FFNConfig, d_model: int) -> int:
    """The same of each kernel [d, f] on its own."""
    return max(1, int(keep * expert.dim * d_model / (expert.dim + d_model)))
