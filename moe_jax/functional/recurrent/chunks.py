"""Chunks of tokens, over which recurrences run: documents, decays and products of all of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

CHUNK = 64
"""Tokens of a chunk. Shorter ones leave more steps to the recurrence, longer ones more work between tokens."""


def document_begins(documents: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Whether a document begins at a token, one before it in the row having ended; padding between them is passed."""
    indices = jnp.arange(documents.shape[1], dtype=jnp.int32)[None]
    last = jax.lax.cummax(jnp.where(documents > 0, indices, -1), axis=1)
    before = jnp.concatenate([jnp.full_like(last[:, :1], -1), last[:, :-1]], axis=1)
    of_before = jnp.take_along_axis(documents, jnp.maximum(before, 0), axis=1)
    return (documents > 0) & (before >= 0) & (of_before != documents)


def zero_at_padding(of_tokens: Float[Array, "B T *S"], documents: Int[Array, "B T"]) -> Float[Array, "B T *S"]:
    """Returns what belongs to tokens, with zeros where the document is 0."""
    counted = jnp.expand_dims(documents > 0, tuple(range(2, of_tokens.ndim)))
    return jnp.where(counted, of_tokens, jnp.zeros((), of_tokens.dtype))


# Below it, the exponential is 0 in float32; a chunk of such decays has an exact sum on a grid of 1/256.
_LEAST_DECAY = -256.0


class Decays(NamedTuple):
    """The shares that are left of what tokens of a chunk add, in float32.

    Attributes:
      between: when a token reads what another one before it has added; 0 for those that come later.
      since: of what there was before the chunk, when a token reads it.
      until: of what a token adds, after the chunk.
    """

    between: Float[Array, "... C C"]
    since: Float[Array, "... C"]
    until: Float[Array, "... C"]


def decays_of(log_decay: Float[Array, "... C"], is_before: Bool[Array, "... C C"]) -> Decays:
    """Returns the decays within a chunk; `is_before` says of a token which ones it may read, itself among them.

    Sums up to every token are made in two parts, whose differences are as exact as what is summed: the first has
    multiples of 1/256, which float32 adds without rounding; the second has what is left, and the gradient. The rounding
    of plain sums would grow with all that was forgotten before.
    """
    log_decay = jnp.maximum(log_decay, _LEAST_DECAY)
    multiples = jax.lax.stop_gradient(jnp.round(log_decay * 256.0) / 256.0)
    coarse, fine = jnp.cumsum(multiples, axis=-1), jnp.cumsum(log_decay - multiples, axis=-1)
    passed = (coarse[..., :, None] - coarse[..., None, :]) + (fine[..., :, None] - fine[..., None, :])
    return Decays(
        # Masked before the exponential: decays from later tokens to earlier ones may be too large for a float.
        between=jnp.exp(jnp.where(is_before, passed, -jnp.inf)),
        since=jnp.exp(coarse + fine),
        until=jnp.exp((coarse[..., -1:] - coarse) + (fine[..., -1:] - fine)),
    )


def product_in(pattern: str, x: Array, y: Array, dtype: DTypeLike) -> Float[Array, "..."]:
    """Returns a product of float32 arrays, of operands rounded to a dtype, summed in float32."""
    precision = "highest" if jnp.dtype(dtype) == jnp.float32 else None
    operands = (one.astype(dtype) for one in (x, y))
    return jnp.einsum(pattern, *operands, precision=precision, preferred_element_type=jnp.float32)
