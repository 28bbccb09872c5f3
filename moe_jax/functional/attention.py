"""Grouped-query attention with causal, sliding-window and packed-document masks.

Queries are taken in chunks, and a chunk meets only the keys it can see: half the arithmetic of a causal
product, and scores that stay in the cache of a CPU core. Scores are recomputed in the backward pass
instead of being kept, so memory grows with the length and not with its square times layers.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CHUNK = 128


class Visibility(NamedTuple):
    """Who sees whom: a key not after the query, within the window, of the query's own document.

    Attributes:
      places, key_places: places in the row (not in the document).
      segments, key_segments: document of every token; None: one document a row.
    """

    places: Int[Array, "B T"]
    key_places: Int[Array, "B S"]
    segments: Int[Array, "B T"] | None = None
    key_segments: Int[Array, "B S"] | None = None


def attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    visible: Visibility,
    *,
    window: int | None = None,
    aligned: bool,
) -> Float[Array, "B T H D"]:
    """Softmax attention scaled by 1/sqrt(D); scores and softmax in float32.

    Args:
      q, k, v: H is a multiple of K; consecutive query heads share a key head.
      visible: see `Visibility`.
      window: how many positions a query sees, itself included; None: all.
      aligned: query t and key s have places t and s (no cache), so that keys after a chunk of
        queries, or before its window, need not be looked at.
    """
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    q = q * jnp.asarray(1 / math.sqrt(width), q.dtype)
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, width).transpose(0, 2, 3, 1, 4)
    k, v = (a.transpose(0, 2, 1, 3) for a in (k, v))
    one_head = partial(_one_key_head, window=window, aligned=aligned)
    y = jax.lax.platform_dependent(
        q, k, v, visible, cpu=partial(_loop_over_heads, one_head), default=partial(_all_heads_at_once, one_head)
    )
    return y.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width)


def _all_heads_at_once(one_head, q: Array, k: Array, v: Array, visible: Visibility) -> Float[Array, "B K G T D"]:
    heads = jax.vmap(jax.checkpoint(one_head), in_axes=(0, 0, 0, None))
    return jax.vmap(heads)(q, k, v, visible)


def _loop_over_heads(one_head, q: Array, k: Array, v: Array, visible: Visibility) -> Float[Array, "B K G T D"]:
    """XLA:CPU has no good kernel for a product with two batch axes: one head after another is three times faster."""
    row = jax.checkpoint(one_head)
    return jax.lax.map(lambda r: jax.lax.map(lambda h: row(*h, r[3]), r[:3]), (q, k, v, visible))


def _one_key_head(
    q: Float[Array, "G T D"],
    k: Float[Array, "S D"],
    v: Float[Array, "S D"],
    visible: Visibility,
    *,
    window: int | None,
    aligned: bool,
) -> Float[Array, "G T D"]:
    group, length, width = q.shape
    chunks = []
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        first = max(0, start - window + 1) if aligned and window is not None else 0
        last = stop if aligned else k.shape[0]
        mask = _mask(visible, slice(start, stop), slice(first, last), window)
        rows = q[:, start:stop].reshape(-1, width)
        scores = jax.lax.dot_general(
            rows, k[first:last], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        ).reshape(group, stop - start, last - first)
        scores = jnp.where(mask[None], scores, jnp.finfo(jnp.float32).min)
        shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(-1, last - first)
        chunks.append((shares @ v[first:last]).reshape(group, stop - start, width))
    return jnp.concatenate(chunks, axis=1)


def _mask(visible: Visibility, queries: slice, keys: slice, window: int | None) -> Bool[Array, "t s"]:
    """Visibility of one row of the batch."""
    distance = visible.places[queries, None] - visible.key_places[None, keys]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if visible.segments is not None:
        assert visible.key_segments is not None
        mask &= visible.segments[queries, None] == visible.key_segments[None, keys]
    return mask
