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
      losses: held-out, by seed.
    """

    variant: Variant
    active: int
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
            active = next(iter(by_seed.values()))["active_params"]
            found.append(Point(variant, active, losses(results, "tuned", text, variant.name)))
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


def at_equal_active(line: Sequence[Point], active: int) -> dict[str, float] | None:
    """Losses by seed that a curve has at a number of active parameters, linear in its logarithm; None outside of it."""
    for low, high in zip(line, line[1:], strict=False):
        if low.active <= active <= high.active:
            share = math.log(active / low.active) / math.log(high.active / low.active)
            return {
                seed: (1 - share) * loss + share * high.losses[seed]
                for seed, loss in low.losses.items()
                if seed in high.losses
            }
    return None


class Comparison(NamedTuple):
    """One curve against points of another at equal active parameters.

    Attributes:
      budgets: how many points lie on the curve.
      won: at how many of them the curve has the lower loss, as a mean over seeds.
      gains: by how much its loss is lower, the mean over these budgets, by seed.
    """

    budgets: int
    won: int
    gains: list[float]


def compare(line: Sequence[Point], others: Sequence[Point]) -> Comparison | None:
    """Compares where they overlap; None if they do not."""
    by_budget = []
    for other in others:
        here = at_equal_active(line, other.active)
        if here:
            by_budget.append({seed: loss - here[seed] for seed, loss in other.losses.items() if seed in here})
    by_budget = [gains for gains in by_budget if gains]
    if not by_budget:
        return None
    won = sum(sum(gains.values()) > 0 for gains in by_budget)
    seeds = set.intersection(*(set(gains) for gains in by_budget))
    return Comparison(
        len(by_budget), won, [sum(gains[seed] for gains in by_budget) / len(by_budget) for seed in sorted(seeds)]
    )
