"""Normalisation, computed in float32 and returned in the dtype of the input."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def _along_last(array: Float[Array, "*axes d"], ndim: int) -> Float[Array, "... d"]:
    return jnp.expand_dims(array.astype(jnp.float32), tuple(range(ndim - array.ndim)))


def rms_norm(
    x: Float[Array, "... d"], scale: Float[Array, " d"], eps: float, *, plus_one: bool = False
) -> Float[Array, "... d"]:
    """Root-mean-square norm over the last axis (Zhang & Sennrich, 2019), times `scale`.

    Args:
      x: the input.
      scale: one factor per element of the last axis.
      eps: added to the mean square.
      plus_one: the factors are `1 + scale`, added in float32 (Gemma).
    """
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    factors = _along_last(scale, x.ndim)
    return (x32 * inverse * (1.0 + factors if plus_one else factors)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "... d"], scale: Float[Array, "*axes d"], bias: Float[Array, " d"] | None, eps: float
) -> Float[Array, "... d"]:
    """Layer norm over the last axis (Ba et al., 2016). A scale with several axes varies along those axes of `x`."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    y = centred * inverse * _along_last(scale, x.ndim)
    return (y if bias is None else y + _along_last(bias, x.ndim)).astype(x.dtype)
