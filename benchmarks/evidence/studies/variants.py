"""What is done to kept models: data, so that a method more is a line more."""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Keys of the studies in the results, and of a model as it is.
COMPRESSION, NOISE = "compression", "noise of deltas"
UNCOMPRESSED = "uncompressed"
# In place of a method: every expert becomes the base.
NO_DELTAS = "no deltas"
# The share of the main table, and those of the curves.
MAIN_KEEP = 0.25
KEEPS = (MAIN_KEEP, 0.1, 0.5)
# Merged experts are whole: of 8 experts these shares leave 2, 1 and 4.
MERGED_KEEPS = (MAIN_KEEP, 0.125, 0.5)
BITS = (4, 8, 3, 2, 1)
DROPS = (0.9, 0.2, 0.4, 0.6, 0.8, 0.95, 0.99)
DERS_BITS = (2, 8, 4, 1)

DERS, RESMOE, BASELINE, PLAIN = FAMILIES = "DeRS", "ResMoE", "baseline", "plain quantisation"
# The neurons of every expert are put into an order of its own first: the model computes the same, but experts of one
# origin no longer lie alike.
PERMUTED = "permuted experts"
# ResMoE as it is now, and as its authors published it.
REFITTED, PUBLISHED = "ResMoE UP", "ResMoE UP, no refit"
DENSE_BASE, MEAN_BASE = "over the dense model", "over the mean"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method with its options, but for how much is kept.

    Attributes:
      family: one of `FAMILIES`, or `PERMUTED`.
      method: a key of `moe_jax.compression.METHODS`, or `NO_DELTAS`.
      options: of the method.
      swept: the option that says how much is kept; empty: there is none.
      values: of that option, the one of the main table first.
      dense: whether deltas are taken from the dense model.
      random: whether the method takes a seed.
      calibrated: whether it is given the router's statistics on the text of the training.
    """

    family: str
    method: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    swept: str = "keep"
    values: tuple[float, ...] = (MAIN_KEEP,)
    dense: bool = False
    random: bool = False
    calibrated: bool = False

    def options_of(self, value: float, seed: int) -> tuple[tuple[str, Any], ...]:
        """All options, for a value of the swept one and the seed of a model."""
        swept = {self.swept: value} if self.swept else {}
        return tuple({**self.options, **swept, **({"seed": seed} if self.random else {})}.items())


def _ders(base: str) -> dict[str, Variant]:
    dense = base == DENSE_BASE
    random, largest = ({"keep": keep} for keep in ("random", "magnitude"))
    return {
        f"quantised deltas {base}": Variant(DERS, "ders-quantize", {}, "bits", DERS_BITS, dense=dense),
        f"random drops {base}": Variant(DERS, "ders-sparsify", random, "drop", DROPS, dense=dense, random=True),
        f"largest kept {base}": Variant(DERS, "ders-sparsify", largest, "drop", DROPS, dense=dense),
        f"no deltas {base}": Variant(DERS, NO_DELTAS, {}, "", (0,), dense=dense),
    }


def _resmoe(*values: float, swept: str = "keep", **options: Any) -> Variant:
    return Variant(RESMOE, "resmoe", options, swept, values or (MAIN_KEEP,))


_AVERAGE = {"solver": "identity"}

VARIANTS: dict[str, Variant] = {
    **_ders(DENSE_BASE),
    **_ders(MEAN_BASE),
    "plain quantisation": Variant(PLAIN, "quantize", {}, "bits", (4, 8, 3, 2)),
    REFITTED: _resmoe(*KEEPS, residual="up"),
    PUBLISHED: _resmoe(*KEEPS, residual="up", refit=False),
    "UP": Variant(BASELINE, "up", values=KEEPS),
    "SP": Variant(BASELINE, "sp", values=KEEPS),
    "SVD": Variant(BASELINE, "svd", values=KEEPS),
    "M-SMoE": Variant(BASELINE, "msmoe", values=MERGED_KEEPS, calibrated=True),
    "MEO": Variant(BASELINE, "meo", calibrated=True),
    "Git Re-Basin": Variant(BASELINE, "git-rebasin", calibrated=True),
    "MLP Fusion": Variant(BASELINE, "mlp-fusion", values=KEEPS),
    "ResMoE SVD": _resmoe(*KEEPS, residual="svd"),
    "ResMoE quantized": _resmoe(*BITS, residual="quantized", swept="bits"),
    # What plain quantisation takes at least, for codes and for the scales of groups of 128.
    "ResMoE, budget": _resmoe(4.125, 3.125, 8.125, swept="budget_bits"),
    "average + UP": _resmoe(residual="up", **_AVERAGE),
    "average + UP, no refit": _resmoe(residual="up", refit=False, **_AVERAGE),
    "average + SVD": _resmoe(residual="svd", **_AVERAGE),
    "ResMoE UP, separate": _resmoe(residual="up", design="separate"),
    "ResMoE UP, separate, no refit": _resmoe(residual="up", design="separate", refit=False),
    "ResMoE SVD, separate": _resmoe(residual="svd", design="separate"),
    "ResMoE UP, 8-bit values": _resmoe(MAIN_KEEP, 0.5, residual="up", bits=8),
    "ResMoE UP, 4-bit values": _resmoe(MAIN_KEEP, 0.1, 0.5, residual="up", bits=4),
    "UP, separate": Variant(BASELINE, "up", {"design": "separate"}),
    "UP, 8-bit values": Variant(BASELINE, "up", {"bits": 8}, values=(MAIN_KEEP, 0.5)),
    "UP, 4-bit values": Variant(BASELINE, "up", {"bits": 4}, values=(MAIN_KEEP, 0.5)),
    "SP, separate": Variant(BASELINE, "sp", {"design": "separate"}),
    "SVD, separate": Variant(BASELINE, "svd", {"design": "separate"}),
    **{
        f"{name} of {PERMUTED}": Variant(PERMUTED, "resmoe", {"residual": "up", **options})
        for name, options in {REFITTED: {}, "average + UP": _AVERAGE}.items()
    },
}
# Pairs that differ in the refit alone: the one with it, and the one without.
REFIT_PAIRS = tuple((name, f"{name}, no refit") for name in VARIANTS if f"{name}, no refit" in VARIANTS)
# Likewise the order of neurons: the one with that of the model, and the one with another.
PERMUTED_PAIRS = tuple((name, f"{name} of {PERMUTED}") for name in VARIANTS if f"{name} of {PERMUTED}" in VARIANTS)


def label(name: str, value: float) -> str:
    """A variant and the value of its swept option: `ResMoE UP, keep 0.25`."""
    swept = VARIANTS[name].swept
    return f"{name}, {swept.replace('_', ' ')} {value:g}" if swept else name


Chosen = Mapping[str, tuple[float, ...]]
"""Names of variants, and the values of each."""


def chosen(*families: str, dense: bool = True, most: int | None = None) -> dict[str, tuple[float, ...]]:
    """All variants of families, with the first values of each.

    Args:
      families: of `FAMILIES`.
      dense: whether there is a dense model to take deltas from.
      most: values of a variant; None: all.
    """
    return {
        name: variant.values[:most]
        for name, variant in VARIANTS.items()
        if variant.family in families and (dense or not variant.dense)
    }
