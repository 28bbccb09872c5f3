"""What is compared: data, so that a method more is a line more."""

import dataclasses
from typing import Any

COMPARISON = "equal bytes"
"""Key of the results."""
DRAWS = (0, 1, 2)
"""Of the calibration text."""
UNCOMPRESSED = "uncompressed"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method with all of its options.

    Attributes:
      family: of methods, one line of the picture.
      name: of the point.
      method: a key of `moe_jax.compress.METHODS`.
      options: of the method.
      calibrated: whether it is given a text; then it is done for every draw of that.
      dense: whether deltas are taken from the dense model.
    """

    family: str
    name: str
    method: str
    options: tuple[tuple[str, Any], ...]
    calibrated: bool = False
    dense: bool = False

    @property
    def label(self) -> str:
        """Key in the results."""
        return f"{self.family}, {self.name}"


def _entry(family: str, name: str, method: str, *, calibrated: bool = False, **options: Any) -> Entry:
    return Entry(family, name, method, tuple(options.items()), calibrated)


def _plain(family: str, *, calibrated: bool, **options: Any) -> list[Entry]:
    return [
        _entry(family, f"{bits} bits", "quantize", calibrated=calibrated, bits=bits, **options)
        for bits in (4, 3, 2, 8)
    ]


# Bits of the centre and of residuals, from 1.5 to 5 bits per weight of 8 experts.
_SHARED = ((4, 2), (4, 1), (3, 1), (3, 2), (4, 3), (2, 1), (8, 4))


def _shared(family: str, *, calibrated: bool, **options: Any) -> list[Entry]:
    return [
        _entry(
            family,
            f"{centre} + {residual} bits",
            "resmoe",
            calibrated=calibrated,
            residual=f"quantized:{residual}",
            centre_bits=str(centre),
            **options,
        )
        for centre, residual in _SHARED
    ]


def _kept(family: str, method: str, *keeps: float, calibrated: bool = False, **options: Any) -> list[Entry]:
    return [
        _entry(family, f"keep {keep:g}", method, calibrated=calibrated, keep=keep, **options) for keep in keeps
    ]


def _budgets(family: str, *budgets: float) -> list[Entry]:
    return [
        _entry(family, f"{budget:g} bits", "allocate", calibrated=True, budget_bits=budget) for budget in budgets
    ]


RTN, GPTQ = "rounding", "GPTQ"
SHARED_RTN, SHARED_GPTQ = "shared centre, rounding", "shared centre, GPTQ"
ALLOCATED = "allocated by layer"

ENTRIES: tuple[Entry, ...] = (
    *_plain(RTN, calibrated=False),
    *_plain(GPTQ, calibrated=True),
    *_shared(SHARED_RTN, calibrated=False),
    *_shared(SHARED_GPTQ, calibrated=True),
    *_budgets(ALLOCATED, 2.5, 1.75, 2.0, 3.0, 4.0),
    *_plain("weighed scales, no feedback", calibrated=True, feedback=False)[:3],
    *_kept("ResMoE", "resmoe", 0.25, 0.5, 0.1),
    *_kept("SVD, whitened", "svd", 0.25, 0.5, calibrated=True, design="separate"),
    *_kept("Wanda", "up", 0.25, 0.5, calibrated=True, design="separate"),
    *_kept("D2-MoE", "d2-moe", 0.25, 0.5, 0.1, calibrated=True),
    *_kept("REAP", "reap", 0.5, 0.75, calibrated=True),
    *_kept("HC-SMoE", "hc-smoe", 0.5, 0.75, 0.25, calibrated=True),
    *_kept("M-SMoE", "msmoe", 0.5, 0.25, calibrated=True),
)
