"""Choosing the next token from logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32


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
        # Rounding can make the sum reach 1 before the last token.
        kept = jnp.sum((before < top_p) | (top_p >= 1.0), axis=-1, keepdims=True)
        threshold = jnp.take_along_axis(descending, jnp.maximum(kept - 1, 0), axis=-1)
        logits = jnp.where(logits < threshold, lowest, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def sample_rows(
    logits: Float[Array, "B V"],
    seeds: UInt32[Array, " B"],
    steps: Int[Array, " B"],
    temperature: Float[Array, " B"],
    top_p: Float[Array, " B"],
    *,
    greedy: bool = False,
    has_top_p: bool = True,
) -> Int[Array, " B"]:
    """Samples one token per row, every row with its own seed and options: as `sample` would from this row alone.

    Args:
      logits: float32.
      seeds: of the rows' random keys.
      steps: folded into the keys.
      temperature: divides the logits; 0 is greedy.
      top_p: see `sample`; 1: all.
      greedy: whether every temperature is 0, so that no random number is needed.
      has_top_p: whether any `top_p` is below 1, so that tokens have to be sorted.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if greedy:
        return best

    def row(logits: Array, seed: Array, step: Array, temperature: Array, top_p: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), step)
        return sample(logits[None], key, temperature=temperature, top_p=top_p if has_top_p else None)[0]

    drawn = jax.vmap(row)(logits, seeds, steps, jnp.where(temperature > 0, temperature, jnp.float32(1.0)), top_p)
    return jnp.where(temperature > 0, drawn, best)
