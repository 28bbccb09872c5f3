"""Which models are compared, and how often."""

from evidence.equal_bytes.entries import (
    ALLOCATED,
    ALLOCATED_FITTED,
    ENTRIES,
    GPTQ,
    RECOVERIES,
    RTN,
    SHARED_GPTQ,
    Entry,
)
from evidence.equal_bytes.models import Subject
from evidence.equal_bytes.study import Comparison
from evidence.studies.plan import AGAIN, BRANCHES, DRAWN, VANILLA
from evidence.studies.probes import Probes
from evidence.studies.scales import MIDDLE, SMOLLM, STORIES

_PROMPTS, _PROBES = Probes(questions=0, prompts=8), Probes(questions=100, prompts=8)
_RECOVERED = tuple(entry for _, recovered in RECOVERIES for entry in recovered)
# Of larger models than stories260K an entry takes up to minutes: what says most, and of that the most important with
# further draws.
_BITS = ("2 bits", "3 bits", "4 bits")
_OF_LARGER_BY_FAMILY = {
    RTN: _BITS,
    GPTQ: _BITS,
    SHARED_GPTQ: ("4 + 1 bits", "4 + 2 bits", "4 + 3 bits", "3 + 1 bits", "3 + 2 bits"),
    ALLOCATED: ("2.5 bits", "1.75 bits", "3 bits"),
    ALLOCATED_FITTED: ("2.5 bits", "1.75 bits", "3 bits"),
    "GPTQ, fitted levels": ("3 bits",),
    f"{GPTQ}, row scales": ("2 bits", "3 bits"),
    f"{SHARED_GPTQ}, row scales": ("4 + 1 bits", "4 + 2 bits"),
    "AWQ": ("3 bits",),
    f"{GPTQ}, gradients": ("3 bits",),
    f"{SHARED_GPTQ}, gradients": ("4 + 1 bits", "4 + 2 bits"),
    f"{ALLOCATED}, gradients": ("2.5 bits",),
    "HQQ": ("3 bits",),
    "NF4": ("4 bits",),
    "ResMoE": ("keep 0.25",),
    "D2-MoE": ("keep 0.25",),
    "Wanda": ("keep 0.25",),
    "REAP": ("keep 0.75",),
    "HC-SMoE": ("keep 0.5",),
}
_REPEATED_BY_FAMILY = {GPTQ: ("3 bits",), SHARED_GPTQ: ("4 + 2 bits",), ALLOCATED_FITTED: ("2.5 bits",)}


def _named(by_family: dict[str, tuple[str, ...]]) -> tuple[Entry, ...]:
    known = {(entry.family, entry.name): entry for entry in ENTRIES}
    return tuple(known[family, name] for family, names in by_family.items() for name in names)


_OF_LARGER, _REPEATED = _named(_OF_LARGER_BY_FAMILY), _named(_REPEATED_BY_FAMILY)


def comparisons() -> list[Comparison]:
    """The models that `claims.py` keeps: of one origin, the same with neurons in another order, and of less."""
    return [
        Comparison(Subject(STORIES.name, f"{VANILLA}-s0"), entries=(*ENTRIES, *_RECOVERED)),
        Comparison(Subject(STORIES.name, f"{VANILLA}-s0", permuted=True)),
        # Experts from models of one domain each, which have less in common than copies of one.
        Comparison(Subject(STORIES.name, f"{BRANCHES}-s0")),
        *(
            Comparison(Subject(MIDDLE.name, f"{shape}-s0"), probes=_PROMPTS, entries=_OF_LARGER, more_draws=_REPEATED)
            for shape in (VANILLA, DRAWN)
        ),
        Comparison(Subject(SMOLLM.name, AGAIN), probes=_PROBES, entries=_OF_LARGER, more_draws=_REPEATED),
        Comparison(Subject(SMOLLM.name, AGAIN, permuted=True), draws=(0,), entries=_REPEATED),
    ]
