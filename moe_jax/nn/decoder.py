"""The decoder: one model for every family, described by a `ModelConfig`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from moe_jax.errors import check_member
from moe_jax.experts.parallel import BATCH_AXES, axes_size
from moe_jax.functional.attention import Visibility
from moe_jax.functional.linear import linear_float32
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

        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> decoder = moe_jax.Decoder(moe_jax.tiny_model(experts=4).config, rngs=nnx.Rngs(0))
        >>> decoder(jnp.zeros((2, 5), jnp.int32)).logits.shape
        (2, 5, 64)

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
        valid: Bool[Array, "B T"] | None = None,
        caches: Caches | None = None,
        last_only: Int[Array, " B"] | None = None,
        key: Array | None = None,
    ) -> DecoderOutput:
        """Next-token logits.

        Args:
          tokens: token ids.
          positions: position of every token in its document; default 0, 1, ... With caches it is also the slot that
            the token takes, and a query sees the slots up to its own.
          segment_ids: document of every token when several are packed in a row, counted from 1; attention stays inside
            a document and 0 marks padding. Not with caches.
          valid: tokens that are not padding, after which only padding may follow; None: those of a document, or all.
          caches: from `init_cache`, to continue a row.
          last_only: index of the one position per row whose logits are wanted; None: all.
          key: of all that is random in training (the noise of `coder` routers); None, as at evaluation: nothing is.
        """
        context = self._context(tokens.shape, positions, segment_ids, valid, caches)
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
        logits = self._head(self.final_norm(x))
        return DecoderOutput(logits, None if caches is None else tuple(new_caches), tuple(router))

    def _context(
        self,
        shape: tuple[int, int],
        positions: Int[Array, "B T"] | None,
        segments: Int[Array, "B T"] | None,
        valid: Bool[Array, "B T"] | None,
        caches: Caches | None,
    ) -> Context:
        in_row = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32)[None, :], shape)
        positions = in_row if positions is None else positions
        if caches is None:
            visible = Visibility(in_row, in_row, segments, segments)
        else:
            assert segments is None, "packed documents have no cache"
            num_slots = caches[0][0].k.shape[2]
            slots = jnp.broadcast_to(jnp.arange(num_slots, dtype=jnp.int32)[None, :], (shape[0], num_slots))
            visible = Visibility(positions, slots)
        if valid is None and segments is not None:
            valid = segments > 0
        if segments is None and valid is not None:
            segments = valid.astype(jnp.int32)
        rope, limit = self.config.rope, self.config.max_positions
        widths = {layer.attention.head_dim for layer in self.config.layers}
        tables = {(rope, width): rope_tables(rope, width, limit, positions, segments) for width in widths}
        return Context(tables, visible, valid)

    def _head(self, x: Float[Array, "B T d"]) -> Float[Array, "B T V"]:
        if self.config.tie_embeddings:
            return linear_float32(x, self.embed.embedding[...].T)
        logits = linear_float32(x, self.lm_head.kernel[...])
        if not self.config.head_bias:
            return logits
        return logits + self.lm_head.bias[...].astype(jnp.float32)[None, None, :]


def init_cache(config: ModelConfig, batch: int, slots: int, dtype: jnp.dtype) -> Caches:
    """Empty caches for `batch` rows of at most `slots` tokens."""

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
