"""Sorting by expert is a permutation, and its hand-written gradients are autodiff's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional.dispatch import combine, dispatch, sort_by_expert

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
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)
