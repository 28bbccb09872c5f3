"""Rounding: of lengths up to few sizes, and of float32 to bfloat16 at random."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float


def bucket(length: int, *, least: int = 16) -> int:
    """Returns the smallest of `least`, 1.5 `least`, 2 `least`, 3 `least`, 4 `least`, ... that is at least `length`.

    Args:
      length: at least 1.
      least: an even number.
    """
    size = least
    while size < length:
        if 3 * size // 2 >= length:
            return 3 * size // 2
        size *= 2
    return size


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
