"""Random keys of a forward pass, and dropout. None is the key of a pass without randomness, as in evaluation.

A pass has one key. The key of a layer is that key folded with the index of the layer, and everything random in a layer
folds the layer's key with a number of its own. So no draw depends on another draw, nor on how layers are stacked.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# One number for each random part of a layer.
ROUTER_NOISE, ATTENTION, FFN, EXPERTS, PERFT, CROSS_ATTENTION = range(6)
# The key of an encoder: the key of the pass, folded with a number that no layer has.
ENCODER = 2**31 - 1


def fold_in(key: Array | None, data: int | Array) -> Array | None:
    """Returns `jax.random.fold_in(key, data)`, or None if the key is None."""
    return None if key is None else jax.random.fold_in(key, data)


def dropout(x: Float[Array, "..."], rate: float, key: Array | None) -> Float[Array, "..."]:
    """Sets entries to zero with probability `rate`, divides the others by `1 - rate`; without a key, does nothing."""
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))
