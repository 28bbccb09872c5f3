"""Takes the experts of stacked layers out of what a loop over the layers hands to each turn.

A turn of that loop is given its part of every stacked array. Experts are multiplied in a loop of their own, which asks
for an array to read from: the part would be copied, experts to which no token goes and all. Of an array that is the
same in every turn nothing is copied. So the experts of all layers lie in one array, and a layer knows their places.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Shaped

from moe_jax.experts.bank import KernelBank
from moe_jax.experts.linear import Fixed, OfAllLayers


def join_experts(model: nnx.Module) -> None:
    """Changes in place every `KernelBank` of stacked layers on a CPU, but no `MixedBank`, whose experts lie apart."""
    for _, bank in list(nnx.iter_modules(model)):
        if type(bank) is not KernelBank or bank.places is not None or (layers := bank.num_layers) is None:
            continue
        for path, (variable, _) in bank.own_leaves(0).items():
            *above, name = path.split("/")
            joined = OfAllLayers(_joined(variable[...]))
            setattr(functools.reduce(getattr, above, bank), name, joined)
        every = layers * bank.num_experts
        bank.places = Fixed(jnp.arange(every, dtype=jnp.int32).reshape(layers, -1))


def _joined(leaf: Shaped[Array, "L E ..."]) -> Shaped[Array, "LE ..."]:
    """Returns the same memory as another array: reshaped by JAX, it would be a copy."""
    return jax.device_put(np.asarray(leaf).reshape(-1, *leaf.shape[2:]), may_alias=True)
