"""Random keys of a forward pass. None stands for a pass without randomness, as at evaluation.

A pass has one key. A layer's key is that one folded with the layer's index, and whatever is drawn in a layer has a
stream of its own: what one draws does not depend on which others draw, nor on how layers are stacked.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# What a stream of a layer is for.
ROUTER_NOISE, ATTENTION, FFN, EXPERTS, PERFT = range(5)


def fold_in(key: Array | None, data: int | Array) -> Array | None:
    """`jax.random.fold_in`, or None for None."""
    return None if key is None else jax.random.fold_in(key, data)


def dropout(x: Float[Array, "..."], rate: float, key: Array | None) -> Float[Array, "..."]:
    """Sets the share `rate` of the entries to zero and scales the others up by `1 / (1 - rate)`; nothing for None."""
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))
