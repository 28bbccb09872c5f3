"""Choosing the next token from logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


def sample(
    logits: Float[Array, "B V"],
    key: PRNGKeyArray,
    *,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int | None = None,
    top_p: float | Float[Array, ""] | None = None,
) -> Int[Array, " B"]:
    """Samples one token per row.

    Args:
      logits: float32.
      key: random key; unused when greedy.
      temperature: divides the logits; 0, as a number and not as an array, is greedy.
      top_k: keep this many of the largest logits; None: all.
      top_p: then keep the smallest set of tokens whose probabilities sum to at least `top_p`
        (Holtzman et al., 2020); None: all. The most likely token is always kept.
    """
    if isinstance(temperature, float | int) and temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    lowest = jnp.finfo(logits.dtype).min
    if top_k is not None and top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < threshold, lowest, logits)
    if top_p is not None:
        descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # Rounded, the sum may come to 1 before the last token.
        kept = jnp.sum((before < top_p) | (top_p >= 1.0), axis=-1, keepdims=True)
        threshold = jnp.take_along_axis(descending, jnp.maximum(kept - 1, 0), axis=-1)
        logits = jnp.where(logits < threshold, lowest, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
