"""Assignments of candidates: the least ones, proven; proofs that do not hold are repaired."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from moe_jax.compression.alignment import assignment
from moe_jax.compression.alignment.assignment import Pinned, assign_proven


def least(costs) -> float:
    return float(costs[linear_sum_assignment(costs)].astype(np.float64).sum())


def cost_of(costs, order) -> float:
    return float(np.take_along_axis(costs, order[:, None], axis=1).astype(np.float64).sum())


def drawn(seed: int, n: int, kind: str) -> np.ndarray:
    random = np.random.default_rng(seed)
    if kind == "ties":
        return random.integers(-2, 3, (n, n)).astype(np.float32)
    costs = random.standard_normal((n, n))
    if kind == "hubs":  # a few columns are nearest to all rows
        costs -= 3 * np.abs(random.standard_normal(n))
    return costs.astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 9999), n=st.integers(1, 60), kind=st.sampled_from(("normal", "ties", "hubs")))
def test_assignments_are_the_least_ones(seed, n, kind):
    costs = drawn(seed, n, kind)
    found = assign_proven(costs)
    assert found.order.dtype == np.int32 and (np.sort(found.order) == np.arange(n)).all()
    assert not len(found.wanted) and found.gap <= 1e-5 * n
    assert cost_of(costs, found.order) == pytest.approx(least(costs), abs=1e-5 * n)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 9999),
    n=st.integers(10, 60),
    kind=st.sampled_from(("normal", "hubs")),
    nearest=st.integers(1, 3),
    tolerance=st.sampled_from((0.0, 0.1, 5.0)),
)
def test_a_gap_is_never_less_than_what_an_assignment_costs_too_much(seed, n, kind, nearest, tolerance):
    costs = drawn(seed, n, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assignment, "_NEAREST", nearest)
        found = assign_proven(costs, tolerance=tolerance)
    too_much = cost_of(costs, found.order) - least(costs)
    assert -1e-4 <= too_much <= found.gap + 1e-4 and found.gap <= tolerance + 1e-4


def test_a_proof_that_fails_is_repaired(monkeypatch):
    # Nearly all rows are nearest to the same few columns: with one candidate each hardly any row has one of its own.
    costs = drawn(0, 200, "hubs")
    monkeypatch.setattr(assignment, "_NEAREST", 1)
    tries = []
    solve = assignment._solve
    monkeypatch.setattr(assignment, "_solve", lambda *args: tries.append(solve(*args)) or tries[-1])
    found = assign_proven(costs)
    first = cost_of(costs, tries[0])
    assert len(tries) > 2 and first > least(costs) + 1
    assert cost_of(costs, found.order) == pytest.approx(least(costs), abs=1e-3)
    # When repairs do not come to an end, all pairs are searched.
    monkeypatch.setattr(assignment, "_MOST_REPAIRS", 1)
    assert cost_of(costs, assign_proven(costs).order) == pytest.approx(least(costs), abs=1e-3)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), n=st.integers(2, 40), share=st.floats(0, 1), spread=st.floats(0.05, 3))
def test_pinned_rows_are_wanted_where_the_proof_needs_them(seed, n, share, spread):
    """As `nearest.py` goes on: rows that are wanted are made known, until the whole is proven."""
    random = np.random.default_rng(seed)
    costs = spread * random.standard_normal((n, n)).astype(np.float32)
    costs[np.arange(n), random.permutation(n)] -= 2
    two = np.sort(costs, axis=1)[:, :2]
    nearest, slack = costs.argmin(axis=1), two[:, 1] - two[:, 0]
    columns, times = np.unique(nearest, return_counts=True)
    known = ~np.isin(nearest, columns[times == 1]) | (random.random(n) < share)
    while True:
        rows = np.flatnonzero(known)
        pinned = Pinned(np.where(known, -1, nearest), np.where(known, 0.0, slack))
        found = assign_proven(costs[rows], rows, pinned)
        if not len(found.wanted):
            break
        assert not known[found.wanted].any()
        known[found.wanted] = True
    assert (np.sort(found.order) == np.arange(n)).all()
    assert cost_of(costs, found.order) == pytest.approx(least(costs), abs=1e-4)
