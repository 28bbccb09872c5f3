"""Takes the experts and adapters of stacked layers out of what a loop over the layers hands to each turn.

A turn of that loop is given its part of every stacked array. Experts are multiplied in a loop of their own, which asks
for an array to read from: the part would be copied, experts to which no token goes and all. Of an array that is the
same in every turn nothing is copied. So the experts of all layers lie in one array, and a layer knows their places.
"""

import functools
from typing import Any

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
    module: Any
    for _, module in list(nnx.iter_modules(model)):
        leaves = _own_leaves(module)
        for path, leaf in leaves.items():
            *above, name = path.split("/")
            setattr(functools.reduce(getattr, above, module), name, OfAllLayers(_joined(leaf[...])))
        if leaves:
            layers, number = next(iter(leaves.values())).shape[:2]
            module.places = Fixed(jnp.arange(layers * number, dtype=jnp.int32).reshape(layers, number))


def leaves_of_all_layers(model: nnx.Module) -> set[tuple[Any, ...]]:
    """Returns the paths of the leaves that `join_experts` would join, or has joined; shapes are enough."""
    joined = {path for path, leaf in nnx.iter_graph(model) if isinstance(leaf, OfAllLayers)}
    own = ((*above, *path.split("/")) for above, module in nnx.iter_modules(model) for path in _own_leaves(module))
    return joined.union(own)


def _own_leaves(module: nnx.Module) -> dict[str, nnx.Variable]:
    """Returns the leaves [L, number, ...] of the experts or adapters that a module has of several layers, by path."""
    if type(module) is KernelBank and module.places is None and module.num_layers is not None:
        return {path: leaf for path, (leaf, _) in module.own_leaves(0).items()}
    if type(module) is Adapters and module.places is None and module.down.ndim == 4:
        return {"down": module.down, "up": module.up}
    return {}


def _joined(leaf: Shaped[Array, "L E ..."]) -> Shaped[Array, "LE ..."]:
    """Returns the same memory as another array: reshaped by JAX, it would be a copy."""
    return jax.device_put(np.asarray(leaf).reshape(-1, *leaf.shape[2:]), may_alias=True)
