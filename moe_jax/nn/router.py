"""Routers: modules that own the parameters of router logits.

Logits are float32 whatever the compute dtype, and products have the highest precision (methods.md 1): by default a TPU
would round the operands of a float32 product to bfloat16, a GPU to TF32, which changes the experts that are chosen.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.layout.config import LoRAConfig
from moe_jax.experts.variables import Fixed, Leaves
from moe_jax.functional.routing.universal import add_noise, coder_logits
from moe_jax.nn.layers import Linear


class LinearRouter(Linear):
    """Computes logits `x W`; kernel [d, E], perhaps with LoRA beside it.

    With `selection_bias` it has such a bias, [E], float32, zero at first and trained by no gradient. With
    `weighs_universal` another kernel, `universal` [d, 1], computes the logit of a universal FFN's weight.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        lora: LoRAConfig | None = None,
        selection_bias: bool = False,
        weighs_universal: bool = False,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
    ):
        super().__init__((d_model, num_experts), lora=lora, rngs=rngs, dtype=dtype)
        if selection_bias:
            self.selection_bias = Fixed(jnp.zeros(num_experts, jnp.float32))
        if weighs_universal:
            self.universal = Linear((d_model, 1), rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "T d"], key: Array | None = None) -> Float[Array, "T E"]:
        """Returns logits, float32; the key is for LoRA's dropout in training."""
        with jax.default_matmul_precision("highest"):
            return super().__call__(x.astype(jnp.float32), key)

    def universal_logit(self, x: Float[Array, "T d"]) -> Float[Array, " T"]:
        """Returns the logit of the universal FFN's weight, float32."""
        with jax.default_matmul_precision("highest"):
            return self.universal(x.astype(jnp.float32))[:, 0]


class CoderRouter(nnx.Module):
    """The gate network of XFT (methods.md 2.4): `hidden` [d, E], tanh, `out` [E, E]; `noise` [d, E], zero at first."""

    def __init__(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.hidden = Linear((d_model, num_experts), rngs=rngs, dtype=dtype)
        self.out = Linear((num_experts, num_experts), rngs=rngs, dtype=dtype)
        self.noise = Leaves({"kernel": jnp.zeros((d_model, num_experts), dtype)})

    def __call__(self, x: Float[Array, "T d"], key: Array | None = None) -> Float[Array, "T E"]:
        """Returns logits, float32; with a key, that is in training, noise of a learned size is added."""
        x = x.astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            logits = coder_logits(x, self.hidden.kernel[...], self.out.kernel[...])
            return logits if key is None else add_noise(logits, x, self.noise.arrays()["kernel"], key)
