"""What is done to every model: data, so that a method more is a line more."""

import dataclasses
from collections.abc import Mapping
from typing import Any

# The share of the main table, and those of the curves.
MAIN_KEEP = 0.25
KEEPS = (0.05, 0.1, MAIN_KEEP, 0.5)
# Merged experts are whole: of 8 experts these shares leave 1, 2 and 4.
MERGED_KEEPS = (0.125, MAIN_KEEP, 0.5)
BITS = (8, 4, 3, 2, 1)

# ResMoE as it is now, and as its authors published it.
REFITTED, PUBLISHED = "ResMoE UP", "ResMoE UP, no refit"
RESMOE, BASELINE, PLAIN = FAMILIES = "ResMoE", "baseline", "plain quantisation"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method with its options, but for how much is kept.

    Attributes:
      family: `RESMOE`, `BASELINE` or `PLAIN`.
      method: a key of `moe_jax.compress.METHODS`.
      options: of the method.
      swept: the option that says how much is kept.
      values: of that option.
      curve: whether it is drawn over the kept share.
      refit_pair: the pair in the table of refits that it belongs to; None: to none.
      calibrated: whether the method is given the router's statistics on the text of the training.
    """

    family: str
    method: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    swept: str = "keep"
    values: tuple[float, ...] = (MAIN_KEEP,)
    curve: bool = False
    refit_pair: str | None = None
    calibrated: bool = False

    @property
    def main_value(self) -> float | None:
        """The value that keeps a quarter; None where bytes are chosen instead."""
        return {"keep": MAIN_KEEP, "bits": MAIN_KEEP * 16}.get(self.swept)


def _resmoe(values: tuple[float, ...] = (MAIN_KEEP,), **others: Any) -> Variant:
    fields = {field.name for field in dataclasses.fields(Variant)}
    own = {name: value for name, value in others.items() if name in fields}
    options = {name: value for name, value in others.items() if name not in fields}
    return Variant(RESMOE, "resmoe", options, values=values, **own)


_AVERAGE = {"solver": "identity"}

VARIANTS: dict[str, Variant] = {
    REFITTED: _resmoe(KEEPS, residual="up", curve=True, refit_pair="concat"),
    "ResMoE UP, separate": _resmoe(residual="up", design="separate", refit_pair="separate"),
    PUBLISHED: _resmoe(KEEPS, residual="up", refit=False, curve=True, refit_pair="concat"),
    "ResMoE UP, separate, no refit": _resmoe(residual="up", design="separate", refit=False, refit_pair="separate"),
    "average + UP": _resmoe(residual="up", refit_pair="concat, average as centre", **_AVERAGE),
    "average + UP, no refit": _resmoe(residual="up", refit=False, refit_pair="concat, average as centre", **_AVERAGE),
    "ResMoE SVD": _resmoe(KEEPS, residual="svd", curve=True),
    "ResMoE SVD, separate": _resmoe(residual="svd", design="separate"),
    "average + SVD": _resmoe(residual="svd", **_AVERAGE),
    "ResMoE quantized": _resmoe(BITS, residual="quantized", swept="bits"),
    "ResMoE UP, 8-bit values": _resmoe((MAIN_KEEP, 0.5), residual="up", bits=8),
    "ResMoE UP, 4-bit values": _resmoe((0.1, MAIN_KEEP, 0.5), residual="up", bits=4),
    # What plain quantisation takes for codes and scales.
    "ResMoE, budget": _resmoe((3.25, 4.25, 8.25), swept="budget_bits"),
    "UP": Variant(BASELINE, "up", values=KEEPS, curve=True),
    "UP, separate": Variant(BASELINE, "up", {"design": "separate"}),
    "UP, 8-bit values": Variant(BASELINE, "up", {"bits": 8}, values=(MAIN_KEEP, 0.5)),
    "UP, 4-bit values": Variant(BASELINE, "up", {"bits": 4}, values=(MAIN_KEEP, 0.5)),
    "SP": Variant(BASELINE, "sp", values=KEEPS, curve=True),
    "SP, separate": Variant(BASELINE, "sp", {"design": "separate"}),
    "SVD": Variant(BASELINE, "svd", values=KEEPS, curve=True),
    "SVD, separate": Variant(BASELINE, "svd", {"design": "separate"}),
    "M-SMoE": Variant(BASELINE, "msmoe", values=MERGED_KEEPS, curve=True, calibrated=True),
    "MEO": Variant(BASELINE, "meo", calibrated=True),
    "Git Re-Basin": Variant(BASELINE, "git-rebasin", calibrated=True),
    "MLP Fusion": Variant(BASELINE, "mlp-fusion", values=KEEPS, curve=True),
    "plain quantisation": Variant(PLAIN, "quantize", values=(8, 4, 3, 2), swept="bits"),
}


def values_for(variant: Variant, num_experts: int) -> tuple[float, ...]:
    """What is tried for models of so many experts: everything at 8, of the others only what the refit table shows."""
    if num_experts == 8:
        return variant.values
    return (MAIN_KEEP,) if variant.refit_pair else ()


def refit_pairs() -> dict[str, tuple[str, str]]:
    """Pairs of variants that differ in the refit alone: the one with it, and the one without."""
    pairs: dict[str, list[str]] = {}
    for name, variant in VARIANTS.items():
        if variant.refit_pair:
            pairs.setdefault(variant.refit_pair, []).append(name)
    return {pair: (refitted, published) for pair, (refitted, published) in pairs.items()}
