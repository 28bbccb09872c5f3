"""Loops over groups of rows: tiles, and which rows are multiplied by themselves."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_jax
from moe_jax.functional import group_loops
from moe_jax.functional.group_loops import (
    FEW_ROWS,
    MOST_ROWS,
    TILE_ENTRIES,
    TILE_ENTRIES_FOR_FEW,
    Groups,
    by_group_size,
    longest_tile,
    looped_product,
    over_tiles,
    row_by_row,
    tile_width,
)
from moe_jax.nn import init_cache
from tests.support.numerics import normal

pytestmark = pytest.mark.usefixtures("strict_numerics")


@settings(max_examples=300)
@given(st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from([1, FEW_ROWS, FEW_ROWS + 1, 4096]))
def test_no_tile_is_above_its_limit(fan_in, fan_out, rows):
    width = tile_width((fan_in, fan_out), rows)
    limit = TILE_ENTRIES_FOR_FEW if rows <= FEW_ROWS else TILE_ENTRIES
    assert 1 <= width <= fan_out
    assert width * fan_in <= limit
    # Nor is it needlessly narrow.
    assert width == fan_out or 2 * width * fan_in >= limit or 2 * (width + 1) * fan_in > limit


def test_the_longest_tile_is_short_for_few_rows_and_else_holds_them():
    assert [longest_tile(rows) for rows in (1, 2, 3, 16, 17, 64)] == [1, 1, 4, 4, 16, 16]
    assert [longest_tile(rows) for rows in (65, 128, 129)] == [128, 128, 256]
    assert longest_tile(10**6) == max(group_loops.TILES)


@pytest.mark.parametrize(
    ("size", "rows", "multiplied"),
    [
        (4, 64, 16),
        (4, 128, 16),
        (70, 128, 80),
        (130, 128, 144),
        (4, MOST_ROWS, 16),
        (4, MOST_ROWS + 1, 64),
        (0, 128, 0),
    ],
)
def test_tiles_of_a_group_have_few_rows_beyond_it(size, rows, multiplied):
    assert over_tiles(jnp.int32(size), rows, lambda tile, offset, total: total + tile, 0) == multiplied


def sizes_of(*sizes):
    return jnp.asarray(sizes, jnp.int32)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6), taken=st.integers(0, 63))
def test_rows_of_groups_that_are_taken_are_found(sizes, taken):
    is_taken = [bool(taken >> group & 1) for group in range(len(sizes))]
    rows, of_rows = Groups.of(sizes_of(*sizes)).only(jnp.asarray(is_taken)).of_rows(32)
    expected = [group for group, size in enumerate(sizes) for _ in range(size)]
    found = [(row, group) for row, group in enumerate(expected) if is_taken[group]]
    assert list(zip(rows.tolist(), of_rows.tolist(), strict=True))[: len(found)] == found


def test_of_many_groups_rows_are_searched_for(monkeypatch):
    groups = Groups.of(sizes_of(0, 2, 0, 0, 3, 1))
    compared = groups.of_rows(8)
    monkeypatch.setattr(group_loops, "_COMPARED", 0)
    for ours, expected in zip(groups.of_rows(8), compared, strict=True):
        np.testing.assert_array_equal(ours[:6], expected[:6])


@pytest.mark.parametrize(
    ("sizes", "rows", "alone"),
    [
        ((1, 0, 4, 2, 5), 14, (1, 0, 0, 2, 0)),  # two rows beyond all groups
        ((3,), 4, (0,)),  # of a single group
        ((2,), 2, (2,)),
        ((0, 2), 2, (0, 2)),
        ((1, 1, 1), MOST_ROWS + 1, (0, 0, 0)),
    ],
)
def test_rows_of_short_groups_are_multiplied_alone(sizes, rows, alone):
    """The product is the same; which way a row went is asked of two programs that differ in the sign."""
    lhs, kernels = normal(0, rows, 6), normal(1, len(sizes), 6, 4)

    def product(sign):
        def of_a_row(row, group):
            return sign * (row @ kernels[group])

        return by_group_size(
            lhs,
            sizes_of(*sizes),
            2,
            one_by_one=lambda groups: row_by_row(lhs, groups, 4, of_a_row),
            with_kernels=lambda groups: looped_product(
                lhs,
                groups,
                4,
                lambda group: lambda start, width: jax.lax.dynamic_slice_in_dim(kernels[group], start, width, 1),
            ),
        )

    expected = np.zeros((rows, 4), np.float32)
    of_rows = np.repeat(np.arange(len(sizes)), sizes)
    expected[: len(of_rows)] = np.einsum("mi,mio->mo", lhs[: len(of_rows)], np.asarray(kernels)[of_rows])
    np.testing.assert_allclose(product(1), expected, rtol=1e-5, atol=1e-5)
    sign = np.ones((rows, 1))
    sign[: len(of_rows), 0] = np.where(np.asarray(alone)[of_rows] > 0, -1, 1)
    np.testing.assert_allclose(product(-1), sign * expected, rtol=1e-5, atol=1e-5)


def test_with_x64_a_model_has_the_same_gradients_and_caches():
    """Numbers of loops would be int64 then, and slices want all their starts of one kind."""
    decoder, ids = moe_jax.tiny_model(experts=4).decoder, jnp.ones((2, 6), jnp.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    gradients = nnx.jit(nnx.grad(lambda model, batch: model.loss(batch)))
    expected = gradients(decoder, batch)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = gradients(decoder, batch)
        caches = init_cache(decoder.config, 2, 8, jnp.dtype("float32"))
        caches = decoder(ids, caches=caches, begins=True).caches
        assert decoder(ids[:, :1], positions=jnp.full((2, 1), 6), caches=caches).logits.dtype == jnp.float32
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)
