"""Kernels in interpret mode against their plain references: groups skewed and empty, sizes that nothing divides."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional.dense import hidden
from moe_jax.kernels.hardware import MIB, Core
from moe_jax.kernels.tpu import grouped_product, kernel_gradients, product_blocks
from moe_jax.kernels.tpu.fused_tile import Operand
from moe_jax.kernels.tpu.product_blocks import Stays
from moe_jax.kernels.tpu.tiles import LowRankTile, StoredTile
from tests.kernels.tpu import references
from tests.kernels.tpu.conftest import ORDERS, SMALL
from tests.support.numerics import assert_close
from tests.support.tiers import one_in

pytestmark = pytest.mark.usefixtures("strict_numerics", "small_blocks")

GROUPS, ROWS, SHAPE, RANK = 4, 53, (24, 136), 3
ONE_ROUNDING = 2.0**-8


def random(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


# Rows that are left over belong to no group.
group_sizes = st.one_of(
    st.lists(st.integers(0, ROWS // GROUPS), min_size=GROUPS, max_size=GROUPS),
    st.sampled_from([[0, ROWS, 0, 0], [0, 0, 0, 0], [16, 0, 37, 0], [1, 31, 20, 1]]),
)


def factors(rng, dtype=jnp.float32):
    sides = {"a": (SHAPE[0], RANK), "b": (RANK, SHAPE[1])}
    return {name: random(rng, GROUPS, *side, dtype=dtype) for name, side in sides.items()}


@jax.jit
def dense(base, arrays):
    delta = jnp.einsum("eir,ero->eio", *(arrays[name].astype(jnp.float32) for name in "ab"))
    return delta if base is None else base.astype(jnp.float32)[None] + delta


@functools.cache
def product(transposed, stored):
    return product_with(StoredTile() if stored else LowRankTile(), SHAPE, transposed)


def product_with(tile, shape, transposed):
    def run(rows, base, arrays, sizes):
        kernels = grouped_product.Kernels(base, arrays, tile)
        return grouped_product.grouped_product(rows, kernels, sizes, shape, transposed=transposed, **SMALL)

    return jax.jit(run)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_product(stored, transposed):
    @settings(max_examples=5)
    @given(group_sizes, st.integers(0, 99))
    def check(sizes, seed):
        rng = np.random.default_rng(seed)
        base, arrays = random(rng, *SHAPE), factors(rng)
        kernels = dense(base, arrays)
        if stored:
            base, arrays = None, {"kernel": kernels}
        rows, sizes = random(rng, ROWS, SHAPE[1 if transposed else 0]), jnp.asarray(sizes, jnp.int32)
        got = product(transposed, stored)(rows, base, arrays, sizes)
        assert_close(got, references.product(rows, kernels, sizes, transposed))

    check()


@functools.cache
def gated(activation, stored):
    tile = StoredTile() if stored else LowRankTile()

    def run(rows, gate, up, sizes):
        sides = (grouped_product.Kernels(*side, tile) for side in (gate, up))
        return grouped_product.grouped_product(rows, tuple(sides), sizes, SHAPE, activation=activation, **SMALL)

    return jax.jit(run)


@pytest.mark.parametrize(
    ("activation", "stored"),
    [("silu", False), ("gelu", True), *[(name, True) for name in ("gelu_tanh", "relu", "swiglu_clamped")]],
)
def test_gated_product(activation, stored):
    @settings(max_examples=3)
    @given(group_sizes, st.integers(0, 99))
    def check(sizes, seed):
        rng = np.random.default_rng(seed)
        sides = [(random(rng, *SHAPE), factors(rng)) for _ in range(2)]
        kernels = [dense(*side) for side in sides]
        if stored:
            sides = [(None, {"kernel": kernel}) for kernel in kernels]
        rows, sizes = random(rng, ROWS, SHAPE[0]), jnp.asarray(sizes, jnp.int32)
        gate, up = (references.product(rows, kernel, sizes) for kernel in kernels)
        assert_close(gated(activation, stored)(rows, *sides, sizes), hidden(up, gate, activation))

    check()


SKEWED = [10, 0, 35, 6], [5, 0, 3, 0], [0, 0, 0, ROWS], [0, 0, 0, 0]
"""A share of the rows begins inside a group, and has no rows; all or none are of a group."""


@one_in(4)
@ORDERS
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_product_in_every_order(transposed, stored, order, monkeypatch):
    monkeypatch.setattr(grouped_product, "plan_blocks", order.plan)
    length, width = (136, 600 if order.split == 1 else 512) if order.stays is not Stays.SUMS else (768, 512)
    shape = (width, length) if transposed else (length, width)
    tile, rng = StoredTile() if stored else LowRankTile(), np.random.default_rng(0)
    base = random(rng, *shape) / 16
    arrays = {"a": random(rng, GROUPS, shape[0], RANK) / 16, "b": random(rng, GROUPS, RANK, shape[1])}
    kernels = dense(base, arrays)
    if stored:
        base, arrays = None, {"kernel": kernels}
    rows = random(rng, ROWS, length) / 16
    run = product_with(tile, shape, transposed)
    for sizes in SKEWED:
        sizes = jnp.asarray(sizes, jnp.int32)
        assert_close(run(rows, base, arrays, sizes), references.product(rows, kernels, sizes, transposed))


@one_in(4)
@ORDERS
@pytest.mark.parametrize("stored", [False, True])
def test_gated_product_in_every_order(stored, order, monkeypatch):
    monkeypatch.setattr(grouped_product, "plan_blocks", order.plan)
    monkeypatch.setattr(f"{__name__}.SHAPE", (24, 512))
    rng = np.random.default_rng(0)
    sides = [(random(rng, *SHAPE), factors(rng)) for _ in range(2)]
    kernels = [dense(*side) for side in sides]
    if stored:
        sides = [(None, {"kernel": kernel}) for kernel in kernels]
    run = gated.__wrapped__("silu", stored)
    rows = random(rng, ROWS, SHAPE[0])
    for sizes in SKEWED:
        sizes = jnp.asarray(sizes, jnp.int32)
        gate, up = (references.product(rows, kernel, sizes) for kernel in kernels)
        assert_close(run(rows, *sides, sizes), hidden(up, gate, "silu"))


@one_in(2)
@ORDERS
def test_what_lies_beyond_is_not_used_in_any_order(order, monkeypatch):
    """Rows of no group may be anything, as is what a block brings that reaches beyond the rows."""
    monkeypatch.setattr(grouped_product, "plan_blocks", order.plan)
    shape = (512, 512)
    rng, sizes = np.random.default_rng(0), jnp.asarray([20, 0, 13, 0], jnp.int32)
    kernels, rows = random(rng, GROUPS, *shape), random(rng, ROWS, shape[0]).at[33:].set(jnp.nan)

    @jax.jit
    def run(rows, kernels, sizes):
        stored = grouped_product.Kernels(None, {"kernel": kernels}, StoredTile())
        return grouped_product.grouped_product(rows, stored, sizes, shape, **SMALL)

    got = run(rows, kernels, sizes)
    assert_close(got[:33], references.product(rows[:33], kernels, sizes))
    np.testing.assert_array_equal(got[33:], 0)


V5P, V6E = Core(64 * MIB, 2, 128), Core(128 * MIB, 1, 256)


@pytest.fixture
def plan(monkeypatch):
    """Plans products of full experts in bfloat16, with blocks of true sizes."""
    monkeypatch.setattr(product_blocks, "ROW_BLOCKS", (512, 256, 128))

    def of(core, shape, experts, rows, sides=(512, 256, 128), gated=False, **options):
        monkeypatch.setattr(product_blocks, "SIDES", sides)
        kernels: Any = jax.ShapeDtypeStruct((experts, *shape), jnp.bfloat16)
        made = [product_blocks.Made(StoredTile(), None, (Operand(kernels, rows=0, columns=1),), True)] * (1 + gated)
        found = product_blocks.plan_blocks(rows, shape, jnp.bfloat16, made, core, adds=not gated, **options)
        assert found.vmem < core.vmem
        assert core.cores in (1, found.sizes.split) or found.sizes.shares % core.cores == 0
        return found

    return of


@pytest.mark.parametrize(
    ("core", "shape", "gated", "transposed", "stays"),
    [
        (V5P, (4096, 14336), True, False, Stays.ROWS),
        (V5P, (14336, 4096), False, False, Stays.SUMS),
        (V5P, (4096, 14336), False, True, Stays.SUMS),
        (V5P, (14336, 4096), False, True, Stays.ROWS),
        (V6E, (14336, 4096), False, False, Stays.SUMS),
    ],
)
def test_of_large_experts_rows_or_sums_stay(core, shape, gated, transposed, stays, plan):
    """Those of Mixtral: panels of them are many."""
    found = plan(core, shape, 8, 16384, gated=gated, transposed=transposed)
    assert found.sizes.stays is stays
    assert found.traffic < 0.85 * plan(core, shape, 8, 16384, sides=(), gated=gated, transposed=transposed).traffic


def test_small_experts_and_few_rows_are_read_once(plan):
    small = plan(V5P, (2048, 1024), 64, 65536)
    assert (small.sizes.stays, small.panels, small.sizes.shares) == (Stays.PANEL, 1, 2)
    once = 2 * (65536 * (2048 + 1024) + 64 * 2048 * 1024)
    assert once <= small.traffic < 1.02 * once
    # A few rows are one block, which cores cannot share.
    few = plan(V5P, (4096, 14336), 8, 16)
    once = 2 * (16 * (4096 + 14336) + 8 * 4096 * 14336)
    assert few.sizes.shares == 1 and once <= few.traffic < 1.001 * once


def test_gated_products_in_bfloat16_are_rounded_once():
    rng = np.random.default_rng(0)
    rows, sizes = random(rng, ROWS, SHAPE[0], dtype=jnp.bfloat16), jnp.asarray([20, 0, 30, 0], jnp.int32)
    kernels = [random(rng, GROUPS, *SHAPE, dtype=jnp.bfloat16) for _ in range(2)]
    got = gated("silu", True)(rows, *((None, {"kernel": kernel}) for kernel in kernels), sizes)
    gate, up = (references.product(rows, kernel, sizes) for kernel in kernels)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), hidden(up, gate, "silu"), rtol=ONE_ROUNDING, atol=1e-4)


DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32 factors", "bfloat16 factors"])


@DTYPES
@pytest.mark.parametrize("stored", [False, True])
def test_bfloat16_products_are_rounded_once(dtype, stored):
    rng = np.random.default_rng(0)
    base, arrays, sizes = random(rng, *SHAPE, dtype=dtype), factors(rng, dtype), jnp.asarray([20, 0, 33, 0], jnp.int32)
    kernels = dense(base, arrays)
    if stored:
        base, arrays = None, {"kernel": kernels.astype(dtype)}
    # Rows of the identity give the kernel itself, as it is multiplied.
    rows = jnp.concatenate([random(rng, 20, SHAPE[0]), jnp.eye(33, SHAPE[0])]).astype(jnp.bfloat16)
    got = product(False, stored)(rows, base, arrays, sizes)
    assert got.dtype == jnp.bfloat16
    made, got = np.asarray(got[20 : 20 + SHAPE[0]], np.float32), np.asarray(got[:20], np.float32)
    np.testing.assert_allclose(made, kernels[2], rtol=ONE_ROUNDING, atol=1e-4)
    expected = np.asarray(references.product(rows, kernels, sizes))[:20]
    assert np.linalg.norm(got - expected) < 0.003 * np.linalg.norm(expected)


def test_what_lies_beyond_the_rows_or_in_other_groups_is_not_used():
    rng = np.random.default_rng(0)
    rows, sizes = random(rng, ROWS, SHAPE[0]), jnp.asarray([20, 0, 13, 0], jnp.int32)
    spoilt = rows.at[20:33].set(jnp.nan)
    arrays, base = factors(rng), random(rng, *SHAPE)
    got = product(False, False)(spoilt, base, arrays, sizes)
    assert np.isnan(got[20:33]).all()
    assert_close(got[:20], product(False, False)(rows, base, arrays, sizes)[:20])
    np.testing.assert_array_equal(got[33:], 0)
    dout = random(rng, ROWS, SHAPE[1])
    da, db = thin_gradients()(spoilt, dout, arrays["a"], arrays["b"], sizes)
    outer = outer_product(jnp.float32)(spoilt, dout, sizes)
    for gradient in (da, db, outer):
        assert np.isfinite(gradient[0]).all()
        np.testing.assert_array_equal(gradient[jnp.asarray([1, 3])], 0)


@pytest.mark.parametrize("core", [V5P, V6E, Core(4096 * MIB, 1, 128)], ids=["v5p", "v6e", "of much memory"])
@pytest.mark.parametrize("shape", [(512, 1024), (1024, 512), (4096, 14336), (14336, 4096)])
def test_blocks_of_gradients_read_few_rows(core, shape):
    """All rows are read for each block of columns: of blocks of one size, the square ones need the fewest."""
    found = kernel_gradients.plan_blocks(16384, shape, jnp.bfloat16, jnp.float32, None, (), core)
    assert found.vmem < core.vmem
    down, across = -(-shape[0] // found.height), -(-shape[1] // found.width)
    assert down * across >= core.cores
    square = 2 * math.prod(shape) / math.sqrt(found.height * found.width)
    assert shape[0] * across + shape[1] * down <= 1.2 * max(sum(shape), square)
    if core.vmem > V6E.vmem:
        assert (found.height, found.width) == shape


@functools.cache
def outer_product(dtype):
    return jax.jit(functools.partial(kernel_gradients.grouped_outer, dtype=dtype, **SMALL))


@functools.cache
def thin_gradients():
    return jax.jit(functools.partial(kernel_gradients.low_rank_gradients, **SMALL))


@settings(max_examples=5)
@given(group_sizes, st.integers(0, 99))
def test_gradients_of_kernels_and_of_factors(sizes, seed):
    rng = np.random.default_rng(seed)
    rows, dout, arrays = random(rng, ROWS, SHAPE[0]), random(rng, ROWS, SHAPE[1]), factors(rng)
    sizes = jnp.asarray(sizes, jnp.int32)
    assert_close(outer_product(jnp.float32)(rows, dout, sizes), references.outer(rows, dout, sizes))
    arguments = rows, dout, arrays["a"], arrays["b"], sizes
    assert_close(thin_gradients()(*arguments), references.low_rank_gradients(*arguments))


@DTYPES
def test_gradients_of_bfloat16_rows_are_not_rounded_on_the_way(dtype):
    rng = np.random.default_rng(0)
    rows, dout = random(rng, ROWS, SHAPE[0], dtype=jnp.bfloat16), random(rng, ROWS, SHAPE[1], dtype=jnp.bfloat16)
    arrays, sizes = factors(rng, dtype), jnp.asarray([20, 0, 13, 9], jnp.int32)
    arguments = rows, dout, arrays["a"], arrays["b"], sizes
    assert_close(thin_gradients()(*arguments), references.low_rank_gradients(*arguments), tolerance=2e-5)
    got = outer_product(jnp.bfloat16)(rows, dout, sizes)
    np.testing.assert_allclose(
        got.astype(jnp.float32), references.outer(rows, dout, sizes), rtol=ONE_ROUNDING, atol=1e-5
    )


def test_factors_that_do_not_fit_into_fast_memory(monkeypatch):
    """Plain products take their place, which round what lies between them."""
    monkeypatch.setattr(kernel_gradients, "_block", lambda *_: None)
    rng = np.random.default_rng(0)
    rows, dout, arrays = random(rng, ROWS, SHAPE[0]), random(rng, ROWS, SHAPE[1]), factors(rng)
    sizes = jnp.asarray([20, 0, 13, 9], jnp.int32)
    got = jax.jit(lambda *data: LowRankTile().gradients(*data, ("a", "b"), sizes, **SMALL))(rows, dout, arrays)
    expected = references.low_rank_gradients(rows, dout, arrays["a"], arrays["b"], sizes)
    assert_close([got["a"], got["b"]], expected)
    with pytest.raises(ValueError, match="rank 3 of kernels"):
        kernel_gradients.low_rank_gradients(rows, dout, arrays["a"], arrays["b"], sizes, **SMALL)


def test_factors_are_split_where_bfloat16_would_round_them():
    arrays = factors(np.random.default_rng(0))
    exact = jnp.einsum("eir,ero->eio", arrays["a"], arrays["b"], precision="highest")
    rounded = {name: array.astype(jnp.bfloat16) for name, array in arrays.items()}
    for kept, dtype, terms in ((arrays, jnp.bfloat16, 3), (arrays, jnp.float32, 1), (rounded, jnp.bfloat16, 1)):
        a, b = (operand.array for operand in LowRankTile().operands(kept, dtype))
        assert a.shape[1] == b.shape[1] == terms * RANK and a.dtype == b.dtype == dtype
        made = jnp.einsum("eri,ero->eio", a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
        most = float(jnp.max(jnp.abs(made - exact)) / jnp.max(jnp.abs(exact)))
        assert most < (2**-6 if kept is rounded else 2**-14)
