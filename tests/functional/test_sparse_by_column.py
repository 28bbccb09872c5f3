"""Products with sparse kernels whose entries are arranged by column, beside dense ones in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional.sparse.by_column import (
    MOST_ALONE,
    UNIT,
    Columns,
    grouped_product_by_column,
    kept_dtype,
    lay_out_by_column,
    tile_by_column,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def empty(experts: int, places: int, width: int, dtype) -> Columns:
    return Columns(*(np.zeros((experts, places, width), own) for own in (np.uint16, kept_dtype(dtype))))


def sparse_kernels(seed: int, experts: int, shape: tuple[int, int], keep: float, dtype) -> tuple[np.ndarray, Columns]:
    """Kernels [E, i, o] in float64, the first of which has a full column and an empty one; and the same by column."""
    rng = np.random.default_rng(seed)
    kept = rng.random((experts, *shape)) < keep
    kept[0, :, 0], kept[0, :, -1] = True, False
    kernels = np.where(kept, rng.standard_normal(kept.shape), 0).astype(dtype)
    places = -(-kept.sum(axis=1).max() // UNIT) * UNIT
    columns = empty(experts, places, shape[1], dtype)
    for expert, kernel in enumerate(kernels):
        rows, at = np.nonzero(kept[expert])
        lay_out_by_column(at, np.cumsum(kept[expert].sum(axis=1)), kernel[rows, at], columns, expert)
    return kernels.astype(np.float64), Columns(*map(jnp.asarray, columns))


@pytest.fixture(scope="module")
def product():
    return jax.jit(grouped_product_by_column)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    experts=st.sampled_from([1, 3]),
    shape=st.sampled_from([(5, 3), (32, 8)]),
    rows=st.sampled_from([1, 7, 5 * MOST_ALONE, 520]),
    dtype=st.sampled_from([np.dtype(np.float32), BFLOAT16]),
    keep=st.sampled_from([0.1, 0.5]),
)
def test_the_product_is_that_of_dense_kernels(product, seed, experts, shape, rows, dtype, keep):
    kernels, columns = sparse_kernels(seed, experts, shape, keep, dtype)
    rng = np.random.default_rng(seed)
    of_rows = np.sort(rng.integers(0, experts + 1, rows))  # those of the last lie beyond all groups
    lhs = rng.standard_normal((rows, shape[0])).astype(np.float32)
    sizes = np.bincount(of_rows, minlength=experts + 1)[:experts].astype(np.int32)
    kernels = np.concatenate([kernels, np.zeros((1, *shape))])
    expected = np.einsum("mi,mio->mo", lhs, kernels[of_rows])
    got = product(jnp.asarray(lhs), columns, jnp.asarray(sizes))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.sqrt(shape[0]))


def test_a_tile_has_the_columns_of_the_kernel():
    kernels, columns = sparse_kernels(0, 2, (12, 10), 0.4, np.dtype(np.float32))
    tile = tile_by_column(columns.rows[1], columns.values[1], jnp.asarray(3), (12, 5))
    np.testing.assert_array_equal(tile, kernels[1, :, 3:8].astype(np.float32))


def test_rows_in_bfloat16_are_summed_in_float32():
    ones = np.ones((1, 512, 1), np.float32)
    columns = empty(1, 512, 1, BFLOAT16)
    lay_out_by_column(np.zeros(512, int), np.arange(512) + 1, ones[0, :, 0].astype(BFLOAT16), columns, 0)
    got = grouped_product_by_column(
        jnp.ones((1, 512), jnp.bfloat16), Columns(*map(jnp.asarray, columns)), jnp.ones(1, jnp.int32)
    )
    assert got.dtype == jnp.bfloat16 and float(got[0, 0]) == 512  # bfloat16 alone would stop at 256
