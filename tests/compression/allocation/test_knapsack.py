"""Allocation of a budget over layers, against every possible allocation; and the part of a layer that is tried."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_jax.compression import budget as budgets
from moe_jax.compression.budget import Candidate, allocate
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.models import BankConfig
from tests.support.moe_models import memory_moe

CANDIDATES = st.builds(Candidate, st.integers(1, 60), st.integers(0, 100).map(float), st.none())
LAYERS = st.lists(st.lists(CANDIDATES, min_size=1, max_size=6), min_size=1, max_size=4).map(
    lambda layers: dict(enumerate(layers))
)


def total(chosen) -> tuple[int, float]:
    return sum(c.nbytes for c in chosen), sum(c.error for c in chosen)


def smallest(layers) -> int:
    return sum(min(c.nbytes for c in some) for some in layers.values())


def largest_step(some) -> float:
    """What the largest step along the lower convex hull of one layer gains."""
    at = min(some, key=lambda c: (c.nbytes, c.error))
    gains = [0.0]
    while better := [c for c in some if c.error < at.error and c.nbytes > at.nbytes]:
        step = max(better, key=lambda c: ((at.error - c.error) / (c.nbytes - at.nbytes), c.nbytes))
        gains.append(at.error - step.error)
        at = step
    return max(gains)


@given(layers=LAYERS, slack=st.integers(0, 150))
def test_the_error_is_close_to_the_least_possible(layers, slack):
    budget = smallest(layers) + slack
    chosen = allocate(layers, budget)
    assert list(chosen) == list(layers) and all(c in layers[layer] for layer, c in chosen.items())
    nbytes, error = total(chosen.values())
    assert nbytes <= budget
    fitting = (total(some) for some in itertools.product(*layers.values()))
    least = min(error for nbytes, error in fitting if nbytes <= budget)
    assert least <= error <= least + max(map(largest_step, layers.values()))


@given(layers=LAYERS, slacks=st.tuples(st.integers(0, 150), st.integers(0, 150)).map(sorted))
def test_more_bytes_never_give_a_larger_error(layers, slacks):
    less, more = (total(allocate(layers, smallest(layers) + slack).values())[1] for slack in slacks)
    assert more <= less


def test_a_budget_for_everything_gives_the_least_errors():
    layers = {
        3: [Candidate(10, 5.0), Candidate(30, 0.5), Candidate(20, 1.0)],
        5: [Candidate(7, 2.0), Candidate(8, 2.5)],
    }
    assert allocate(layers, 1000) == {3: Candidate(30, 0.5), 5: Candidate(7, 2.0)}


def test_the_first_bytes_go_where_they_help_most():
    layers = {i: [Candidate(100, 8.0 * scale), Candidate(200, scale)] for i, scale in enumerate((1.0, 5.0, 2.0))}
    assert [c.nbytes for c in allocate(layers, 400).values()] == [100, 200, 100]
    assert [c.nbytes for c in allocate(layers, 500).values()] == [100, 200, 200]


def test_what_is_left_is_used_by_candidates_above_the_hull():
    """A step to 300 does not fit; 150 is on no hull and does."""
    assert allocate({0: [Candidate(100, 9.0), Candidate(150, 8.5), Candidate(300, 0.0)]}, 299)[0].nbytes == 150


def test_what_a_candidate_stands_for_need_not_be_comparable():
    same = [Candidate(100, 2.0, {"rate": 0.1}), Candidate(200, 1.0, {"rate": 0.2}), Candidate(200, 1.0, {"bits": 2})]
    assert allocate({0: same, 1: same}, 400)[1].nbytes == 200


@given(layers=LAYERS)
def test_a_budget_that_is_too_small_names_the_smallest_possible(layers):
    with pytest.raises(InputError, match=f"at least {smallest(layers)} bytes"):
        allocate(layers, smallest(layers) - 1)


@pytest.mark.parametrize(("neurons", "chosen"), [(8, range(8)), (9, [0, 1, 6, 7]), (24, [0, 1, 22, 23])])
def test_a_large_layer_is_tried_on_blocks_of_neurons_from_its_first_to_its_last(neurons, chosen, monkeypatch):
    """Which are groups of the same scales."""
    monkeypatch.setattr(budgets, "DEFAULT_GROUP_SIZE", 2)
    monkeypatch.setattr(budgets, "SAMPLED_NEURONS", 4)
    layer = SourceLayer(memory_moe(BankConfig(), shape={"d_model": 16, "dim": neurons}, num_experts=3), 0)
    random = np.random.default_rng(0)
    orders = np.stack([random.permutation(neurons) for _ in range(3)])
    found = budgets._sampled(layer, orders)
    assert found.keys() == layer.shapes.keys()
    for name, kernels in found.items():
        for kernel, whole, order in zip(kernels, layer.kernels(name), orders, strict=True):
            some = order[list(chosen)]
            np.testing.assert_array_equal(kernel, whole[some] if name == "down" else whole[:, some])
