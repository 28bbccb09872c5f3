"""Choosing the next token from logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from moe_jax.core.errors import InputError


def sample(
    logits: Float[Array, "B V"],
    key: PRNGKeyArray,
    *,
    temperature: float | Float[Array, " B"] = 1.0,
    top_k: int | Int[Array, " B"] | None = None,
    top_p: float | Float[Array, " B"] | None = None,
) -> Int[Array, " B"]:
    """Samples one token per row. Nothing is drawn if no row asks for it, and nothing sorted if no row needs it.

    Args:
      logits: float32.
      key: random key of the whole batch; or one for every row, which is then given what it would be given alone.
      temperature: divides the logits; 0 is greedy. This and what follows: for all rows, or of every row.
      top_k: keep this many of the largest logits; None: all.
      top_p: then keep the smallest set of tokens whose probabilities sum to at least `top_p`
        (Holtzman et al., 2020); None: all. The most likely token is always kept.

    Raises:
      InputError: if one number, for all rows, is out of range: a temperature below 0, a `top_k` below 1, a `top_p` that
        is not between 0 and 1. Of arrays, the values are not looked at.
    """
    if isinstance(temperature, float | int) and not temperature >= 0:
        raise InputError(f"temperature={temperature} must be at least 0")
    if isinstance(top_k, int) and top_k < 1:
        raise InputError(f"top_k={top_k} must be at least 1")
    if isinstance(top_p, float | int) and not 0 <= top_p <= 1:
        raise InputError(f"top_p={top_p} must lie between 0 and 1")
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if isinstance(temperature, float | int) and temperature == 0:
        return best
    rows, size = logits.shape
    heat = jnp.broadcast_to(jnp.asarray(temperature, logits.dtype), (rows,))
    count = jnp.broadcast_to(jnp.asarray(size if top_k is None else top_k, jnp.int32), (rows,))
    share = jnp.broadcast_to(jnp.asarray(1.0 if top_p is None else top_p, logits.dtype), (rows,))

    def drawn() -> Int[Array, " B"]:
        # Below the largest, so that dividing by little makes no infinity of it.
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        scaled = below / jnp.where(heat > 0, heat, 1.0)[:, None]
        if not (top_k is None and top_p is None):
            some = jnp.any((count < size) | (share < 1.0))
            scaled = jax.lax.cond(some, lambda: _most_likely(scaled, count, share), lambda: scaled)
        is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)  # an old key is an array of two numbers
        draw = jax.vmap(jax.random.categorical) if key.ndim > (0 if is_typed else 1) else jax.random.categorical
        return jnp.where(heat > 0, draw(key, scaled).astype(jnp.int32), best)

    return jax.lax.cond(jnp.any(heat > 0), drawn, lambda: best)


def _most_likely(
    logits: Float[Array, "B V"], count: Int[Array, " B"], share: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """The logits, with the lowest number in place of those that `top_k` and `top_p` drop."""
    size, lowest = logits.shape[-1], jnp.finfo(logits.dtype).min
    descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    threshold = jnp.take_along_axis(descending, jnp.minimum(count, size)[:, None] - 1, axis=-1)
    logits, descending = (jnp.where(one < threshold, lowest, one) for one in (logits, descending))
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # Rounding can make the sum reach 1 before the last token.
    kept = jnp.sum((before < share[:, None]) | (share[:, None] >= 1.0), axis=-1, keepdims=True)
    threshold = jnp.take_along_axis(descending, jnp.maximum(kept - 1, 0), axis=-1)
    return jnp.where(logits < threshold, lowest, logits)
