"""The gated short convolution with its projections and cache (LFM2)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_jax.experts.shapes import normal_kernel
from moe_jax.functional.keys import fold_in
from moe_jax.models.config import ModelConfig
from moe_jax.models.recurrent_config import ShortConvConfig
from moe_jax.nn.attention import make_projections
from moe_jax.nn.context import RecurrentCache
from moe_jax.nn.layers import Linear
from moe_jax.nn.recurrent.convolved import convolved


class ShortConv(nnx.Module):
    """The gated short convolution of a layer, described by its `ShortConvConfig`; called as `nn.recurrent` says."""

    in_gate: Linear
    out_gate: Linear
    v: Linear
    o: Linear

    def __init__(self, config: ShortConvConfig, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        for name, linear in make_projections(config, model.d_model, rngs=rngs, dtype=dtype).items():
            setattr(self, name, linear)
        self.conv = nnx.Param(normal_kernel(rngs, (config.conv_width, config.channels), dtype))
        if config.bias:
            self.conv_bias = nnx.Param(jnp.zeros(config.channels, dtype))

    def __call__(
        self,
        x: Float[Array, "B T d"],
        documents: Int[Array, "B T"] | None = None,
        *,
        cache: RecurrentCache | None = None,
        begins: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T d"], RecurrentCache | None]:
        """Convolves along the rows; arguments as in `nn.recurrent`."""
        keys = {name: fold_in(key, index) for index, name in enumerate(self.config.projections)}
        in_gate, out_gate, v = (getattr(self, name)(x, keys[name]) for name in ("in_gate", "out_gate", "v"))
        gated = in_gate * v
        bias, held = self.conv_bias[...] if self.config.bias else None, None if cache is None else cache.inputs[0]
        mixed, held = convolved(gated, self.conv[...], bias, documents, held, begins=begins)
        return self.o(out_gate * mixed, keys["o"]), None if held is None else RecurrentCache((held,), None)
