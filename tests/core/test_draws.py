"""Random positions in a kernel: as many as asked for, each as likely as any other, and drawn fast."""

import math
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_jax.core.draws import (
    DROPPED,
    FACTOR,
    FRESH,
    NOISE,
    POSITIONS,
    REDRAWN,
    ROUTER,
    draw_factor,
    draw_positions,
    draw_router,
    stream,
)
from moe_jax.core.errors import InputError


@settings(max_examples=60)
@given(st.integers(0, 1000), st.integers(1, 30_000), st.floats(0, 1))
@example(0, 50, 1.0)
@example(0, 20_000, 1.0)
@example(0, 20_000, 0.6)
@example(0, 20_000, 0.0)
def test_positions_are_distinct_ascending_and_as_many_as_asked_for(seed, size, share):
    count = math.ceil(share * size)
    positions = draw_positions(np.random.default_rng(seed), size, count)
    assert positions.dtype == np.int32 and len(positions) == count
    assert (np.diff(positions) > 0).all()
    assert count == 0 or (positions[0] >= 0 and positions[-1] < size)


# Small and large kernels, of which little, some and most is kept.
@pytest.mark.parametrize(("size", "count"), [(12, 3), (12, 9), (24_000, 40), (12_000, 2_000), (12_000, 9_000)])
def test_all_positions_are_equally_likely(size, count):
    draws, groups = 1000, 12
    hits = np.zeros(groups)
    for seed in range(draws):
        hits += np.bincount(draw_positions(np.random.default_rng(seed), size, count) * groups // size, minlength=groups)
    # A twelfth of the kernel has a hypergeometric count; five standard deviations from its mean at most.
    group, share = size / groups, count / size
    deviation = math.sqrt(draws * group * share * (1 - share) * (size - group) / (size - 1))
    assert np.abs(hits - draws * group * share).max() < 5 * deviation


@pytest.mark.parametrize("count", [10**5, 10**6])
def test_positions_of_a_large_kernel_are_drawn_fast(count):
    start = time.perf_counter()
    assert len(np.unique(draw_positions(np.random.default_rng(0), 10**7, count))) == count
    assert time.perf_counter() - start < 5


def test_kernels_beyond_int32_are_refused():
    with pytest.raises(InputError, match="large for the int32 positions"):
        draw_positions(np.random.default_rng(0), 2**31, 1)


def test_streams_and_what_is_drawn_first_are_what_they_were():
    """An old seed must give the model that it gave: keys are what they were, and streams differ in all parts of one."""
    assert (ROUTER, FACTOR, POSITIONS, FRESH, NOISE, DROPPED, REDRAWN) == (0, 1, 2, 3, 4, 5, 6)
    keys = [(0,), (1,), (0, 0), (0, 1), (1, 0), ()]
    drawn = {stream(seed, *key).integers(2**62) for seed in (0, 1) for key in keys}
    assert len(drawn) == 2 * len(keys) and stream(1, 0, 1).integers(2**62) in drawn
    by_hand = np.random.Generator(np.random.Philox(np.random.SeedSequence(7, spawn_key=(2, 3))))
    assert stream(7, 2, 3).integers(2**62) == by_hand.integers(2**62)
    router, factor = draw_router(stream(0), 64, 960), draw_factor(stream(1), 64, 960)
    assert router.shape == factor.shape == (64, 960) and router.dtype == factor.dtype == np.float32
    np.testing.assert_allclose(np.quantile(router, [0.159, 0.5, 0.841]), [-0.02, 0, 0.02], atol=1e-3)
    np.testing.assert_allclose(np.quantile(factor, [0, 0.25, 0.5, 0.75, 1]) * 8, [-1, -0.5, 0, 0.5, 1], atol=0.03)
