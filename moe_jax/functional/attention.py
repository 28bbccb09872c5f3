"""Grouped-query attention with causal, sliding-window and packed-document masks."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def attention_mask(
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    *,
    window: int | None = None,
    query_segments: Int[Array, "B T"] | None = None,
    key_segments: Int[Array, "B S"] | None = None,
) -> Bool[Array, "B T S"]:
    """What a query may see: keys not after it, within the window, of its own document.

    Args:
      query_positions, key_positions: places in the row (not in the document).
      window: how many positions a query sees, itself included; None: all.
      query_segments, key_segments: document of every token; None: one document.
    """
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if query_segments is not None:
        assert key_segments is not None
        mask &= query_segments[:, :, None] == key_segments[:, None, :]
    return mask


def attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T H D"]:
    """Softmax attention scaled by 1/sqrt(D); H is a multiple of K. Scores and softmax in float32."""
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    # [B K G T D] x [B K S D]: the queries of a group meet their key head without repeating it.
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, width) * jnp.asarray(1 / math.sqrt(width), q.dtype)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None, :, :], scores, jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", shares, v).reshape(batch, length, heads, width)
