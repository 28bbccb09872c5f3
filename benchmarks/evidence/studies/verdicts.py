"""Effects over seeds or windows of text, with intervals, and what they say about a claim (SciPy)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from scipy import stats

AGREES, SMALL, OPPOSITE, UNDECIDED = "agrees", "too small to matter", "opposite", "undecided"
_CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Effect:
    """A difference of means over paired seeds, or over the same windows of text.

    Attributes:
      mean: of the differences.
      low, high: ends of its 95 % interval (Student's t).
      count: of pairs.
      over: what they are: seeds, or windows that a single model was scored with.
    """

    mean: float
    low: float
    high: float
    count: int
    over: str = "seeds"

    def __str__(self) -> str:
        if not math.isfinite(self.low):
            return f"{self.mean:+.4f} (1 seed)"
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def effect(differences: Sequence[float]) -> Effect | None:
    """The mean of differences and its interval, infinite for a single one; None of none."""
    count = len(differences)
    if not count:
        return None
    mean = sum(differences) / count
    if count == 1:
        return Effect(mean, -math.inf, math.inf, count)
    error = stats.sem(differences)
    if error == 0:
        return Effect(mean, mean, mean, count)
    low, high = stats.t.interval(_CONFIDENCE, count - 1, loc=mean, scale=error)
    return Effect(mean, float(low), float(high), count)


def discoveries(found: Sequence[Effect], rate: float = 0.05) -> list[bool]:
    """Which effects differ from 0 at a false-discovery rate over all of them (Benjamini and Hochberg 1995).

    One of a single pair is none.
    """
    chances = [chance_of(one) for one in found]
    return [bool(adjusted <= rate) for adjusted in stats.false_discovery_control(chances)] if found else []


def chance_of(found: Effect) -> float:
    """The chance of a mean as far from 0 as this one where there is no effect (Student's t, both sides)."""
    if not math.isfinite(found.low):
        return 1.0
    error = (found.high - found.low) / 2 / stats.t.ppf((1 + _CONFIDENCE) / 2, found.count - 1)
    if error == 0:
        return 0.0 if found.mean else 1.0
    return float(2 * stats.t.sf(abs(found.mean) / error, found.count - 1))


def paired(these: Mapping[str, float], those: Mapping[str, float]) -> list[float]:
    """What these have more than those, seed by seed: start and order of the text are then no part of the spread."""
    return [value - those[seed] for seed, value in these.items() if seed in those]


def better(found: Effect, least: float) -> str:
    """Whether something is lower than something else, by what matters.

    Args:
      found: its loss less the other's.
      least: the smallest effect of interest, above 0.

    Returns:
      `agrees` if the interval lies below 0 and the mean at `-least` or below; `opposite` if that is so with the signs
      changed; `too small to matter` if the interval lies within `least` of 0; else `undecided`.
    """
    if found.high < 0 and found.mean <= -least:
        return AGREES
    if found.low > 0 and found.mean >= least:
        return OPPOSITE
    return SMALL if -least < found.low and found.high < least else UNDECIDED


def equal(found: Effect, least: float) -> str:
    """Whether two things are as good as each other: `agrees` if the interval lies within `least` of 0, `opposite` if
    one of them is `better`."""
    found_better = better(found, least)
    if found_better == SMALL:
        return AGREES
    return UNDECIDED if found_better == UNDECIDED else OPPOSITE


def no_worse(found: Effect, least: float) -> str:
    """Whether something is not worse than something else by what matters: `agrees` if the interval lies below
    `least`, `opposite` if the other is `better`."""
    if found.high < least:
        return AGREES
    return OPPOSITE if better(found, least) == OPPOSITE else UNDECIDED
