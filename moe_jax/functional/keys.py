"""Random keys of a forward pass. None is the key of a pass without randomness, as in evaluation.

A pass has one key. The key of a layer is that key folded with the index of the layer, and everything random in a layer
folds the layer's key with a number of its own. So no draw depends on another draw, nor on how layers are stacked.
"""

import jax
from jaxtyping import Array

# One number for each random part of a layer.
ROUTER_NOISE, ATTENTION, FFN, EXPERTS, PERFT, CROSS_ATTENTION = range(6)
# The key of an encoder: the key of the pass, folded with a number that no layer has.
ENCODER = 2**31 - 1


def fold_in(key: Array | None, data: int | Array) -> Array | None:
    """Returns `jax.random.fold_in(key, data)`, or None if the key is None."""
    return None if key is None else jax.random.fold_in(key, data)
