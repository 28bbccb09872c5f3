import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def dropout(x: Float[Array, "..."], rate: float, key: Array | None) -> Float[Array, "..."]:
    """Sets entries to zero with probability `rate`, divides the others by `1 - rate`; without a key, does nothing."""
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))
