"""Random keys of a forward pass. None stands for a pass without randomness, as at evaluation.

A pass has one key. A layer's key is that one folded with the layer's index, and whatever is drawn in a layer has a
stream of its own: what one draws does not depend on which others draw, nor on how layers are stacked.
"""

import jax
from jaxtyping import Array

# What a stream of a layer is for.
ROUTER_NOISE, ATTENTION, FFN, EXPERTS, PERFT, CROSS_ATTENTION = range(6)


def fold_in(key: Array | None, data: int | Array) -> Array | None:
    """`jax.random.fold_in`, or None for None."""
    return None if key is None else jax.random.fold_in(key, data)
