"""The Mixture-of-Experts module: a router and a bank."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from moe_jax.experts.make import make_bank
from moe_jax.functional.linear import linear
from moe_jax.functional.routing import RouterStats, route
from moe_jax.models.config import MoEConfig
from moe_jax.nn.layers import Linear


class MoE(nnx.Module):
    """Routes every token to `top_k` experts of a bank."""

    def __init__(self, config: MoEConfig, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        self.router = Linear((d_model, config.num_experts), rngs=rngs, dtype=dtype)
        self.experts = make_bank(config.bank, config.expert, config.num_experts, d_model, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B T d"], valid: Bool[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T d"], RouterStats]:
        """Returns the layer's output and what its router did; tokens not `valid` are left out of the latter."""
        tokens = x.reshape(-1, x.shape[-1])
        logits = linear(tokens.astype(jnp.float32), self.router.kernel[...])
        routing, stats = route(
            logits,
            self.config.top_k,
            self.config.gate,
            valid=None if valid is None else valid.reshape(-1),
            capacity_factor=self.config.capacity_factor,
        )
        return self.experts(tokens, routing).reshape(x.shape), stats
