"""A layer that predicts one token further than what it is given (multi-token prediction, DeepSeek-V3, section 2.2).

Behind the last layer stand D of them, one after the other. Layer k = 1, ..., D is given, at token i, what the layer
before it made of token i, for k = 1 the head's input, and the embedding of token i + k. Both are normed, and joined by
a linear map (arXiv:2412.19437, equation 21; published checkpoints have the embedding first). A layer of the model
follows (22), and a norm before the model's own head, which predicts token i + k + 1 (23).
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.functional.routing.router_stats import RouterStats
from moe_jax.models.config import ModelConfig
from moe_jax.nn.block import make_layer
from moe_jax.nn.context import Context
from moe_jax.nn.layers import Linear, Norm


class FurtherLayer(nnx.Module):
    """A layer of the form of the model's last one, with what joins its two inputs, and the norm before the head."""

    embedding_norm: Norm
    hidden_norm: Norm
    final_norm: Norm

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        for name in ("embedding_norm", "hidden_norm", "final_norm"):
            setattr(self, name, Norm(config.norm, config.d_model, config.norm_eps, dtype=dtype))
        self.joint = Linear((2 * config.d_model, config.d_model), rngs=rngs, dtype=dtype)
        self.block = make_layer(config.layers[-1], config, rngs=rngs, dtype=dtype)

    def __call__(
        self, hidden: Float[Array, "B T d"], embedded: Float[Array, "B T d"], context: Context, key: Array | None = None
    ) -> tuple[Float[Array, "B T d"], tuple[RouterStats, ...]]:
        """Returns the activations that the next such layer is given, and the statistics of the layer's routers.

        `final_norm` of the activations is for the head.

        Args:
          hidden: what the layer before made of every token.
          embedded: of every token, the embedding of the one that the layer before predicts.
          context: as of the other layers.
          key: the layer's random key in training; None: deterministic.
        """
        joined = jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        x, _, stats = self.block(self.joint(joined), context, None, key)
        return x, stats
