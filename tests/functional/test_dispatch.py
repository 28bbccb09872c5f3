"""Sorting by expert is a permutation, and its hand-written gradients are autodiff's."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional.token_dispatch import (
    _all_at_once,
    _in_parts,
    combine,
    dispatch,
    part_of,
    sort_by_expert,
    weighted_sum,
)
from moe_jax.kernels.hardware import Core
from tests.support.tiers import examples

pytestmark = pytest.mark.usefixtures("strict_numerics")


@partial(jax.jit, static_argnames=("num_experts", "plain"))
def values_and_gradients(experts, x, weights, target, scale, *, num_experts, plain):
    tokens, top_k = experts.shape

    def value(x, weights):
        if plain:
            rows = x[:, None, :] * scale.reshape(tokens, top_k, 1)
            return jnp.sum(jnp.sum(rows * weights[:, :, None], axis=1) * target)
        order = sort_by_expert(experts, num_experts)
        rows = dispatch(x, order, top_k) * scale[order.sorted_to_flat]
        return jnp.sum(combine(rows, order, weights) * target)

    return jax.value_and_grad(value, argnums=(0, 1))(x, weights)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([(1, 1, 1), (12, 3, 4), (7, 2, 5)]), st.integers(0, 999))
def test_order_and_gradients(shape, seed):
    tokens, top_k, num_experts = shape
    rng = np.random.default_rng(seed)
    # -1 and num_experts stand for experts that live elsewhere.
    experts = jnp.asarray(rng.integers(-1, num_experts + 1, (tokens, top_k)), jnp.int32)
    order = jax.jit(sort_by_expert, static_argnums=1)(experts, num_experts)
    flat = np.asarray(experts).ravel()
    counts = np.bincount(flat[(flat >= 0) & (flat < num_experts)], minlength=num_experts)
    np.testing.assert_array_equal(order.group_sizes, counts)
    sorted_to_flat = np.asarray(order.sorted_to_flat)
    np.testing.assert_array_equal(flat[sorted_to_flat][: counts.sum()], np.repeat(np.arange(num_experts), counts))
    np.testing.assert_array_equal(sorted_to_flat[order.flat_to_sorted], np.arange(flat.size))

    draw = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.float32)  # noqa: E731
    arrays = experts, draw(tokens, 3), draw(tokens, top_k), draw(tokens, 3), draw(flat.size, 1)
    got, expected = (values_and_gradients(*arrays, num_experts=num_experts, plain=plain) for plain in (False, True))
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-5)


@partial(jax.jit, static_argnames=("num_experts", "room"))
def sum_of_parts(experts, x, weights, target, *, num_experts, room):
    def value(x, weights):
        order = sort_by_expert(experts, num_experts)
        total = jnp.zeros_like(x)
        for first in range(0, experts.size, room):
            part = part_of(order, first, room)
            # An expert does what a linear map does; rows in no group give zeros.
            group = jnp.searchsorted(jnp.cumsum(part.group_sizes), jnp.arange(room), side="right")
            factor = jnp.where(group < num_experts, 1.0 + group.astype(jnp.float32), 0.0)
            total += combine(dispatch(x, part, experts.shape[1]) * factor[:, None], part, weights)
        return jnp.sum(total * target)

    return jax.value_and_grad(value, argnums=(0, 1))(x, weights)


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from([(8, 3, 4), (7, 2, 5)]), st.sampled_from([5, 9]), st.integers(0, 999))
def test_parts_of_the_sorted_rows_add_up_to_the_whole(shape, room, seed):
    tokens, top_k, num_experts = shape
    rng = np.random.default_rng(seed)
    experts = jnp.asarray(rng.integers(-1, num_experts + 1, (tokens, top_k)), jnp.int32)
    x, weights, target = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((tokens, 3), (tokens, top_k), (tokens, 3))
    )
    rooms = (room, experts.size)
    parts, whole = (sum_of_parts(experts, x, weights, target, num_experts=num_experts, room=one) for one in rooms)
    chex.assert_trees_all_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "parts"), [(512, [128, 128, 128, 128]), (300, [128, 128, 44])])
@pytest.mark.parametrize(("weighted", "top_k"), [(True, 2), (False, 2), (True, 8)])
def test_sums_in_parts_are_the_same_to_the_last_bit(weighted, top_k, tokens, parts):
    rng = np.random.default_rng(0)
    y = jnp.asarray(rng.standard_normal((tokens * top_k, 5)), jnp.bfloat16)
    rows = jnp.asarray(rng.permutation(tokens * top_k), jnp.int32)
    weights = jnp.asarray(rng.standard_normal((tokens, top_k)), jnp.float32) if weighted else None
    at_once = jax.jit(partial(_all_at_once, top_k=top_k))(y, rows, weights)
    for fast_memory, sizes in ((16 * y.size // 5, parts), (1 << 20, [])):
        in_parts = partial(_in_parts, top_k=top_k, core=Core(vmem=fast_memory, cores=1, rows=8))
        joined = [eqn for eqn in jax.make_jaxpr(in_parts)(y, rows, weights).eqns if eqn.primitive.name == "concatenate"]
        assert [part.aval.shape[0] for eqn in joined for part in eqn.invars] == sizes
        np.testing.assert_array_equal(jax.jit(in_parts)(y, rows, weights), at_once)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_weighted_sum_and_its_gradients(top_k, dtype):
    rng = np.random.default_rng(top_k)
    choices = jnp.asarray(rng.standard_normal((6, top_k, 7)), dtype)
    weights, target = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((6, top_k), (6, 7)))

    def value(total):
        def scored(choices, weights):
            y = total(choices, weights)
            return jnp.sum(y.astype(jnp.float32) * target), y

        (_, y), gradients = jax.jit(jax.value_and_grad(scored, argnums=(0, 1), has_aux=True))(choices, weights)
        return y, *gradients

    def plain(choices, weights):
        return jnp.sum(choices.astype(jnp.float32) * weights[:, :, None], axis=1).astype(dtype)

    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for got, expected in zip(value(weighted_sum), value(plain), strict=True):
        assert got.dtype == expected.dtype
        got, expected = (np.asarray(a, np.float32) for a in (got, expected))
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equal_choices_add_up_to_the_last_bit(dtype):
    rng = np.random.default_rng(0)
    one = jnp.asarray(rng.standard_normal((500, 1, 9)), dtype)
    first = jnp.asarray(rng.uniform(0.5, 1, (500, 1)), jnp.float32)
    y = jax.jit(weighted_sum)(jnp.concatenate([one, one], axis=1), jnp.concatenate([first, 1 - first], axis=1))
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(one[:, 0], np.float32))
