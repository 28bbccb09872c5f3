"""Gradients added up over microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

Backward = Any  # what `jax.vjp` returns: a function with the attribute `with_refs`


def sum_of_gradients(
    forward: Callable[[Any], tuple[Float[Array, ""], Backward, Any]], params: nnx.State, microbatches: Any
) -> tuple[nnx.State, Any]:
    """The sum of the gradients of all microbatches, float32, and what their forward passes found.

    Where parameters are float32, the backward pass of a layer adds to the sum where that lies, so that no microbatch
    has gradients of its own: they would take as much memory as the sum. Gradients in bfloat16 JAX cannot add to sums in
    float32; those of a microbatch are there as a whole, in half as many bytes.

    Args:
      forward: gives the loss of a microbatch, its backward pass and anything else: `jax.vjp(..., has_aux=True)`.
      params: what the backward pass gives gradients of.
      microbatches: a tree of arrays [number, ...].

    Returns:
      The sum, like `params`, and what was found, with a leading axis [number].
    """
    one, zeros = jnp.ones((), jnp.float32), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
    if all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params)):
        sums = jax.tree.map(jax.new_ref, zeros)

        def add_in_place(carry: None, micro: Any) -> tuple[None, Any]:
            _, backward, found = forward(micro)
            backward.with_refs(sums)(one)
            return carry, found

        _, found = jax.lax.scan(add_in_place, None, microbatches)
        return jax.tree.map(jax.freeze, sums), found

    def add(sums: nnx.State, micro: Any) -> tuple[nnx.State, Any]:
        _, backward, found = forward(micro)
        (grads,) = backward(one)
        return jax.tree.map(lambda total, grad: total + grad.astype(jnp.float32), sums, grads), found

    return jax.lax.scan(add, zeros, microbatches)
