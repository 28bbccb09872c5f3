"""The decoder: one model for every family, described by a `ModelConfig`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.errors import check_member
from moe_jax.experts.parallel import BATCH_AXES, axes_size
from moe_jax.functional.attention import Visibility
from moe_jax.functional.linear import linear
from moe_jax.functional.rope import rope_tables
from moe_jax.models.config import ModelConfig
from moe_jax.models.segments import segments_of
from moe_jax.nn.attention import KVCache
from moe_jax.nn.block import REMAT_POLICIES, BlockStack, Context
from moe_jax.nn.layers import Embedding, Linear, Norm
from moe_jax.nn.router_stats import StackedStats

Caches = tuple[tuple[KVCache, ...], ...]
"""Per segment, per block of its pattern: keys and values stacked over the repeats."""


class DecoderOutput(NamedTuple):
    """Attributes:
    logits: float32; of the last position only, if asked for.
    caches: updated caches, or None without caches.
    router: what the routers did (see `StackedStats`).
    """

    logits: Float[Array, "B T V"]
    caches: Caches | None
    router: StackedStats


class Decoder(nnx.Module):
    """A decoder-only transformer whose layers are stacked and scanned where they repeat.

    Attributes:
      config: the description it was built from.
      compute_dtype: dtype of the activations; parameters keep their own and are cast where they are used.
      remat: what the backward pass recomputes: `none`, `dots` (all but matrix products) or `full`.
    """

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, compute_dtype: jnp.dtype = jnp.float32, remat: str = "none"
    ):
        check_member("remat", remat, ("none", *REMAT_POLICIES))
        dtype = jnp.dtype(config.dtype)
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.remat = remat
        self.embed = Embedding(config.vocab_size, config.d_model, rngs=rngs, dtype=dtype)
        self.segments = nnx.List(
            [BlockStack(segment, config, rngs=rngs, dtype=dtype) for segment in segments_of(config.layers)]
        )
        self.final_norm = Norm(config.norm, config.d_model, config.norm_eps, dtype=dtype)
        if not config.tie_embeddings:
            shape = (config.d_model, config.vocab_size)
            self.lm_head = Linear(shape, bias=config.head_bias, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        caches: Caches | None = None,
        last_only: Int[Array, " B"] | None = None,
        key: Array | None = None,
    ) -> DecoderOutput:
        """Next-token logits.

        Args:
          tokens: token ids.
          positions: rotary position of every token; default 0, 1, ... With caches it is also the slot that
            the token takes, and a query sees the slots up to its own.
          segment_ids: document of every token when several are packed in a row; attention stays inside a
            document and 0 marks padding. Not with caches.
          caches: from `init_cache`, to continue a row.
          last_only: index of the one position per row whose logits are wanted; None: all.
          key: of all that is random in training (the noise of `coder` routers); None, as at evaluation: nothing is.
        """
        batch, length = tokens.shape
        places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], (batch, length))
        if positions is None:
            positions = places
        if caches is None:
            key_places = places
        else:
            assert segment_ids is None, "packed documents have no cache"
            places = positions
            slots = caches[0][0].k.shape[2]
            key_places = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32)[None, :], (batch, slots))
        attention = self.config.layers[0].attention
        rope = rope_tables(self.config.rope, attention.head_dim, self.config.max_positions, positions)
        valid = None if segment_ids is None else segment_ids > 0
        context = Context(rope, Visibility(places, key_places, segment_ids, segment_ids), valid)

        embedding = _whole_rows(self.embed.embedding[...])
        x = _shard_batch(jnp.take(embedding, tokens, axis=0).astype(self.compute_dtype))
        new_caches, router = [], []
        for index, segment in enumerate(self.segments):
            x, cache, stats = segment(x, context, None if caches is None else caches[index], self.remat, key)
            x = _shard_batch(x)
            new_caches.append(cache)
            router.extend(stats)
        if last_only is not None:
            x = jnp.take_along_axis(x, last_only[:, None, None], axis=1)
        logits = self._head(self.final_norm(x)).astype(jnp.float32)
        return DecoderOutput(logits, None if caches is None else tuple(new_caches), tuple(router))

    def _head(self, x: Float[Array, "B T d"]) -> Float[Array, "B T V"]:
        if not self.config.tie_embeddings:
            return self.lm_head(x)
        return linear(x, self.embed.embedding[...].T)


def init_cache(config: ModelConfig, batch: int, slots: int, dtype: jnp.dtype) -> Caches:
    """Empty caches for `batch` rows of at most `slots` positions."""

    def cache(segment, layer) -> KVCache:
        shape = (segment.repeats, batch, slots, layer.attention.num_kv_heads, layer.attention.head_dim)
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    return tuple(tuple(cache(s, layer) for layer in s.pattern) for s in segments_of(config.layers))


def _whole_rows(embedding: Float[Array, "V d"]) -> Float[Array, "V d"]:
    """Over a mesh, an embedding is gathered over `fsdp` before tokens are looked up.

    Looked up in slices of `d`, activations would have to change from a split width to a split batch, for which the
    compiler knows nothing better than to copy the whole batch to every device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return embedding
    return jax.lax.with_sharding_constraint(embedding, P("tensor", None))


def _shard_batch(x: Float[Array, "B T d"]) -> Float[Array, "B T d"]:
    """Over a mesh, the batch is split over every axis but `tensor`, where it divides."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    split = x.shape[0] % axes_size(mesh, *BATCH_AXES) == 0
    return jax.lax.with_sharding_constraint(x, P(BATCH_AXES if split else None, None, None))
