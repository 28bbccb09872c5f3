"""Parameters by what they are for: filters for `nnx.grad`, `nnx.state`, `nnx.split` and Optax.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> decoder, ids = moe_jax.tiny_model(experts=4).decoder, jnp.ones((2, 6), jnp.int32)
    >>> batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    >>> of_routers = nnx.DiffState(0, moe_jax.filters.routers)
    >>> grads = nnx.grad(lambda decoder: decoder.loss(batch), argnums=of_routers)(decoder)
    >>> [leaf.shape for leaf in jax.tree.leaves(grads)]
    [(2, 16, 4)]

Each matches `nnx.Param`s alone: neither positions nor codes, which have no gradient.
"""

from flax import nnx

routers = nnx.All(nnx.Param, nnx.PathContains("router"))
"""Routers of MoEs, and those of routed PEFT experts."""

experts = nnx.All(nnx.Param, nnx.PathContains("experts"))
"""All parameters of expert banks."""

shared_base = nnx.All(nnx.Param, nnx.PathContains("experts"), nnx.PathContains("base"))
"""The base that the experts of a bank share."""

deltas = nnx.All(nnx.Param, nnx.PathContains("experts"), nnx.PathContains("delta"))
"""The own parts of experts over a base: low-rank factors, values of sparse deltas, scales of codes."""

adapters = nnx.All(nnx.Param, nnx.Any(nnx.PathContains("adapters"), nnx.PathContains("lora")))
"""Adapters of experts and beside them (PESC, PERFT), and LoRA anywhere."""
