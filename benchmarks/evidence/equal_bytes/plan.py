"""Which models are compared, and how often."""

import dataclasses

from evidence.equal_bytes.entries import (
    ALLOCATED,
    ALLOCATED_FITTED,
    AS_LARGE_AS_GPTQ,
    ENTRIES,
    GPTQ,
    RECOVERIES,
    ROUNDED_FACTORS,
    RTN,
    SHARED_FACTORS,
    SHARED_GPTQ,
    Entry,
)
from evidence.equal_bytes.models import Subject
from evidence.equal_bytes.study import Comparison
from evidence.studies.plan import AGAIN, BRANCHES, DRAWN, VANILLA
from evidence.studies.probes import Probes
from evidence.studies.scales import MIDDLE, SMOLLM, STORIES

_PROMPTS, _PROBES = Probes(questions=0, prompts=8), Probes(questions=64, prompts=8)
_RECOVERED = tuple(recovered for _, recovered in RECOVERIES)
_BITS = ("2 bits", "3 bits", "4 bits")
# Of larger models than stories260K an entry takes up to minutes: what says most.
_OF_LARGER_BY_FAMILY = {
    RTN: _BITS,
    GPTQ: _BITS,
    SHARED_GPTQ: ("4 + 1 bits", "4 + 2 bits", "4 + 3 bits", "3 + 1 bits"),
    ALLOCATED: ("1.25 bits", "1.5 bits", "1.75 bits", "2.5 bits", "3 bits"),
    SHARED_FACTORS: ("4 bits, keep 0.01", "4 bits, keep 0.04"),
    ROUNDED_FACTORS: ("4 bits, keep 0.01",),
    ALLOCATED_FITTED: ("2.5 bits",),
    "HC-SMoE": ("keep 0.5",),
    "REAP": ("keep 0.75",),
    "D2-MoE": ("keep 0.25",),
    "Wanda": ("keep 0.25",),
    "ResMoE": ("keep 0.25",),
    "GPTQ, fitted levels": ("3 bits",),
    "AWQ": ("3 bits",),
    "HQQ": ("3 bits",),
    "NF4": ("4 bits",),
    f"{GPTQ}, gradients": ("3 bits",),
    f"{SHARED_GPTQ}, gradients": ("4 + 1 bits", "4 + 2 bits"),
    f"{GPTQ}, row scales": ("3 bits",),
    f"{SHARED_GPTQ}, row scales": ("4 + 1 bits", "4 + 2 bits"),
}
# Hardly anything is lost there.
_OF_DRAWN_MIDDLE_BY_FAMILY = {RTN: _BITS, GPTQ: _BITS, SHARED_GPTQ: ("4 + 1 bits", "4 + 2 bits")}
_REPEATED_BY_FAMILY = {
    GPTQ: ("3 bits",),
    SHARED_GPTQ: ("4 + 1 bits", "4 + 2 bits"),
    SHARED_FACTORS: ("4 bits, keep 0.01",),
}
# Minutes each.
_QUESTIONED_BY_FAMILY = {
    GPTQ: ("2 bits", "3 bits"),
    SHARED_GPTQ: ("4 + 1 bits",),
    "HC-SMoE": ("keep 0.5",),
}
_AGAINST_GPTQ_BY_FAMILY = {GPTQ: _BITS, SHARED_GPTQ: ("4 + 1 bits", "4 + 2 bits")}
# What takes seconds.
_OF_SMALL_REPEATED_BY_FAMILY = {
    GPTQ: _BITS,
    SHARED_GPTQ: ("2 + 1 bits", "3 + 1 bits", "4 + 1 bits", "4 + 2 bits"),
    ALLOCATED: ("1.25 bits", "1.75 bits", "2.5 bits", "3 bits"),
    SHARED_FACTORS: ("4 bits, keep 0.01", "4 bits, keep 0.04"),
    ROUNDED_FACTORS: ("4 bits, keep 0.01",),
    ALLOCATED_FITTED: ("2.5 bits",),
    f"{GPTQ}, gradients": ("3 bits",),
    f"{SHARED_GPTQ}, gradients": ("4 + 1 bits", "4 + 2 bits"),
    f"{SHARED_GPTQ}, row scales": ("4 + 2 bits",),
    "HC-SMoE": ("keep 0.5",),
}
# Whose result depends on how neurons are ordered, unless they are aligned.
_ALIGNED_OR_NOT_BY_FAMILY = {
    RTN: _BITS,
    GPTQ: _BITS,
    SHARED_GPTQ: ("2 + 1 bits", "4 + 1 bits", "4 + 2 bits", "4 + 3 bits"),
    ALLOCATED: ("1.25 bits", "1.75 bits", "2.5 bits", "3 bits"),
    SHARED_FACTORS: ("4 bits, keep 0.01",),
    ALLOCATED_FITTED: ("1.75 bits", "2.5 bits", "3 bits"),
    "ResMoE": ("keep 0.25",),
    "SVD, whitened, joint": ("keep 0.25",),
    "D2-MoE": ("keep 0.25",),
    "REAP": ("keep 0.75",),
    "HC-SMoE": ("keep 0.5",),
    "M-SMoE": ("keep 0.5",),
}


def _named(by_family: dict[str, tuple[str, ...]]) -> tuple[Entry, ...]:
    known = {(entry.family, entry.name): entry for entry in ENTRIES}
    return tuple(known[family, name] for family, names in by_family.items() for name in names)


def _as_large_as_gptq(models: str) -> tuple[Entry, ...]:
    return _named({ALLOCATED: tuple(f"{size:g} bits" for size in AS_LARGE_AS_GPTQ[models])})


_AGAINST_GPTQ = _named(_AGAINST_GPTQ_BY_FAMILY)
_OF_LARGER, _REPEATED = _named(_OF_LARGER_BY_FAMILY), _named(_REPEATED_BY_FAMILY)
_OF_EIGHT, _OF_THREE, _OF_MIDDLE = map(_as_large_as_gptq, AS_LARGE_AS_GPTQ)
_OF_SMALL_REPEATED, _ALIGNED_OR_NOT = _named(_OF_SMALL_REPEATED_BY_FAMILY), _named(_ALIGNED_OR_NOT_BY_FAMILY)


def comparisons() -> list[Comparison]:
    """Models of one origin, the same with neurons in another order, of less in common, and of nothing."""
    upcycled = Subject(STORIES.name, f"{VANILLA}-s0")
    return [
        Comparison(
            upcycled,
            probes=_PROMPTS,
            entries=(*(entry for entry in ENTRIES if entry not in (*_OF_THREE, *_OF_MIDDLE)), *_RECOVERED),
            more_draws=_OF_SMALL_REPEATED,
        ),
        Comparison(dataclasses.replace(upcycled, permuted=True), entries=_ALIGNED_OR_NOT, more_draws=_REPEATED),
        # Experts from models of one domain each, which have less in common than copies of one. Of three, a centre
        # takes so much that nothing has 1.25 bits.
        Comparison(
            Subject(STORIES.name, f"{BRANCHES}-s0"),
            probes=_PROMPTS,
            entries=(*(entry for entry in _OF_LARGER if entry.name not in ("1.25 bits", "1.5 bits")), *_OF_THREE),
            more_draws=(*_AGAINST_GPTQ, *_OF_THREE),
        ),
        Comparison(
            Subject(STORIES.name, f"{DRAWN}-s0"),
            probes=_PROMPTS,
            entries=(*_OF_EIGHT, *_OF_LARGER),
            more_draws=(*_AGAINST_GPTQ, *_OF_EIGHT),
        ),
        Comparison(
            Subject(MIDDLE.name, f"{DRAWN}-s0"),
            draws=(0,),
            probes=_PROMPTS,
            entries=(*_OF_MIDDLE, *_named(_OF_DRAWN_MIDDLE_BY_FAMILY)),
        ),
        Comparison(
            Subject(SMOLLM.name, AGAIN),
            probes=_PROBES,
            questioned=_named(_QUESTIONED_BY_FAMILY),
            entries=_OF_LARGER,
        ),
        Comparison(Subject(SMOLLM.name, AGAIN, permuted=True), draws=(0,), entries=_REPEATED),
    ]
