"""Plans of a compression tried on some rows of a text, and what is expected of plans corrected by that (methods.md 5).

Expected divergences are sums of what every matrix does alone and a little. Where many bits are saved they are too low,
and not by the same factor in all parts of a model. So the best expected plans are carried out, layer by layer, without
being written. Of every part p, a factor w_p is fitted to the measured divergences D of the plans, given the expected
ones E:

    min_w  sum_plans (sum_p w_p E_p / D - 1)^2 + sum_p (w_p / w - 1)^2,   w_p >= 0,  w = mean(D / sum_p E_p),

which for few plans stays near a common factor. One more plan is made by these factors, and tried.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.optimize

from moe_jax.compression.methods.interface import Plan
from moe_jax.files.json_toml import ANYTHING, read_json
from moe_jax.files.storage_path import as_path
from moe_jax.models import LinearCodes, MoEConfig

MOST_TOKENS = 8192
"""So many tokens of the text are enough to compare plans."""

MakePlans = Callable[..., list[Plan]]
"""`make_plans(factors=...)` returns plans, the best expected one first; by default none is corrected."""


class Tried(NamedTuple):
    """A plan, and the divergence of the model's predictions that was measured, nats per token."""

    plan: Plan
    measured: float

    @property
    def expected(self) -> float:
        """The divergence that was expected, nats per token."""
        return sum(self.plan.expected.values())


def best_plan(
    make_plans: MakePlans, measure: Callable[[Plan], float], most: int, *, kept: Path | None
) -> tuple[Plan, tuple[Tried, ...]]:
    """Tries the best expected plans, and one more, and returns the best measured one with all that were tried.

    Args:
      make_plans: makes plans.
      measure: carries out a plan, and returns the divergence.
      most: plans to try, before the one more.
      kept: a file that keeps measurements for an interrupted job; None: they are not kept.
    """
    known: dict[str, float] = {}
    if kept is not None and kept.is_file():
        known = {str(name): float(value) for name, value in read_json(kept, allow=ANYTHING).items()}

    def tried(plan: Plan) -> Tried:
        name = _name_of(plan)
        if name not in known:
            known[name] = measure(plan)
            if kept is not None:
                as_path(kept).replace_content(json.dumps(known).encode())
        return Tried(plan, known[name])

    found = [tried(plan) for plan in make_plans()[:most]]
    again = make_plans(factors=factors(found))[0]
    if _name_of(again) not in {_name_of(one.plan) for one in found}:
        found.append(tried(again))
    return min(found, key=lambda one: one.measured).plan, tuple(found)


def factors(tried: Sequence[Tried]) -> dict[str, float]:
    """Returns by how much the divergences of every part are more than expected, fitted to measured plans."""
    parts = list(dict.fromkeys(part for one in tried for part in one.plan.expected))
    told = [one for one in tried if one.measured > 0 and one.expected > 0]
    if not told or not parts:
        return dict.fromkeys(parts, 1.0)
    common = float(np.mean([one.measured / one.expected for one in told]))
    rows = [[one.plan.expected.get(part, 0.0) / one.measured for part in parts] for one in told]
    matrix = np.concatenate([np.array(rows), np.eye(len(parts)) / common])
    found, _ = scipy.optimize.nnls(matrix, np.ones(len(matrix)))
    return dict(zip(parts, found.tolist(), strict=True))


def _name_of(plan: Plan) -> str:
    banks: Iterable[tuple[int, MoEConfig]] = sorted(plan.banks.items())
    codes: Iterable[tuple[str, LinearCodes]] = sorted(plan.codes.items())
    return hashlib.sha256(repr([(i, moe.bank.to_json()) for i, moe in banks] + [*codes]).encode()).hexdigest()
