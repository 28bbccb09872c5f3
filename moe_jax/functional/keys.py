"""Random keys of a forward pass. None is the key of a pass without randomness, as in evaluation.

A pass has one key. The key of a layer is that key folded with the index of the layer, and everything random in a layer
folds it once more with a number of its own. What is drawn therefore depends neither on what else is drawn nor on how
layers are stacked.
"""

import jax
from jaxtyping import Array

# What a layer draws random numbers for.
ROUTER_NOISE, ATTENTION, FFN, EXPERTS, PERFT, CROSS_ATTENTION = range(6)
# An encoder's key: that of the pass folded with a number that no layer has.
ENCODER = 2**31 - 1


def fold_in(key: Array | None, data: int | Array) -> Array | None:
    """`jax.random.fold_in`, or None for None."""
    return None if key is None else jax.random.fold_in(key, data)
