"""Plans are measured, and what is expected of their parts is corrected by that."""

import json
from types import MappingProxyType

import pytest

from moe_jax.compression.measured_plans import Tried, best_plan, factors
from moe_jax.compression.methods.interface import Plan


def plan(**expected: float) -> Plan:
    return Plan(banks={}, codes={str(expected): None}, expected=expected)  # type: ignore[dict-item]


def test_one_plan_gives_a_common_factor():
    found = factors([Tried(plan(experts=0.1, attention=0.3), 0.8)])
    assert found == pytest.approx({"experts": 2.0, "attention": 2.0})


def test_factors_follow_the_part_that_is_underestimated():
    tried = [Tried(plan(experts=a, attention=b), 8 * a + 2 * b) for a, b in ((0.1, 0.4), (0.4, 0.1), (0.25, 0.25))]
    found = factors(tried)
    assert 8 >= found["experts"] > 1.3 * found["attention"]
    assert factors([]) == {} and factors([Tried(plan(experts=0.0), 0.0)]) == {"experts": 1.0}


def test_the_best_measured_plan_is_taken_and_nothing_is_measured_twice(tmp_path):
    measured = {"a": 0.5, "b": 0.3, "c": 0.2}
    plans = {name: plan(experts=0.1 + i, **{name: 0.0}) for i, name in enumerate(measured)}
    by_plan = {str(one.codes): name for name, one in plans.items()}
    asked, kept = [], tmp_path / "plans.json"

    def measure(one):
        asked.append(by_plan[str(one.codes)])
        return measured[asked[-1]]

    def make(factors=MappingProxyType({})):
        assert all(factor > 0 for factor in factors.values())
        return [plans["c"]] if factors else [plans["a"], plans["b"], plans["c"]]

    best, tried = best_plan(make, measure, 2, kept=kept)
    assert best is plans["c"] and [one.measured for one in tried] == [0.5, 0.3, 0.2] and asked == ["a", "b", "c"]
    assert sorted(json.loads(kept.read_text()).values()) == [0.2, 0.3, 0.5]
    assert best_plan(make, measure, 2, kept=kept)[0] is plans["c"] and asked == ["a", "b", "c"]
