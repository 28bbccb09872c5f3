"""Takes the experts of stacked layers out of what a loop over the layers hands to each turn.

A turn of that loop is given its part of every stacked array. Experts are multiplied in a loop of their own, which asks
for an array to read from: the part would be copied, experts to which no token goes and all. Of an array that is the
same in every turn nothing is copied. So the experts of all layers lie in one array, and a layer knows its first one.
"""

import functools

import jax.numpy as jnp
from flax import nnx

from moe_jax.experts.bank import KernelBank
from moe_jax.experts.linear import Fixed, OfAllLayers


def join_experts(model: nnx.Module) -> None:
    """Changes in place every `KernelBank` of stacked layers, but no `MixedBank`, whose experts are in parts."""
    for _, bank in list(nnx.iter_modules(model)):
        if type(bank) is not KernelBank or (layers := bank.num_layers) is None:
            continue
        for path, (variable, _) in bank.own_leaves(0).items():
            *above, name = path.split("/")
            leaf = variable[...]
            joined = OfAllLayers(leaf.reshape(-1, *leaf.shape[2:]))
            setattr(functools.reduce(getattr, above, bank), name, joined)
        bank.first = Fixed(bank.num_experts * jnp.arange(layers, dtype=jnp.int32))
