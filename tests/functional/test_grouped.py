"""Every backend of the grouped product against one product per group, with gradients."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional import group_loops
from moe_jax.functional.grouped import grouped_matmul
from tests.support.numerics import normal
from tests.support.tiers import examples, one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")


def reference(lhs, rhs, group_sizes):
    rows, start = [], 0
    for kernel, size in zip(rhs, group_sizes, strict=True):
        rows.append(lhs[start : start + size] @ kernel)
        start += size
    rows.append(jnp.zeros((lhs.shape[0] - start, rhs.shape[2]), lhs.dtype))
    return jnp.concatenate(rows)


@partial(jax.jit, static_argnums=0)
def values_and_gradients(backend, lhs, rhs, group_sizes, weight):
    def product(lhs, rhs):
        if backend != "reference":
            return grouped_matmul(lhs, rhs, group_sizes, backend)
        row_group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(lhs.shape[0]), side="right")
        member = jax.nn.one_hot(row_group, rhs.shape[0], dtype=lhs.dtype)
        return jnp.einsum("mi,eio,me->mo", lhs, rhs, member)

    return jax.value_and_grad(lambda lhs, rhs: jnp.sum(product(lhs, rhs) * weight), argnums=(0, 1))(lhs, rhs)


# The shapes are few, so that programs are compiled once; the groups, which are data, are drawn freely.
@settings(max_examples=examples(20), deadline=None)
@given(
    shape=st.sampled_from([(1, 3, 6, 4), (40, 1, 5, 7), (40, 4, 6, 4)]),
    cuts=st.lists(st.integers(0, 40), min_size=4, max_size=4),
    seed=st.integers(0, 999),
)
def test_product_and_gradients(shape, cuts, seed):
    rows, num_groups, fan_in, fan_out = shape
    ends = np.minimum(np.sort(cuts)[:num_groups], rows)  # the last rows may belong to no group
    group_sizes = jnp.asarray(np.diff(ends, prepend=0), jnp.int32)
    rng = np.random.default_rng(seed)
    arrays = [
        rng.standard_normal(s).astype(np.float32)
        for s in ((rows, fan_in), (num_groups, fan_in, fan_out), (rows, fan_out))
    ]
    lhs, rhs, weight = map(jnp.asarray, arrays)
    expected = values_and_gradients("reference", lhs, rhs, group_sizes, weight)
    spoiled = lhs.at[group_sizes.sum() :].set(jnp.nan)
    for backend in ("blocked", "ragged_dot", "auto"):
        got = values_and_gradients(backend, spoiled, rhs, group_sizes, weight)
        chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("few", [{2: 1}, {64: 8}])
def test_groups_longer_than_a_tile(few, monkeypatch):
    monkeypatch.setattr(group_loops, "TILES", (8, 4))
    monkeypatch.setattr(group_loops, "SHORTER_TILE", 2)
    monkeypatch.setattr(group_loops, "TILES_OF_FEW", few)
    sizes = [30, 0, 1, 17, 8]
    lhs = normal(0, 60, 5)
    rhs = normal(1, 5, 5, 7)
    group_sizes = jnp.asarray(sizes, jnp.int32)
    got = jax.jit(lambda lhs, rhs: grouped_matmul(lhs, rhs, group_sizes, "blocked"))(lhs, rhs)
    np.testing.assert_allclose(got, jax.jit(lambda r: reference(lhs, r, sizes))(rhs), rtol=1e-5, atol=1e-5)
    gradient = jax.jit(jax.grad(lambda r: jnp.sum(grouped_matmul(lhs, r, group_sizes, "blocked") ** 2)))(rhs)
    expected = jax.jit(jax.grad(lambda r: jnp.sum(reference(lhs, r, sizes) ** 2)))(rhs)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)


@one_in(2)
@pytest.mark.parametrize("fan_out", [37, 64, 113])
def test_columns_that_tiles_do_not_divide(fan_out, monkeypatch):
    fan_in, sizes = 6, [9, 0, 20]
    for name in ("TILE_ENTRIES", "TILE_ENTRIES_FOR_FEW"):
        monkeypatch.setattr(group_loops, name, 20 * fan_in)
    rng = np.random.default_rng(0)
    arrays = (
        rng.standard_normal((31, fan_in)),
        rng.standard_normal((3, fan_in, fan_out)),
        rng.standard_normal((31, fan_out)),
    )
    lhs, rhs, weight = (jnp.asarray(a, jnp.float32) for a in arrays)
    group_sizes = jnp.asarray(sizes, jnp.int32)
    got, expected = (values_and_gradients(b, lhs, rhs, group_sizes, weight) for b in ("blocked", "reference"))
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-4)


def test_bfloat16_is_within_its_rounding():
    sizes = [9, 3, 20]
    lhs, rhs = normal(0, 32, 16), normal(1, 3, 16, 8)
    exact = reference(lhs, rhs, sizes)
    for backend in ("blocked", "ragged_dot"):
        got = grouped_matmul(lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16), jnp.asarray(sizes, jnp.int32), backend)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), exact, atol=0.02 * float(jnp.max(jnp.abs(exact))))


def test_kernels_in_fewer_bits_are_cast_a_tile_at_a_time():
    """Values and gradients are those of kernels that were cast before, and no cast one is in memory as a whole."""
    random = np.random.default_rng(3)
    lhs, weight = (jnp.asarray(random.standard_normal((40, 64)), jnp.float32) for _ in range(2))
    stored = jnp.asarray(random.standard_normal((3, 64, 64)), jnp.bfloat16)
    group_sizes = jnp.array([7, 0, 33], jnp.int32)
    narrow, wide = (values_and_gradients("auto", lhs, rhs, group_sizes, weight)
                    for rhs in (stored, stored.astype(jnp.float32)))  # fmt: skip
    for ours, expected in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        np.testing.assert_array_equal(ours, expected.astype(ours.dtype))
    large = jax.ShapeDtypeStruct((8, 512, 512), jnp.bfloat16)
    arguments = jax.ShapeDtypeStruct((64, 512), jnp.float32), large, jax.ShapeDtypeStruct((8,), jnp.int32)
    memory = jax.jit(grouped_matmul).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < large.size * jnp.dtype(jnp.float32).itemsize / 2


def test_cpu_program_does_not_multiply_the_arithmetic():
    """XLA:CPU's own lowering of ragged_dot does E times the work; the seam must not fall back to it."""
    lhs, rhs = jnp.ones((256, 32)), jnp.ones((8, 32, 16))
    text = jax.jit(grouped_matmul).lower(lhs, rhs, jnp.full(8, 32, jnp.int32)).as_text()
    assert "ragged_dot" not in text
    assert "stablehlo.while" in text


def test_a_kernel_narrower_than_the_rows_is_cast_and_has_a_gradient_of_its_dtype():
    sizes = jnp.asarray([9, 0, 23], jnp.int32)
    lhs, rhs = normal(0, 32, 16), normal(1, 3, 16, 8).astype(jnp.bfloat16)
    for backend in ("blocked", "ragged_dot", "auto"):

        def value(lhs, rhs, backend=backend):
            return jnp.sum(jnp.sin(grouped_matmul(lhs, rhs, sizes, backend)))

        got = jax.jit(jax.grad(value, argnums=(0, 1)))(lhs, rhs)
        expected = jax.jit(jax.grad(value, argnums=(0, 1)))(lhs, rhs.astype(jnp.float32))
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got[1], expected[1].astype(jnp.bfloat16))


def test_kernels_of_groups_without_rows_are_neither_made_nor_cast():
    """A condition inside of the loop would not do: XLA:CPU casts in front of the loop that stands for it."""
    lhs, rhs = jnp.ones((2, 16)), jnp.ones((64, 16, 8), jnp.bfloat16)
    compiled = jax.jit(grouped_matmul).lower(lhs, rhs, jnp.zeros(64, jnp.int32)).compile()
    whole = 4 * rhs.size
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 4
