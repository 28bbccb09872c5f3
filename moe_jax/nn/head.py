"""The last part of a model: from activations to logits."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.forms.fresh import normal_kernel
from moe_jax.experts.variables import Leaves
from moe_jax.functional.linear import linear_float32
from moe_jax.models.config import ModelConfig


class Head(Leaves):
    """`cap(scale * (x W + b))`, float32; W is a kernel [d, V] of its own, or the transposed embedding.

    With `head_hidden`, x is `tanh(x H + h)` before that: leaves `hidden/kernel` [d, d] and `hidden/bias` [d].
    """

    kernel: nnx.Param
    bias: nnx.Param
    hidden: Leaves

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        shape = (config.d_model, config.num_outputs)
        leaves = {} if config.tie_embeddings else {"kernel": normal_kernel(rngs, shape, dtype)}
        if config.head_bias:
            leaves["bias"] = jnp.zeros(shape[1], dtype)
        if config.head_hidden:
            leaves["hidden/kernel"] = normal_kernel(rngs, (config.d_model, config.d_model), dtype)
            leaves["hidden/bias"] = jnp.zeros(config.d_model, dtype)
        super().__init__(leaves)
        self.is_hidden = config.head_hidden
        self.is_tied, self.has_bias = config.tie_embeddings, config.head_bias
        self.scale, self.soft_cap = config.logit_scale, config.logit_soft_cap

    def __call__(
        self, x: Float[Array, "B T d"], embedding: Float[Array, "V d"] | None = None
    ) -> Float[Array, "B T V"]:
        """Logits; a tied head needs the embedding."""
        assert (embedding is not None) == self.is_tied, "the embedding goes with a tied head, and only with it"
        if self.is_hidden:
            arrays = self.hidden.arrays()
            hidden = linear_float32(x, arrays["kernel"]) + arrays["bias"].astype(jnp.float32)[None, None, :]
            x = jnp.tanh(hidden).astype(x.dtype)
        logits = linear_float32(x, self.kernel[...] if embedding is None else embedding.T)
        if self.has_bias:
            logits = logits + self.bias[...].astype(jnp.float32)[None, None, :]
        if self.scale != 1.0:
            logits = logits * jnp.float32(self.scale)
        if self.soft_cap is not None:
            logits = jnp.tanh(logits / self.soft_cap) * self.soft_cap
        return logits
