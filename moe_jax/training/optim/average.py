"""The exponential moving average of the trained parameters: often better than the last ones, and less noisy."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int


def first_average(params: nnx.State) -> nnx.State:
    """Returns the average before the first step: the parameters, as float32."""
    # A copy, even where a parameter is float32 already: both are donated to the step.
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)


def next_average(average: nnx.State, params: nnx.State, step: Int[Array, ""], decay: float) -> nnx.State:
    """Returns the average after a step.

    Args:
      average: before the step, float32.
      params: after the step.
      step: number of steps done, including this one.
      decay: share of itself that the average keeps; early steps keep less, (1 + step) / (10 + step), so that it does
        not stay near the first parameters for long.
    """
    done = jnp.asarray(step, jnp.float32)
    new = 1.0 - jnp.minimum(decay, (1.0 + done) / (10.0 + done))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    return cast(nnx.State, optax.incremental_update(cast(Any, params), cast(Any, average), new))


def in_dtypes_of(params: nnx.State, average: nnx.State) -> nnx.State:
    """Returns the average as parameters: in the dtypes of `params`."""
    return jax.tree.map(lambda like, leaf: leaf.astype(like.dtype), params, average)
