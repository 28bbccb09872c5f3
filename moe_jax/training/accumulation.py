"""Gradients added up over microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def sum_of_gradients(
    loss: Callable[[nnx.State, Any], tuple[Float[Array, ""], Any]], params: nnx.State, microbatches: Any
) -> tuple[nnx.State, Any]:
    """Returns the sum of the gradients of all microbatches, float32, and the second results of the losses.

    Where parameters are float32, the backward pass of a layer adds to the sum in place, so that no microbatch has
    gradients of its own: they would take as much memory as the sum. JAX cannot add bfloat16 gradients to float32 sums.
    Where only a few parameters are in bfloat16, as the scales of quantised deltas are, the loss gets these in float32
    instead. Where all are, the gradients of a microbatch exist as a whole, in half as many bytes.

    Args:
      loss: `(params, microbatch) -> (loss, anything else)`.
      params: the loss is differentiated with respect to them.
      microbatches: a tree of arrays [number, ...].

    Returns:
      The sum, like `params`, and the second results, with a leading axis [number].
    """
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
    if any(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params)):
        sums = jax.tree.map(jax.new_ref, zeros)
        exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)

        def add_in_place(carry: None, micro: Any) -> tuple[None, Any]:
            _, backward, found = jax.vjp(lambda params: loss(params, micro), exact, has_aux=True)
            backward.with_refs(sums)(jnp.ones((), jnp.float32))
            return carry, found

        _, found = jax.lax.scan(add_in_place, None, microbatches)
        return jax.tree.map(jax.freeze, sums), found

    def add(sums: nnx.State, micro: Any) -> tuple[nnx.State, Any]:
        # Without the barrier XLA for TPUs tries to sum over devices after the loop, and fails on the conversion.
        grads, found = jax.lax.optimization_barrier(jax.grad(loss, has_aux=True)(params, micro))
        return jax.tree.map(lambda total, grad: total + grad.astype(jnp.float32), sums, grads), found

    return jax.lax.scan(add, zeros, microbatches)
