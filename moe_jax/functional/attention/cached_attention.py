"""Attention of a few queries to the keys and values in a cache, which are read in place and never copied."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moe_jax.functional.attention.grouped_query import Visibility
from moe_jax.functional.attention.relative_bias import bias_between

# More queries at a time belong in `functional.attention.grouped_query`, which takes them in chunks.
MOST_QUERIES = 16


def cached_attention(
    parts: Sequence[tuple[Float[Array, "B T H D"], Float[Array, "B K S D"]]],
    v: Float[Array, "B K S W"],
    visible: Visibility,
    *,
    mask: str,
    window: int | None,
    scale: float | None,
    soft_cap: float | None = None,
    bias: Float[Array, "H n"] | None = None,
) -> Float[Array, "B T H W"]:
    """Returns softmax attention, as `functional.attention.grouped_query.attention` does, in the dtype of the queries.

    Args:
      parts: pairs of queries and keys, one pair for every array that holds part of the width of the heads; the
        products of the pairs are added up to the scores.
      v: values.
      visible: positions and documents; see `Visibility`.
      mask, window, soft_cap, bias: as `grouped_query.attention` takes them.
      scale: of the scores; None: 1/sqrt(D), where D is the sum of the widths of the parts.
    """
    batch, length, heads, _ = parts[0][0].shape
    kv_heads = v.shape[1]
    group = heads // kv_heads

    def scores_of(q: Array, k: Array) -> Float[Array, "B K m S"]:
        q = q.reshape(batch, length, kv_heads, group, -1).transpose(0, 2, 3, 1, 4)
        return _product(q.reshape(batch, kv_heads, group * length, -1), k.astype(q.dtype), contract_keys=False)

    scores = functools.reduce(jnp.add, [scores_of(*part) for part in parts])
    if scale is None:
        scale = 1 / math.sqrt(sum(q.shape[-1] for q, _ in parts))
    scores = scores.reshape(batch, kv_heads, group, length, -1) * jnp.float32(scale)
    if soft_cap is not None:
        scores = jnp.tanh(scores / jnp.float32(soft_cap)) * jnp.float32(soft_cap)
    if bias is not None:
        between = jax.vmap(bias_between, in_axes=(None, 0, 0))(bias, visible.positions, visible.key_positions)
        scores = scores + between.reshape(batch, kv_heads, group, length, -1)
    scores = jnp.where(_mask(visible, mask, window)[:, None, None], scores, jnp.finfo(jnp.float32).min)
    dtype = parts[0][0].dtype
    shares = jax.nn.softmax(scores, axis=-1).astype(dtype).reshape(batch, kv_heads, group * length, -1)
    y = _product(shares, v.astype(dtype), contract_keys=True).astype(dtype)
    y = y.reshape(batch, kv_heads, group, length, -1).transpose(0, 3, 1, 2, 4)
    return y.reshape(batch, length, heads, -1)


def _product(a: Array, b: Array, *, contract_keys: bool) -> Float[Array, "B K m n"]:
    dimensions = (((3,), (2 if contract_keys else 3,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _mask(visible: Visibility, mask: str, window: int | None) -> Bool[Array, "B T S"]:
    keys = visible.key_positions[:, None, :]
    distance = visible.positions[:, :, None] - keys
    seen = jnp.ones_like(distance, bool) if mask == "bidirectional" else distance >= 0
    if mask == "prefix":
        assert visible.prefix is not None
        seen |= keys < visible.prefix[:, None, None]
    if window is not None:
        seen &= jnp.abs(distance) < window
    if visible.segments is not None:
        assert visible.key_segments is not None
        seen &= visible.segments[:, :, None] == visible.key_segments[:, None, :]
    return seen
