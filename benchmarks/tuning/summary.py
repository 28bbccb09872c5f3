"""From runs to what tables, plots and findings say."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tuning.results import Results
from tuning.settings import Settings
from tuning.variants import Variant, variants


def runs(results: Results, part: str, text: str, name: str) -> dict[str, dict[str, Any]]:
    """By seed; empty if there are none."""
    return results.get(part, text, name) or {}


def losses(results: Results, part: str, text: str, name: str) -> dict[str, float]:
    """Held-out, by seed."""
    return {seed: run["loss"] for seed, run in runs(results, part, text, name).items()}


def difference(these: dict[str, float], those: dict[str, float]) -> list[float]:
    """What these have more than those, seed by seed: base and order of the text are then no part of the spread."""
    return [loss - those[seed] for seed, loss in these.items() if seed in those]


class Point(NamedTuple):
    """A variant on one text.

    Attributes:
      variant: what was tuned.
      active: trained parameters that a token meets.
      rate: the learning rate of all its runs.
      losses: held-out, by seed.
    """

    variant: Variant
    active: int
    rate: float
    losses: dict[str, float]

    @property
    def mean(self) -> float:
        return sum(self.losses.values()) / len(self.losses)


def points(results: Results, text: str) -> list[Point]:
    """All variants that were run on a text."""
    found = []
    for variant in variants(results.settings):
        by_seed = runs(results, "tuned", text, variant.name)
        if by_seed:
            run = next(iter(by_seed.values()))
            by_seed = losses(results, "tuned", text, variant.name)
            found.append(Point(variant, run["active_params"], run["learning_rate"], by_seed))
    return found


def curve(found: Sequence[Point], family: str, experts: int, settings: Settings) -> list[Point]:
    """A family by rank: of LoRA's shape, `experts` adapters, and of PERFT-R `settings.top_k` of them per token."""
    chosen = [
        point
        for point in found
        if (point.variant.family, point.variant.experts) == (family, experts)
        and not point.variant.parallel
        and point.variant.top_k in (None, settings.top_k)
    ]
    return sorted(chosen, key=lambda point: point.active)


class Crossing(NamedTuple):
    """A curve at a number of active parameters.

    Attributes:
      rates: learning rates of the points that it is read from.
      losses: by seed, linear in the logarithm of the active parameters.
    """

    rates: frozenset[float]
    losses: dict[str, float]


def at_equal_active(line: Sequence[Point], active: int) -> Crossing | None:
    """A curve at a number of active parameters; None outside of it."""
    for low, high in zip(line, line[1:], strict=False):
        if low.active <= active <= high.active:
            share = math.log(active / low.active) / math.log(high.active / low.active)
            rates = frozenset(point.rate for point, weight in ((low, 1 - share), (high, share)) if weight)
            common = low.losses.keys() & high.losses.keys()
            return Crossing(rates, {s: (1 - share) * low.losses[s] + share * high.losses[s] for s in sorted(common)})
    return None


class Comparison(NamedTuple):
    """One curve against points of another at equal active parameters and equal learning rates.

    Attributes:
      budgets: how many points of the other lie on the curve and were trained at the rate that it has there.
      left_out: how many lie on the curve, but were trained at another rate.
      won: at how many of the budgets the curve has the lower loss, as a mean over seeds.
      gains: by how much its loss is lower, the mean over the budgets, by seed; empty if there are none.
    """

    budgets: int
    left_out: int
    won: int
    gains: list[float]


def compare(line: Sequence[Point], others: Sequence[Point]) -> Comparison | None:
    """Compares where two curves overlap; None if they do not.

    Points of different learning rates are not compared: what the rate does would be counted as the method's.
    """
    by_budget, left_out = [], 0
    for other in others:
        here = at_equal_active(line, other.active)
        if here is None:
            continue
        gains = {seed: loss - here.losses[seed] for seed, loss in other.losses.items() if seed in here.losses}
        if here.rates != {other.rate}:
            left_out += 1
        elif gains:
            by_budget.append(gains)
    if not by_budget and not left_out:
        return None
    won = sum(sum(gains.values()) > 0 for gains in by_budget)
    seeds = set.intersection(*(set(gains) for gains in by_budget)) if by_budget else ()
    means = [sum(gains[seed] for gains in by_budget) / len(by_budget) for seed in sorted(seeds)]
    return Comparison(len(by_budget), left_out, won, means)
