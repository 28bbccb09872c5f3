"""The schedule of kernels against a plain walk over the rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.kernels.tpu.parts import group_visits, visits_of_shares

pytestmark = pytest.mark.usefixtures("strict_numerics")


@functools.cache
def program(rows, block, every_group):
    return jax.jit(functools.partial(group_visits, rows=rows, block=block, every_group=every_group))


@settings(max_examples=60)
@given(
    shape=st.sampled_from([(1, 4), (13, 4), (16, 4), (40, 8)]),
    cuts=st.lists(st.integers(0, 40), min_size=5, max_size=5),
    every_group=st.booleans(),
)
def test_every_row_is_visited_with_its_group(shape, cuts, every_group):
    rows, block = shape
    ends = np.minimum(np.sort(cuts), rows)
    sizes = np.diff(ends, prepend=0)
    visits, count = program(rows, block, every_group)(jnp.asarray(sizes, jnp.int32))
    found = [tuple(int(part[v]) for part in visits) for v in range(int(count))]

    owner = np.searchsorted(ends, np.arange(rows), side="right")  # 5: of no group
    seen = np.full(rows, 5)
    for at, group, first, end in found:
        of_visit = [row for row in range(at * block, min((at + 1) * block, rows)) if first <= row < end]
        assert (seen[of_visit] == 5).all(), "a row is visited twice"
        seen[of_visit] = group
    np.testing.assert_array_equal(seen, owner)

    blocks, groups = ([visit[part] for visit in found] for part in (0, 1))
    # Neither comes back, and no visit is for nothing but those asked for.
    assert blocks == sorted(blocks) and groups == sorted(groups)
    idle = [visit for visit in found if visit[3] == 0]
    if every_group:
        assert set(groups) == set(range(5)) and len(idle) == np.sum(sizes == 0)
    else:
        assert set(blocks) == set(range(-(-rows // block))) and len(idle) == len(set(blocks)) - len(
            {row // block for row in range(rows) if owner[row] < 5}
        )


@settings(max_examples=40)
@given(shape=st.sampled_from([(13, 4), (16, 4), (40, 4)]), cuts=st.lists(st.integers(0, 40), min_size=5, max_size=5))
def test_every_share_visits_its_own_rows(shape, cuts):
    rows, block = shape
    ends = np.minimum(np.sort(cuts), rows)
    sizes = jnp.asarray(np.diff(ends, prepend=0), jnp.int32)
    visits, count = program_of_shares(rows, block)(sizes)
    seen, length, blocks = np.full(rows, 5), visits.block.shape[0] // 2, -(-rows // block) // 2
    for share in range(2):
        before = None
        # All shares take as long as the longest.
        for v in range(share * length, share * length + int(count)):
            at, group, first, end = (int(part[v]) for part in visits)
            assert share * blocks <= at < (share + 1) * blocks
            assert before is None or before[0] <= at and before[1] <= group
            before = at, group
            of_visit = [row for row in range(at * block, min((at + 1) * block, rows)) if first <= row < end]
            assert (seen[of_visit] == 5).all(), "a row is visited twice"
            seen[of_visit] = group
        own = visits.block[share * length : share * length + int(count)]
        assert set(own.tolist()) == set(range(share * blocks, (share + 1) * blocks))
    np.testing.assert_array_equal(seen, np.searchsorted(ends, np.arange(rows), side="right"))


@functools.cache
def program_of_shares(rows, block):
    return jax.jit(functools.partial(visits_of_shares, rows=rows, block=block, shares=2))
