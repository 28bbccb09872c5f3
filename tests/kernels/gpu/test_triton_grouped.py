"""Triton's grouped products, run by the interpreter, against one product per row and group."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_jax.kernels.gpu.grouped import Tile, TritonProducts, outer_tile, product_tile, row_tiles
from tests.support.environment import INTERPRET
from tests.support.tiers import long

pytestmark = pytest.mark.usefixtures("strict_numerics")

# Tiles divide neither rows, nor kernels: [M, i], [E, i, o], [M, o].
ROWS, GROUPS, FAN_IN, FAN_OUT = 40, 3, 20, 37
PRODUCTS = TritonProducts(None, interpret=INTERPRET, tile=Tile(rows=16, terms=16, columns=32, warps=4, stages=2))


def of_group(lhs, rhs, dout, sizes):
    """The three products in float64, row by row; rows in no group have a kernel of zeros."""
    group = np.searchsorted(np.cumsum(sizes), np.arange(lhs.shape[0]), side="right")
    lhs, rhs, dout = (np.asarray(array, np.float64) for array in (lhs, rhs, dout))
    kernels = np.concatenate([rhs, np.zeros((1, *rhs.shape[1:]))])[group]
    member = np.eye(rhs.shape[0] + 1)[group][:, :-1]
    return (
        np.einsum("mi,mio->mo", lhs, kernels),
        np.einsum("mo,mio->mi", dout, kernels),
        np.einsum("mi,mo,me->eio", lhs, dout, member),
    )


@cache
def interpreted(dtype):
    @jax.jit
    def products(lhs, rhs, dout, sizes):
        y = PRODUCTS.product(lhs, rhs, sizes)
        return y, PRODUCTS.product(dout, rhs, sizes, transposed=True), PRODUCTS.outer(lhs, dout, sizes)

    def call(sizes, seed):
        rng = np.random.default_rng(seed)
        shapes = (ROWS, FAN_IN), (GROUPS, FAN_IN, FAN_OUT), (ROWS, FAN_OUT)
        arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
        return arrays, products(*arrays, jnp.asarray(sizes, jnp.int32))

    return call


@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS), seed=st.integers(0, 99))
@example(cuts=[0, 0, 0], seed=0)
@example(cuts=[0, ROWS, ROWS], seed=0)
@example(cuts=[16, 16, 32], seed=0)
def test_products_of_float32(cuts, seed):
    sizes = np.diff(np.sort(cuts), prepend=0)  # the last rows may belong to no group
    arrays, got = interpreted(jnp.float32)(sizes, seed)
    for product, expected in zip(got, of_group(*arrays, sizes), strict=True):
        np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)


@long
def test_products_of_bfloat16_round_once():
    sizes = [17, 0, 20]
    arrays, got = interpreted(jnp.bfloat16)(sizes, 0)
    for product, expected in zip(got, of_group(*arrays, sizes), strict=True):
        assert product.dtype == jnp.bfloat16
        np.testing.assert_allclose(product.astype(jnp.float32), expected, rtol=2**-8, atol=1e-4)


def test_groups_that_begin_later():
    """Groups 1 and 2 alone: other rows stay as they are."""
    sizes = [5, 20, 3]
    arrays, _ = interpreted(jnp.float32)(sizes, 1)
    lhs, rhs, dout = arrays
    origin, later = jnp.asarray(sizes[0], jnp.int32), jnp.asarray(sizes[1:], jnp.int32)
    expected_y, _, expected_outer = of_group(*arrays, sizes)

    @jax.jit
    def products(into):
        y = PRODUCTS.product(lhs, rhs[1:], later, origin=origin, into=into)
        return y, PRODUCTS.outer(lhs, dout, later, origin=origin, dtype=jnp.float32)

    y, drhs = products(jnp.full((ROWS, FAN_OUT), 7.0))
    np.testing.assert_allclose(y[5:28], expected_y[5:28], rtol=1e-5, atol=1e-5)
    assert (np.delete(np.asarray(y), np.s_[5:28], 0) == 7).all()
    np.testing.assert_allclose(drhs, expected_outer[1:], rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 50), min_size=4, max_size=4), later=st.booleans())
@example(cuts=[0, 0, 0, 0], later=False)
@example(cuts=[50, 50, 50, 50], later=True)
def test_tiles_of_rows_cover_every_row_once(cuts, later):
    """If the groups begin later, rows before and after them have no tile; else those after them are a last group."""
    cuts = np.sort(cuts)
    origin, sizes = (cuts[0], np.diff(cuts)) if later else (0, np.diff(cuts, prepend=0))
    tiles = jitted_row_tiles()(jnp.asarray(sizes, jnp.int32), jnp.asarray(origin, jnp.int32) if later else None)
    found = np.full(50, -1)
    for group, first, end in zip(*map(np.asarray, tiles), strict=True):
        rows = np.arange(first, min(first + 16, end))
        assert (found[rows] == -1).all()
        found[rows] = group
    expected = np.full(50, -1 if later else len(sizes))
    for e, end in enumerate(np.cumsum(sizes) + origin):
        expected[end - sizes[e] : end] = e
    np.testing.assert_array_equal(found, expected)


@cache
def jitted_row_tiles():
    return jax.jit(lambda sizes, origin: row_tiles(sizes, 50, 16, origin))


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiles_fit_into_the_shared_memory_of_the_gpu(capability, dtype):
    """Limits of a block, from the tables of compute capabilities in NVIDIA's CUDA C++ programming guide."""
    limit = {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99) * 1024
    for rows, groups, i, o in [(8192, 8, 4096, 14336), (1, 64, 2048, 1024), (40, 3, 20, 37)]:
        for tile in (
            product_tile(rows, groups, i, o, dtype, capability),
            outer_tile(rows, groups, i, o, dtype, capability),
        ):
            sizes = (tile.rows, tile.terms, tile.columns)
            assert all(size >= 16 and size & (size - 1) == 0 for size in sizes)
            in_flight = tile.stages * tile.terms * (tile.rows + tile.columns) * jnp.dtype(dtype).itemsize
            assert in_flight <= limit
