"""Capacity: how many assignments an expert takes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from moe_jax.functional.routing.token_choices import NO_EXPERT


def within_capacity(
    experts: Int[Array, "T k"], valid: Bool[Array, "T k"] | None, num_experts: int, factor: float, num_sequences: int
) -> Bool[Array, "T k"]:
    """Returns which assignments are valid and within the capacity; earlier tokens and better choices come first."""
    valid = jnp.ones(experts.shape, bool) if valid is None else valid
    # [sequences, assignments in their order, E]
    chosen = jax.nn.one_hot(jnp.where(valid, experts, NO_EXPERT), num_experts, dtype=jnp.int32)
    chosen = chosen.reshape(num_sequences, -1, num_experts)
    earlier = jnp.sum((jnp.cumsum(chosen, axis=1) - chosen) * chosen, axis=2)
    # The capacity follows from the number of valid assignments and is tabulated here: on the device, rounding could add
    # one to a whole number.
    most = chosen.shape[1]
    capacities = jnp.asarray(np.ceil(factor * np.arange(most + 1) / num_experts).clip(max=most), jnp.int32)
    capacity = jnp.take(capacities, jnp.sum(chosen, axis=(1, 2)))
    return (earlier < capacity[:, None]).reshape(experts.shape) & valid


def within_padded_capacity(
    experts: Int[Array, "T k"], num_experts: int, factor: float, num_groups: int
) -> Bool[Array, "T k"]:
    """Returns which assignments are within the capacity of their group; first choices of earlier tokens come first."""
    tokens, top_k = experts.shape
    size = tokens // num_groups
    chosen = jax.nn.one_hot(experts.reshape(num_groups, size, top_k), num_experts, dtype=jnp.int32)
    in_turn = chosen.transpose(0, 2, 1, 3).reshape(num_groups, top_k * size, num_experts)
    earlier = jnp.sum((jnp.cumsum(in_turn, axis=1) - in_turn) * in_turn, axis=2)
    fits = earlier < math.ceil(size / num_experts * (factor * top_k))
    return fits.reshape(num_groups, top_k, size).transpose(0, 2, 1).reshape(tokens, top_k)


def as_large_together(weights: Float[Array, "T k"], kept: Bool[Array, "T k"]) -> Float[Array, "T k"]:
    """Returns the weights of what is kept, which sum to what all did; of a token that keeps nothing, zeros."""
    left = jnp.where(kept, weights, 0.0)
    total = jnp.sum(left, axis=-1, keepdims=True)
    return left * jnp.sum(weights, axis=-1, keepdims=True) / jnp.where(total == 0, 1.0, total)
