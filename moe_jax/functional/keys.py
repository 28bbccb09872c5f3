"""Random keys of a forward pass, and what is drawn by them: dropout, stochastic rounding.

A pass has one key; None is that of a pass without randomness, as in evaluation. The key of a layer is the pass's key
folded with the index of the layer, and everything random in a layer folds the layer's key with a number of its own. So
no draw depends on another draw, nor on how layers are stacked.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float

# One number for each random part of a layer.
ROUTER_NOISE, ATTENTION, FFN, EXPERTS, PERFT, CROSS_ATTENTION = range(6)
# The key of an encoder: the key of the pass, folded with a number that no layer has.
ENCODER = 2**31 - 1


def fold_in(key: Array | None, data: int | Array) -> Array | None:
    """Returns `jax.random.fold_in(key, data)`, or None if the key is None."""
    return None if key is None else jax.random.fold_in(key, data)


def dropout(x: Float[Array, "..."], rate: float, key: Array | None) -> Float[Array, "..."]:
    """Sets entries to zero with probability `rate`, divides the others by `1 - rate`; without a key, does nothing."""
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))


def round_stochastically(x: Float[Array, "*n"], key: Array) -> BFloat16[Array, "*n"]:
    """Rounds float32 to bfloat16 up or down, each with a probability that makes the mean `x`.

    A weight in bfloat16 has steps of 2^-8 of its size. A smaller update is lost if it is rounded to the nearest number,
    every time; rounded so it takes the whole step with the probability that is its share of one (Gupta et al. 2015,
    arXiv:1502.02551, section 3; for bfloat16 training Zamirai et al. 2020, arXiv:2010.06192, section 4).

    Numbers of bfloat16 stay as they are, infinities and NaN too; the same key gives the same result on every mesh.

    Args:
      x: float32.
      key: random key.
    """
    # A bfloat16 is the upper half of a float32. A random number added to the lower half carries with a probability in
    # proportion to the lower half.
    bits = lax.bitcast_convert_type(x, jnp.uint32) + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    upper = lax.shift_right_logical(bits, jnp.full(x.shape, 16, jnp.uint32)).astype(jnp.uint16)
    return jnp.where(jnp.isfinite(x), lax.bitcast_convert_type(upper, jnp.bfloat16), x.astype(jnp.bfloat16))
