"""Embedding, linear, norm and FFN: modules that own parameters and nothing else."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.bank import Weights, normal_kernel
from moe_jax.experts.config import FFNConfig
from moe_jax.functional.ffn import ffn
from moe_jax.functional.linear import linear
from moe_jax.functional.norms import layer_norm, rms_norm


class Linear(Weights):
    """`x W + b`; kernel [in, out]."""

    def __init__(self, shape: tuple[int, int], *, bias: bool = False, rngs: nnx.Rngs, dtype: jnp.dtype):
        super().__init__(normal_kernel(rngs, shape, dtype), jnp.zeros(shape[1], dtype) if bias else None)
        self.has_bias = bias

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        return linear(x, self.kernel[...], self.bias[...] if self.has_bias else None)


class Norm(nnx.Module):
    """RMSNorm (`rms`) or LayerNorm with bias (`layer`) over the last axis."""

    def __init__(self, kind: str, width: int, eps: float, *, dtype: jnp.dtype):
        self.kind = kind
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width, dtype))
        if kind == "layer":
            self.bias = nnx.Param(jnp.zeros(width, dtype))

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        if self.kind == "layer":
            return layer_norm(x, self.scale[...], self.bias[...], self.eps)
        return rms_norm(x, self.scale[...], self.eps)


class FFN(nnx.Module):
    """A dense feed-forward network."""

    def __init__(self, config: FFNConfig, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        for name, shape in config.shapes(d_model).items():
            setattr(self, name, Linear(shape, bias=config.bias, rngs=rngs, dtype=dtype))

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        linears = {name: getattr(self, name) for name in self.config.matrices}
        kernels = {name: one.kernel[...] for name, one in linears.items()}
        biases = {name: one.bias[...] for name, one in linears.items()} if self.config.bias else {}
        return ffn(x, kernels, biases, self.config.activation)


class Embedding(nnx.Module):
    """Token embedding [V, d]."""

    def __init__(self, vocab_size: int, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.embedding = nnx.Param(normal_kernel(rngs, (vocab_size, d_model), dtype))
