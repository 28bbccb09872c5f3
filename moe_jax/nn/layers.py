"""Linear, norm and FFN: modules that own parameters and nothing else."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.layout.config import FFNConfig
from moe_jax.experts.linear import Linear as Linear
from moe_jax.experts.linear import apply_ffn, ffn_linears
from moe_jax.functional.dense import layer_norm, rms_norm


class Norm(nnx.Module):
    """Normalises the last axis.

    RMSNorm (`rms`), the same with factors `1 + scale` (`rms_plus_one`), LayerNorm (`layer`), the same without bias
    (`layer_unbiased`), or `none`.

    A shape (H, d) instead of a width d gives each of H heads scales of its own, in a LayerNorm without bias.
    """

    def __init__(self, kind: str, shape: int | tuple[int, ...], eps: float, *, dtype: jnp.dtype):
        self.kind = kind
        self.eps = eps
        if kind != "none":
            self.scale = nnx.Param((jnp.zeros if kind == "rms_plus_one" else jnp.ones)(shape, dtype))
        if kind == "layer":
            self.bias = nnx.Param(jnp.zeros(shape, dtype))

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        if self.kind == "none":
            return x
        if self.kind == "layer":
            return layer_norm(x, self.scale[...], self.bias[...], self.eps)
        if self.kind == "layer_unbiased":
            return layer_norm(x, self.scale[...], None, self.eps)
        return rms_norm(x, self.scale[...], self.eps, plus_one=self.kind == "rms_plus_one")


class FFN(nnx.Module):
    """A dense feed-forward network."""

    def __init__(self, config: FFNConfig, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        for name, one in ffn_linears(config, d_model, bias=config.bias, rngs=rngs, dtype=dtype).items():
            setattr(self, name, one)

    def __call__(self, x: Float[Array, "... d"], key: Array | None = None) -> Float[Array, "... d"]:
        linears = {name: getattr(self, name) for name in self.config.matrices}
        return apply_ffn(linears, x, self.config.activation, key)
