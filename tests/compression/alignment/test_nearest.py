"""Orders of large clouds: those of exact searches among all pairs, with no more products than a proof takes."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from moe_jax.compression.alignment import barycenter, matching, nearest
from moe_jax.compression.alignment.barycenter import free_support_barycenter
from moe_jax.compression.alignment.nearest import nearest_order
from tests.support.tiers import examples, long


def clouds_of_common_origin(seed, count, n, dim, noise):
    """In orders of their own; without a noise, they have nothing in common."""
    random = np.random.default_rng(seed)
    origin = random.standard_normal((n, dim))
    clouds = [random.standard_normal((n, dim)) for _ in range(count)]
    if noise is not None:
        clouds = [(origin + noise * cloud)[random.permutation(n)] for cloud in clouds]
    return [cloud.astype(np.float32) for cloud in clouds]


def order_of(target, points, guess=None):
    squares = np.einsum("id,id->i", points, points, dtype=np.float64)
    return nearest_order(target, lambda rows, columns, dtype: points[rows, columns].astype(dtype), squares, guess=guess)


def score(target, points, order) -> float:
    return float(np.vdot(target.astype(np.float64), points[order].astype(np.float64)))


def best_score(target, points) -> float:
    return score(target, points, linear_sum_assignment(-target.astype(np.float64) @ points.T)[1])


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 9999),
    n=st.integers(1, 60),
    dim=st.integers(1, 80),
    noise=st.sampled_from((0.0, 0.2, 0.7, 2.0, None)),
    equal=st.integers(0, 5),
    strange=st.integers(0, 12),
    guessed=st.booleans(),
)
def test_orders_are_the_nearest_ones(seed, n, dim, noise, equal, strange, guessed):
    points, target = clouds_of_common_origin(seed, 2, n, dim, noise)
    points[:equal] = points[0]  # as neurons that are dead in both
    target[:strange] = np.random.default_rng(seed).standard_normal(target[:strange].shape)
    guess = np.arange(n) if guessed else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearest, "_BLOCK_PRODUCTS", 7 * n)  # several blocks, the last one not whole
        found = order_of(target, points, guess)
    assert found.order.dtype == np.int32 and (np.sort(found.order) == np.arange(n)).all()
    missed = best_score(target, points) - score(target, points, found.order)
    # Products of factors that are rounded to bfloat16 are wrong in 2^-8 at most, those of either order.
    rounding = 1e-5 if found.is_common else 2**-7
    assert missed <= found.gap + rounding * np.linalg.norm(target) * np.linalg.norm(points)


@pytest.mark.parametrize(("noise", "most"), [(0.1, 0.13), (0.3, 0.26), (0.6, 0.51), (None, 1.001)])
def test_no_more_products_than_it_takes(noise, most):
    points, target = clouds_of_common_origin(0, 2, 300, 512, noise)
    found = order_of(target, points)
    assert found.share <= most and found.is_common == (noise is not None)
    # Without a common order, of products of bfloat16, the least score is missed by far less than they are wrong in.
    assert score(target, points, found.order) == pytest.approx(best_score(target, points), rel=1e-6 if noise else 1e-4)
    settled = order_of(target, points[found.order], np.arange(300))
    assert settled.share <= most and settled.is_common == (noise is not None)
    if noise is not None:
        assert (settled.order == np.arange(300)).all()


@pytest.mark.parametrize("guess", [np.full(9, -1, np.int32), np.arange(9, dtype=np.int32)])
def test_devices_and_hosts_look_alike(guess, monkeypatch):
    random = np.random.default_rng(0)
    products = random.standard_normal((9, 20)).astype(np.float32)
    left_target = random.random(9).astype(np.float32)
    of_points = [random.random(20).astype(np.float32) for _ in range(3)]
    on_device = nearest._look_on_device(products, left_target, guess, *of_points)
    monkeypatch.setattr(nearest, "_CACHED", 40)
    on_host = nearest._look_on_host(products, left_target, guess, *of_points)
    np.testing.assert_array_equal(on_device[0], on_host[0])
    np.testing.assert_allclose(on_device[1], on_host[1], rtol=1e-6)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    points, target = clouds_of_common_origin(0, 2, 50, 64, 0.3)
    found = order_of(target, points, None)
    assert score(target, points, found.order) == pytest.approx(best_score(target, points), rel=1e-6)


def test_a_bound_holds_where_the_first_columns_mislead():
    """The first eighth of the columns says one order, the others another."""
    points, target = clouds_of_common_origin(0, 2, 60, 400, 0.1)
    target[:, :50] = points[np.random.default_rng(0).permutation(60), :50]
    for guess in (None, np.arange(60)):
        found = order_of(target, points, guess)
        assert score(target, points, found.order) == pytest.approx(best_score(target, points), rel=1e-6)


def test_rounding_is_that_of_the_largest_points():
    """Also beside a point of zeros, as of a dead neuron: rows that it could decide are not proven."""
    first, shares = np.eye(512)[0], []
    points = np.random.default_rng(0).standard_normal((60, 8, 64))
    points[0, 0, 0] = 0
    points = (points / np.linalg.norm(points, axis=2, keepdims=True)).reshape(60, 512)
    points[1] = points[0] - 8e-4 * first
    # The scores of two rows differ by 0.8 between the nearest points. Around 8,000, sums may be wrong in 1.
    target = 1e3 * points
    target[:2] = 1e3 * (points[0] + [first, -first])
    for size in (1, 0):
        points[-1] *= size
        target[-1] *= size
        found = order_of(target.astype(np.float32), points.astype(np.float32))
        assert (found.order == np.arange(60)).all() and found.is_common
        shares.append(found.share)
    assert shares[0] == shares[1] > 1 / 8


# Of a hundred points without a common order, one local minimum differs from another by more than is asked here.
@pytest.mark.parametrize(
    ("shape", "noise"),
    [
        ((3, 384, 512), None),
        ((8, 512, 1024), 0.5),
        pytest.param((8, 512, 1024), 1.5, marks=long),
        *(pytest.param((24, 384, 768), noise, marks=long) for noise in (0.5, 1.5, None)),
        pytest.param((8, 512, 1024), None, marks=long),
    ],
)
def test_large_clouds_come_as_near_as_exact_searches(monkeypatch, shape, noise):
    clouds = clouds_of_common_origin(1, *shape, noise)
    exact = free_support_barycenter(clouds, solver="assignment")
    monkeypatch.setattr(matching, "_SMALL_ROUND", 0)
    found = free_support_barycenter(clouds, solver="assignment")
    assert found.objective[-1] <= exact.objective[-1] * 1.001
    assert exact.duality_gap is None and 0 <= found.duality_gap < 1e-5
    assert found.converged or noise is None
    aligned = np.stack([cloud[order] for cloud, order in zip(clouds, found.permutations, strict=True)])
    aligned = aligned.astype(np.float64)
    reached = float(((aligned - aligned.mean(axis=0)) ** 2).sum() / len(clouds))
    assert found.objective[-1] == pytest.approx(reached, rel=1e-5)
    # The search is the same from clouds, and points, in other orders.
    random = np.random.default_rng(2)
    other = [clouds[k][random.permutation(shape[1])] for k in random.permutation(shape[0])]
    assert free_support_barycenter(other, solver="assignment").objective == found.objective


def test_a_search_that_converged_left_no_better_order(monkeypatch):
    monkeypatch.setattr(matching, "_SMALL_ROUND", 0)
    for seed in range(4):
        clouds = clouds_of_common_origin(seed, 6, 60, 90, None)
        found = matching.Matching(clouds, np.tile(np.arange(60, dtype=np.int32), (6, 1)))
        found.descend(40)
        assert found.converged and len(found.objectives) > 2
        for k in range(6):
            places, _, gain = found._better_order(k, found._sum_of_others(k))
            assert not len(places) and gain == 0


def test_starts_rounds_and_a_single_cloud_of_large_clouds(monkeypatch):
    monkeypatch.setattr(matching, "_SMALL_ROUND", 0)
    clouds = clouds_of_common_origin(3, 5, 40, 60, None)
    one = free_support_barycenter(clouds, solver="auto")
    some = free_support_barycenter(clouds, solver="auto", starts=7)
    assert some.objective[-1] <= one.objective[-1]
    cut = free_support_barycenter(clouds, max_rounds=1)
    assert cut.rounds == 1 and not cut.converged and cut.objective[0] == one.objective[0]
    alone = free_support_barycenter(clouds[:1])
    assert alone.converged and alone.objective[-1] == 0
    # Where such searches end depends on how distances are rounded: of ten draws, within 0.8 % of each other.
    started = free_support_barycenter(clouds, start=clouds[2])
    assert started.objective[-1] == pytest.approx(one.objective[-1], rel=0.05)
    search = matching.Matching(clouds, np.tile(np.arange(40, dtype=np.int32), (5, 1)))
    search.descend(20)
    assert (np.sort(search.permutations, axis=1) == np.arange(40)).all()
    # What gains next to nothing is not gone on with.
    monkeypatch.setattr(barycenter, "_WORTH_LARGE", 1.0)
    assert free_support_barycenter(clouds).rounds == 2
