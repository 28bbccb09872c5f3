"""Caches of attention: keys and values of the tokens of a row so far, for the tokens after them.

A cache of S slots holds the token at position p in slot `p mod S`. A cache with a slot for every position of the row
holds the row in order; a shorter one is a ring, in which a token overwrites the one S positions before it.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.experts.layout.mesh import current_mesh, shard_cache
from moe_jax.kernels.hardware import bucket
from moe_jax.models.config import AttentionConfig, LayerConfig, ModelConfig
from moe_jax.models.segments import Segment, segments_of, single_layers


class KVCache(NamedTuple):
    """Keys (rotated) and values of one layer.

    Attributes:
      cross: the cache of cross-attention, where slot s holds token s of the encoder's output; None: it has none.
    """

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    cross: "KVCache | None" = None


class LatentCache(NamedTuple):
    """Latents (normed) and shared keys (rotated) of one layer. It never has a cache of cross-attention."""

    latent: Float[Array, "B S r"]
    key: Float[Array, "B S p"]
    cross: None = None


Cache = KVCache | LatentCache
Caches = tuple[tuple[Cache, ...], ...]
"""Per segment, one cache per block of its pattern, with arrays stacked over the repeats."""


class Slots(NamedTuple):
    """The slots in caches that the tokens of a call are written to.

    Attributes:
      positions: of the tokens.
      last: for every row, the position of the last token that is not padding.
      begins: whether the rows begin with this call, so that its tokens see each other and nothing in the caches.
    """

    positions: Int[Array, "B T"]
    last: Int[Array, " B"]
    begins: bool

    def key_positions(self, size: int) -> Int[Array, "B S"]:
        """Returns the position of the token in each of `size` slots after this call; a later one for empty slots."""
        slot = jnp.arange(size, dtype=jnp.int32)[None, :]
        behind = (self.last[:, None] - slot) % size
        return jnp.where(behind <= self.last[:, None], self.last[:, None] - behind, slot)

    def write(self, cache: Float[Array, "B *H S w"], tokens: Float[Array, "B *H T w"]) -> Float[Array, "B *H S w"]:
        """Returns a cache, with or without an axis of heads, with the tokens of this call written to it."""
        return shard_cache(self._written(cache, tokens))

    def _written(self, cache: Float[Array, "B *H S w"], tokens: Float[Array, "B *H T w"]) -> Float[Array, "B *H S w"]:
        size, length, axis = cache.shape[-2], tokens.shape[-2], cache.ndim - 2
        tokens = tokens.astype(cache.dtype)
        if not self.begins:
            if length == 1:
                put, at = _put_tokens, self.positions[:, 0] % size
                if current_mesh() is None:
                    put = partial(jax.lax.platform_dependent, cpu=_put_one_by_one, default=_put_tokens)
                return put(cache, tokens, at)
            rows = jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None]
            moved = jnp.moveaxis(cache, axis, 1).at[rows, self.positions % size].set(jnp.moveaxis(tokens, axis, 1))
            return jnp.moveaxis(moved, 1, axis)
        if length <= size:
            return jax.lax.dynamic_update_slice_in_dim(cache, tokens, 0, axis)
        kept = jnp.expand_dims(self.key_positions(size), (*range(1, axis), axis + 1))
        return jnp.take_along_axis(tokens, kept, axis=axis)


def _put_tokens(cache: Array, tokens: Array, slots: Int[Array, " B"]) -> Array:
    axis = cache.ndim - 2
    put = jax.vmap(lambda row, token, at: jax.lax.dynamic_update_slice_in_dim(row, token, at, axis - 1))
    return put(cache, tokens, slots)


def _put_one_by_one(cache: Array, tokens: Array, slots: Int[Array, " B"]) -> Array:
    """Does the same as a loop, which XLA:CPU leaves as it is.

    XLA:CPU would fuse a plain update with everything that reads the cache afterwards, each time with a copy of the
    cache.
    """

    def put(row: Array, cache: Array) -> Array:
        token = jax.lax.dynamic_slice_in_dim(tokens, row, 1, 0)
        zero = jnp.zeros((), jnp.int32)
        return jax.lax.dynamic_update_slice(cache, token, (row, *[zero] * (cache.ndim - 3), slots[row], zero))

    # A loop with a known single turn would be unrolled; slots are never negative, but the compiler does not know it.
    rows = jnp.where(slots[0] >= 0, jnp.int32(cache.shape[0]), jnp.int32(0))
    return jax.lax.fori_loop(jnp.int32(0), rows, put, cache)


def init_cache(
    config: ModelConfig,
    batch: int,
    slots: int,
    dtype: jnp.dtype,
    *,
    source_slots: int | None = None,
    stacked: bool = True,
    rings: bool = False,
) -> Caches:
    """Returns empty caches for a decoder.

    Args:
      config: of the model.
      batch: rows.
      slots: most tokens of a row.
      dtype: of the caches.
      source_slots: tokens of the encoder's output, for cross-attention: the first call with the caches is given the
        output, and later ones find its keys and values in the caches. None: every call is given it.
      stacked: for a model whose layers are stacked, as they are unless they were unstacked (`nn.unstacked`).
      rings: layers with a sliding window have only the slots that the window needs. The first call then must begin the
        rows (`begins`), and later calls must have one token per row.
    """
    segments = segments_of(config.decoder.layers)

    def empty(repeats: int, length: int, attention: AttentionConfig) -> Cache:
        latent = attention.latent
        if rings and attention.sliding_window is not None:
            length = min(length, bucket(attention.sliding_window))
        if latent is not None:
            lead = (repeats, batch, length)
            return LatentCache(jnp.zeros((*lead, latent.kv_rank), dtype), jnp.zeros((*lead, latent.rope_dim), dtype))
        shape = (repeats, batch, attention.num_kv_heads, length, attention.head_dim)
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def cache(segment: Segment, layer: LayerConfig) -> Cache:
        own = empty(segment.repeats, slots, layer.attention)
        if layer.cross is None or source_slots is None:
            return own
        assert isinstance(own, KVCache), "latent attention goes without cross-attention"
        return own._replace(cross=empty(segment.repeats, source_slots, layer.cross))

    return tuple(
        tuple(cache(segment, layer) for layer in segment.pattern)
        for segment in (segments if stacked else single_layers(segments))
    )


def longest_row(caches: Caches | None) -> int | None:
    """Returns the slots of the longest cache, stacked or not; None without caches."""
    if caches is None:
        return None
    return max(cache[0].shape[-2] for segment in caches for cache in segment)


def source_slots(caches: Caches | None) -> int | None:
    """Returns how many tokens of the encoder's output the caches have room for; None: they hold nothing of it."""
    every = (cache for segment in caches or () for cache in segment if isinstance(cache, KVCache))
    found = [cache.cross.k.shape[-2] for cache in every if cache.cross is not None]
    return found[0] if found else None
