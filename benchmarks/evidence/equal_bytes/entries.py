"""What is compared: data, so that a method more is a line more."""

import dataclasses
from typing import Any

COMPARISON = "equal bytes"
"""Key of the results."""
DRAWS = (0, 1, 2)
"""Of the calibration text."""
UNCOMPRESSED = "uncompressed"
ALLOCATE = "allocate"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method with all of its options.

    Attributes:
      family: of methods, one line of the picture.
      name: of the point.
      method: a key of `moe_jax.compression.METHODS`.
      options: of the method.
      calibrated: whether it is given a text; then it is done for every draw of that.
      gradients: whether tokens of that text count by the gradients of its loss.
      dense: whether deltas are taken from the dense model.
      recovered: whether routers and norms then learn for some steps.
    """

    family: str
    name: str
    method: str
    options: tuple[tuple[str, Any], ...]
    calibrated: bool = False
    gradients: bool = False
    dense: bool = False
    recovered: bool = False

    @property
    def label(self) -> str:
        """Key in the results."""
        return f"{self.family}, {self.name}"


def _entry(
    family: str, name: str, method: str, *, calibrated: bool = False, gradients: bool = False, **options: Any
) -> Entry:
    return Entry(family, name, method, tuple(options.items()), calibrated or gradients, gradients)


def _plain(family: str, *, calibrated: bool, **options: Any) -> list[Entry]:
    return [
        _entry(family, f"{bits} bits", "quantize", calibrated=calibrated, bits=bits, **options) for bits in (4, 3, 2, 8)
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
    return [_entry(family, f"keep {keep:g}", method, calibrated=calibrated, keep=keep, **options) for keep in keeps]


def _budgets(family: str, *budgets: float, **options: Any) -> list[Entry]:
    return [
        _entry(family, f"{budget:g} bits", ALLOCATE, calibrated=True, budget_bits=budget, **options)
        for budget in budgets
    ]


def _steps(residual: int) -> list[tuple[str, Entry]]:
    """One gain after another, around a centre of 4 bits but for the first."""
    quantized = {"residual": f"quantized:{residual}"}

    def shared(family: str, *, calibrated: bool = True, **options: Any) -> Entry:
        given = {**quantized, "centre_bits": "4", **options}
        return _entry(family, f"4 + {residual} bits", "resmoe", calibrated=calibrated, **given)

    # One bit has two levels, whatever they are.
    fitted = [
        ("fitted levels, rounded", shared("fitted levels, rounded", calibrated=False, levels="fitted")),
        ("fitted levels, feedback", shared("fitted levels, GPTQ", levels="fitted")),
        ("and scales in 8 bits", shared("fitted levels, GPTQ, 8-bit scales", levels="fitted", scale_bits=8)),
    ]
    return [
        (
            "a centre in bfloat16, rounded",
            _entry("a centre in bfloat16", f"16 + {residual} bits", "resmoe", **quantized),
        ),
        ("the centre in 4 bits", shared(SHARED_RTN, calibrated=False)),
        ("scales weighed by a text", shared("weighed scales around a centre", feedback=False)),
        ("feedback", shared(SHARED_GPTQ)),
        *(fitted if residual > 1 else ()),
    ]


def _factored(family: str, *asked: tuple[int, float], **options: Any) -> list[Entry]:
    return [
        _entry(
            family,
            f"{centre} bits, keep {keep:g}",
            "resmoe",
            calibrated=True,
            residual="svd",
            keep=keep,
            centre_bits=str(centre),
            **options,
        )
        for centre, keep in asked
    ]


def _steps_of_factors() -> list[tuple[str, Entry]]:
    """Factors do not make up for the error of the centre's codes, so that feedback belongs there."""
    (rounded,) = _factored(ROUNDED_FACTORS, (4, 0.01), feedback=False)
    return [("the centre in 4 bits, rounded", rounded), ("feedback", _factored(SHARED_FACTORS, (4, 0.01))[0])]


def _recoveries() -> list[tuple[Entry, Entry]]:
    """What loses much, and the same once routers and norms have learnt the logits of the model before."""
    losing = (
        *_plain(GPTQ, calibrated=True)[2:3],
        *_kept("HC-SMoE", "hc-smoe", 0.5, calibrated=True),
    )
    return [(entry, dataclasses.replace(entry, name=f"{entry.name}, recovered", recovered=True)) for entry in losing]


RTN, GPTQ = "rounding", "GPTQ"
SHARED_RTN, SHARED_GPTQ = "shared centre, rounding", "shared centre, GPTQ"
SHARED_FACTORS = "shared centre, low ranks"
ROUNDED_FACTORS = "low ranks around a rounded centre"
ALLOCATED = "allocated"
ALLOCATED_FITTED = "allocated, fitted levels"
AS_LARGE_AS_GPTQ = {
    "stories260K, 8 experts": (2.28, 3.29, 4.28),
    "stories260K, 3 experts": (2.36, 3.37, 4.36),
    "middle": (2.15, 3.15, 4.15),
}
"""Budgets into which codes of 2, 3 and 4 bits for all just fit, each file counted as large as it may be."""
ALLOCATED_BY_EXPERT = "allocated, bits by expert"
ALLOCATED_BY_FORMAT = "allocated, row scales and zero points"

ABLATIONS = {"2 bits": _steps(2), "1 bits": _steps(1), "low ranks": _steps_of_factors()}
"""By what residuals are stored in: steps of the method in words, and their entries."""
OURS = frozenset(
    name
    for base in (
        *(SHARED_RTN, SHARED_GPTQ, SHARED_FACTORS),
        *(ALLOCATED, ALLOCATED_FITTED, ALLOCATED_BY_EXPERT, ALLOCATED_BY_FORMAT),
    )
    for name in (base, f"{base}, gradients", f"{base}, row scales")
) | {entry.family for steps in ABLATIONS.values() for _, entry in steps}
"""Families with residuals around a shared centre in codes, or with the choice of one."""
RECOVERIES = _recoveries()
"""Entries, and the same recovered. Done on one model."""

ENTRIES: tuple[Entry, ...] = (
    *_plain(RTN, calibrated=False),
    *_plain(GPTQ, calibrated=True),
    *_shared(SHARED_RTN, calibrated=False),
    *_shared(SHARED_GPTQ, calibrated=True),
    *_budgets(ALLOCATED, 2.5, 1.75, 1.25, 1.5, 2.0, 3.0, 4.0),
    *_budgets(ALLOCATED, *(size for sizes in AS_LARGE_AS_GPTQ.values() for size in sizes)),
    *_budgets(ALLOCATED_FITTED, 2.5, 1.75, 1.25, 2.0, 3.0, 4.0, levels="fitted", scale_bits=8),
    *_budgets(ALLOCATED_BY_EXPERT, 2.5, 1.75, 3.0, experts="own"),
    *_budgets(ALLOCATED_BY_FORMAT, 2.5, 1.75, 3.0, row_scales=True, zero_points=True),
    *_budgets(f"{ALLOCATED}, gradients", 2.5, 1.75, 3.0, gradients=True),
    *_plain(f"{GPTQ}, gradients", calibrated=True, gradients=True)[:3],
    *_shared(f"{SHARED_GPTQ}, gradients", calibrated=True, gradients=True)[:4],
    *_plain("GPTQ, fitted levels", calibrated=True, levels="fitted", scale_bits=8)[:3],
    *_plain(f"{GPTQ}, row scales", calibrated=True, row_scales=True)[:3],
    *_plain("AWQ", calibrated=True, feedback=False, row_scales=True)[:3],
    *_shared(f"{SHARED_GPTQ}, row scales", calibrated=True, row_scales=True)[:4],
    *(_entry("HQQ", f"{bits} bits", "hqq", bits=bits) for bits in (4, 3, 2)),
    _entry("NF4", "4 bits", "nf4"),
    *_plain("weighed scales, no feedback", calibrated=True, feedback=False)[:3],
    *_kept("ResMoE", "resmoe", 0.25, 0.5, 0.1),
    *_kept("SVD, whitened", "svd", 0.25, 0.5, calibrated=True, design="separate"),
    *_kept("SVD, whitened, joint", "svd", 0.25, 0.5, calibrated=True, design="concat"),
    *_kept("Wanda", "up", 0.25, 0.5, calibrated=True, design="separate"),
    *_kept("MoBE", "mobe", 0.5, 0.25),
    *_kept("D2-MoE", "d2-moe", 0.25, 0.5, 0.1, calibrated=True),
    *_kept("REAP", "reap", 0.5, 0.75, calibrated=True),
    *_kept("HC-SMoE", "hc-smoe", 0.5, 0.75, 0.25, calibrated=True),
    *_kept("M-SMoE", "msmoe", 0.5, 0.25, calibrated=True),
    *_factored(SHARED_FACTORS, (4, 0.01), (4, 0.04), (4, 0.1), (8, 0.01)),
    # What is there already is not done twice.
    *(
        entry
        for steps in ABLATIONS.values()
        for _, entry in steps
        if entry.family not in (SHARED_RTN, SHARED_GPTQ, SHARED_FACTORS)
    ),
)
