"""Takes the experts and adapters of stacked layers out of what a loop over the layers hands to each turn.

A turn of that loop is given its part of every stacked array. Experts are multiplied in a loop of their own, which asks
for an array to read from: the part would be copied, experts to which no token goes and all. Of an array that is the
same in every turn nothing is copied. So the experts of all layers lie in one array, and a layer knows their places.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Shaped

from moe_jax.experts.adapters import Adapters
from moe_jax.experts.bank import KernelBank
from moe_jax.experts.linear import Fixed, OfAllLayers


def join_experts(model: nnx.Module) -> None:
    """Changes in place every `KernelBank`, and all `Adapters`, of stacked layers on a CPU.

    A `MixedBank` stays as it is: its experts lie apart.
    """
    for _, module in list(nnx.iter_modules(model)):
        if type(module) is KernelBank and module.places is None and (layers := module.num_layers) is not None:
            _join(module, module.own_leaves(0), layers, module.num_experts)
        elif type(module) is Adapters and module.places is None and module.down.ndim == 4:
            _join(module, ("down", "up"), module.down.shape[0], module.num_adapters)


def _join(module: KernelBank | Adapters, paths: Iterable[str], layers: int, number: int) -> None:
    """Joins the arrays [layers, number, ...] at some paths in a module, and tells it the places of a layer's own."""
    for path in paths:
        *above, name = path.split("/")
        parent = functools.reduce(getattr, above, module)
        setattr(parent, name, OfAllLayers(_joined(getattr(parent, name)[...])))
    module.places = Fixed(jnp.arange(layers * number, dtype=jnp.int32).reshape(layers, -1))


def _joined(leaf: Shaped[Array, "L E ..."]) -> Shaped[Array, "LE ..."]:
    """Returns the same memory as another array: reshaped by JAX, it would be a copy."""
    return jax.device_put(np.asarray(leaf).reshape(-1, *leaf.shape[2:]), may_alias=True)
