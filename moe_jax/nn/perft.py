"""PEFT experts beside a frozen MoE (PERFT; Liu et al. 2024, section 3; methods.md 7)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from moe_jax.experts.adapters import Adapters
from moe_jax.functional.routing.decision import RouterStats, Routing, route
from moe_jax.models.config import PerftConfig
from moe_jax.nn.router import LinearRouter


class Perft(nnx.Module):
    """Adapters on the MoE's input, whose sum is added to the MoE's output.

    Adapters of the variant `routed` are weighted by a router of their own, which the gradient of the task reaches
    through these weights; those of `embedded` by the MoE's router; those of `dense` and `single` have no weights.
    """

    def __init__(self, config: PerftConfig, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        if config.variant == "routed":
            self.router = LinearRouter(d_model, config.num_experts, rngs=rngs, dtype=dtype)
        self.adapters = Adapters(config.adapter, config.num_experts, d_model, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "T d"], moe: Routing, valid: Bool[Array, " T"] | None, key: Array | None
    ) -> tuple[Float[Array, "T d"], tuple[RouterStats, ...]]:
        """Returns the term that is added to the MoE's output, and the statistics of the adapters' own router, if any.

        Args:
          x: the MoE's input.
          moe: the decision of the MoE's router, in terms of the router's outputs.
          valid: tokens that are not padding; None: all.
          key: for dropout in training.
        """
        if self.config.variant == "embedded":
            return self.adapters(x, moe, key), ()
        if self.config.variant != "routed":
            return self.adapters(x, None, key), ()
        assert self.config.top_k is not None
        routing, stats = route(self.router(x), self.config.top_k, self.config.gate, valid=valid)
        return self.adapters(x, routing, key), (stats,)
