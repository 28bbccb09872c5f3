"""Routers and layers of users' own, which configs name."""

from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import PartitionSpec as P

from moe_jax.core.registry import Registry
from moe_jax.distributed.own_rules import add_rules

LINEAR, BLOCK = "linear", "block"
"""The names of the router and the layer of the library."""

ROUTERS: Registry[Callable[..., Any] | None] = Registry("router", {LINEAR: None})
LAYERS: Registry[Callable[..., Any] | None] = Registry("layer", {BLOCK: None})


def register_router(name: str, make: Callable[..., Any], *, shardings: Mapping[str, P] | None = None) -> None:
    """Registers a router, for `MoEConfig.router` and the option `router` of `upcycle` to name.

        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> class Cosine(nnx.Module):
        ...     def __init__(self, d_model, num_experts, *, rngs, dtype):
        ...         self.kernel = nnx.Param(0.02 * jax.random.normal(rngs.params(), (d_model, num_experts), dtype))
        ...     def __call__(self, x):
        ...         unit = lambda v, axis: v / jnp.linalg.norm(v, axis=axis, keepdims=True)
        ...         return 10 * unit(x, 1) @ unit(self.kernel[...].astype(x.dtype), 0)
        >>> moe_jax.nn.register_router("my_lab.parts:Cosine", Cosine)
        >>> moe = moe_jax.upcycle(moe_jax.tiny_model(), experts=4, router="my_lab.parts:Cosine")
        >>> type(moe.decoder.layers[1].mlp.router.module).__name__
        'Cosine'

    Args:
      name: best the import path of the router. It is in the config of every model with it, and such a model is opened
        only after the router has been registered: nothing is imported for a name.
      make: `make(d_model, num_experts, rngs=rngs, dtype=dtype)`, perhaps a class with options of its own bound by
        `functools.partial`, returns a module, which is called with tokens [T, d]
        and returns logits [T, E]. If it has an argument `key`, that is the layer's random key in training, or None. It
        is a function of its parameters: random state (`nnx.Dropout`) and what a call changes are not kept.
      shardings: how its parameters are split over a mesh, by their paths below the router, which are regular
        expressions: `{"weight": P("fsdp", None)}`. Those that are not named are whole on every device; `kernel`, and
        other names of the library's own parameters, are split as those, and one name has one place in all routers.

    Raises:
      InputError: if the name is one of the library's, or no name; for `make` that cannot be called; or for shardings
        that are none, or contradict those of another router.
    """
    ROUTERS.check_new(name, make)
    add_rules(name, ".*/router", {} if shardings is None else shardings)
    ROUTERS.register(name, make)


def register_layer(name: str, make: Callable[..., Any], *, shardings: Mapping[str, P] | None = None) -> None:
    """Registers a layer, for `LayerConfig.module` to name.

        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> class Gated(moe_jax.nn.Block):
        ...     def __init__(self, config, model, *, rngs, dtype):
        ...         super().__init__(config, model, rngs=rngs, dtype=dtype)
        ...         self.alpha = nnx.Param(jnp.ones((), dtype))
        ...     def __call__(self, x, context, cache, key=None):
        ...         y, cache, stats = super().__call__(x, context, cache, key)
        ...         return x + self.alpha[...].astype(x.dtype) * (y - x), cache, stats
        >>> moe_jax.nn.register_layer("my_lab.parts:Gated", Gated)

    Args:
      name: best the import path of the layer; see `register_router`.
      make: `make(config, model, rngs=rngs, dtype=dtype)`, given the `LayerConfig` and the `ModelConfig`, returns a
        module that is called as `nn.Block` is, from which it may be derived: it has a cache as the attention of the
        config has one, and reports the statistics of the routers that the config describes. Beside its attention it
        computes token by token; one that looks at other tokens has an attribute `continues_rows = False`, as a call
        with caches sees the new tokens alone, and is refused then.
      shardings: how parameters are split over a mesh that have other names than those of the library, by their paths
        below the layer, which are regular expressions. Those that are not named are whole on every device.

    Raises:
      InputError: as `register_router`.
    """
    LAYERS.check_new(name, make)
    add_rules(name, r"layers/\d+|.*/blocks/\d+", {} if shardings is None else shardings)
    LAYERS.register(name, make)
