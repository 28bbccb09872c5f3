"""Attention with its projections and cache: grouped-query, and multi-head latent attention (DeepSeek-V2)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_jax.experts.devices import attention_placement, shard_batch, shard_cache
from moe_jax.experts.linear import Fixed, lora_for
from moe_jax.experts.shapes import normal_kernel
from moe_jax.functional.attention import Visibility, attention
from moe_jax.functional.attention_chunks import (
    MOST_QUERIES,
    AttentionOptions,
    Index,
    cached_attention,
    indexed_attention,
)
from moe_jax.functional.dense import layer_norm, linear, rms_norm
from moe_jax.functional.keys import fold_in
from moe_jax.functional.position_embeddings import apply_rope, scaled_queries
from moe_jax.models.attention_config import PROJECTIONS, AttentionConfig, LatentConfig
from moe_jax.models.config import ModelConfig
from moe_jax.models.recurrent_config import RecurrentConfig
from moe_jax.nn.context import KVCache, LatentCache, Slots
from moe_jax.nn.layers import Linear, Norm


def make_projections(
    config: AttentionConfig | RecurrentConfig, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype
) -> dict[str, Linear]:
    """Makes the linear maps of an attention, or of what stands in its place, by name."""
    whole = config.kept_whole if isinstance(config, RecurrentConfig) else ()
    linears = {}
    for name, shape in config.shapes(d_model).items():
        # Where `tensor` splits heads, it splits the outputs of q, k and v, and the inputs of o.
        split = "in" if name == "o" else "out"
        bias, lora = name in config.biases, lora_for(config.lora, name)
        nf4 = config.nf4 and name not in whole
        linears[name] = Linear(shape, bias=bias, nf4=nf4, lora=lora, split=split, rngs=rngs, dtype=dtype)
    return linears


def _options(config: AttentionConfig) -> AttentionOptions:
    return AttentionOptions(config.mask, config.reach, config.score_scale, config.score_soft_cap)


def _attend(
    config: AttentionConfig,
    q: Array,
    k: Array,
    v: Array,
    visible: Visibility,
    *,
    bias: Array | None = None,
    sinks: Array | None = None,
    aligned: bool,
) -> Float[Array, "B T H W"]:
    options: Any = _options(config)._replace(aligned=aligned)._asdict()
    placement = attention_placement(*q.shape[:2])
    return attention(q, k, v, visible, bias=bias, sinks=sinks, placement=placement, **options)


def _scaled(config: AttentionConfig, q: Array, positions: Array | None) -> Float[Array, "B T H D"]:
    if config.query_scale is None:
        return q
    assert positions is not None, "query_scale asks for positions"
    return scaled_queries(q, config.query_scale, positions)


def _in_blocks(
    config: AttentionConfig, visible: Visibility, positions: Array | None, key_positions: Array | None
) -> Visibility:
    if config.block_tokens is None:
        return visible
    assert positions is not None and key_positions is not None, "block_tokens asks for positions"
    return visible.in_blocks(config.block_tokens, positions, key_positions)


class Attention(nnx.Module):
    """Grouped-query attention: of tokens to each other, or to the tokens of another sequence."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    gate: Linear
    q_norm: Norm
    k_norm: Norm
    sinks: nnx.Param

    def __init__(self, config: AttentionConfig, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        for name, one in make_projections(config, model.d_model, rngs=rngs, dtype=dtype).items():
            setattr(self, name, one)
        if config.sinks:
            self.sinks = nnx.Param(jnp.zeros(config.num_heads, dtype))
        self.norm_eps, width = model.norm_eps, config.head_dim
        if config.qk_norm == "head_layer":
            heads = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
            for name, count in heads.items():
                setattr(self, name, Norm("layer_unbiased", (count, width), model.norm_eps, dtype=dtype))
        elif config.qk_norm not in ("none", "head_unscaled"):
            per_head, kind = config.qk_norm != "projection", "rms_plus_one" if model.norm == "rms_plus_one" else "rms"
            for name, count in {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}.items():
                setattr(self, name, Norm(kind, width if per_head else count * width, model.norm_eps, dtype=dtype))

    def __call__(
        self,
        x: Float[Array, "B T d"],
        visible: Visibility,
        *,
        rope: tuple[Array, Array] | None = None,
        cache: KVCache | None = None,
        slots: Slots | None = None,
        bias: Float[Array, "H n"] | None = None,
        key: Array | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T d"], KVCache | None]:
        """Attends to the input itself, or to a cache of it.

        Args:
          x: input of the queries; without a cache also of keys and values.
          visible: which queries see which keys.
          rope: cosines and sines for queries and keys; None: neither is rotated.
          cache: keys and values of the row so far; those of `x` are written into it.
          slots: where they are written; needed with a cache.
          bias: per head and distance (see `functional.attention`).
          key: for LoRA's dropout in training.
          positions: of the tokens in their documents; needed where the config `needs_positions`.
        """
        keys = {name: fold_in(key, index) for index, name in enumerate(self.config.projections)}
        q = self._queries(x, keys["q"])
        k, v = self._keys_and_values(x, keys["k"], keys.get("v"))
        if rope is not None:
            q, k = (apply_rope(one, *rope, interleaved=self.config.rope_interleaved) for one in (q, k))
        if self.config.qk_norm == "head_rotated":
            q, k = self.q_norm(q), self.k_norm(k)
        elif self.config.qk_norm == "head_unscaled":
            q, k = rms_norm(q, None, self.norm_eps), rms_norm(k, None, self.norm_eps)
        q = _scaled(self.config, q, positions)
        if cache is None:
            visible = _in_blocks(self.config, visible, positions, positions)
            y = _attend(self.config, q, k, v, visible, bias=bias, sinks=self._sinks, aligned=True)
            return self._out(y, keys, x), None
        assert slots is not None, "a cache goes with slots"
        cache = cache._replace(
            k=slots.write(cache.k, k.transpose(0, 2, 1, 3)), v=slots.write(cache.v, v.transpose(0, 2, 1, 3))
        )
        if slots.begins:
            visible = _in_blocks(self.config, visible, positions, positions)
            y = _attend(self.config, q, k, v, visible, bias=bias, sinks=self._sinks, aligned=True)
        else:
            written = KVCache(slots.read(cache.k), slots.read(cache.v))
            visible = visible._replace(key_positions=slots.key_positions(written.k.shape[2]))
            visible = _in_blocks(self.config, visible, positions, visible.key_positions)
            y = self._attend_to_cache(q, written, visible, bias)
        return self._out(y, keys, x), cache

    def attend_across(
        self,
        x: Float[Array, "B T d"],
        visible: Visibility,
        *,
        source: Float[Array, "B S e"] | None,
        cache: KVCache | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T d"], KVCache | None]:
        """Attends to another sequence.

        Args:
          x: input of the queries.
          visible: which queries see which keys.
          source: input of keys and values; None: keys and values are taken from the cache.
          cache: of the source; keys and values made from `source` are kept there.
          key: for LoRA's dropout in training.
        """
        keys = {name: fold_in(key, index) for index, name in enumerate(PROJECTIONS)}
        q = self._queries(x, keys["q"])
        if source is not None:
            k, v = self._keys_and_values(source.astype(x.dtype), keys["k"], keys["v"])
            y = _attend(self.config, q, k, v, visible, sinks=self._sinks, aligned=False)
            if cache is not None:
                k, v = (shard_cache(made.astype(cache.k.dtype).transpose(0, 2, 1, 3)) for made in (k, v))
                cache = KVCache(k, v)
        else:
            assert cache is not None, "cross-attention needs an encoder's output, or what was made of it"
            y = self._attend_to_cache(q, cache, visible, None)
        return self._out(y, keys, x), cache

    def _queries(self, x: Float[Array, "B T d"], key: Array | None) -> Float[Array, "B T H D"]:
        return self._heads(self.q(x, key), "q_norm")

    def _keys_and_values(
        self, x: Float[Array, "B S e"], key_of_k: Array | None, key_of_v: Array | None
    ) -> tuple[Float[Array, "B S K D"], Float[Array, "B S K D"]]:
        made = self.k(x, key_of_k)
        k, v = (
            self._heads(made, "k_norm"),
            self._heads(made if self.config.values_are_keys else self.v(x, key_of_v), None),
        )
        return k, rms_norm(v, None, self.norm_eps) if self.config.value_norm else v

    def _heads(self, projected: Float[Array, "B T w"], norm: str | None) -> Float[Array, "B T h D"]:
        """Divides a projection into heads, after its norm and clamp."""
        kind = "none" if norm is None else self.config.qk_norm
        if kind == "projection":
            projected = getattr(self, norm or "")(projected)
        if self.config.clip_qkv is not None:
            projected = jnp.clip(projected, -self.config.clip_qkv, self.config.clip_qkv)
        heads = projected.reshape(*projected.shape[:2], -1, self.config.head_dim)
        return getattr(self, norm or "")(heads) if kind in ("head", "head_layer") else heads

    def _attend_to_cache(
        self, q: Array, cache: KVCache, visible: Visibility, bias: Array | None
    ) -> Float[Array, "B T w"]:
        if q.shape[1] > MOST_QUERIES:
            k, v = (a.transpose(0, 2, 1, 3).astype(q.dtype) for a in cache[:2])
            return _attend(self.config, q, k, v, visible, bias=bias, sinks=self._sinks, aligned=False)
        return cached_attention([(q, cache.k)], cache.v, visible, _options(self.config), bias, self._sinks)

    @property
    def _sinks(self) -> Float[Array, " H"] | None:
        return self.sinks[...] if self.config.sinks else None

    def _out(
        self, y: Float[Array, "B T H W"], keys: dict[str, Array | None], x: Float[Array, "B T d"]
    ) -> Float[Array, "B T d"]:
        y = y.reshape(*y.shape[:2], -1)
        if self.config.output_gate:
            y = y * jax.nn.sigmoid(self.gate(x, keys["gate"]))
        return self.o(y, keys["o"])


class Indexer(nnx.Module):
    """The small heads by whose scores queries choose keys (see `IndexerConfig`). All its arrays are `Fixed`."""

    _EPS = 1e-6

    def __init__(self, latent: LatentConfig, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        assert latent.indexer is not None and latent.q_rank is not None
        self.config = config = latent.indexer
        self.q = Fixed(normal_kernel(rngs, (latent.q_rank, config.num_heads * config.head_dim), dtype))
        self.k = Fixed(normal_kernel(rngs, (d_model, config.head_dim), dtype))
        self.k_scale, self.k_bias = Fixed(jnp.ones(config.head_dim, dtype)), Fixed(jnp.zeros(config.head_dim, dtype))
        self.weights = Fixed(normal_kernel(rngs, (d_model, config.num_heads), dtype))

    def __call__(
        self, x: Float[Array, "B T d"], latent: Float[Array, "B T r"], rope: tuple[Array, Array] | None
    ) -> Index:
        """Returns queries, weights and keys of the tokens, given their activations and latents of queries."""
        q = linear(latent, self.q[...]).reshape(*x.shape[:2], -1, self.config.head_dim)
        k = layer_norm(linear(x, self.k[...]), self.k_scale[...], self.k_bias[...], self._EPS)[:, :, None, :]
        if rope is not None:
            q, k = (apply_rope(one, *rope, interleaved=self.config.interleaved) for one in (q, k))
        weights = linear(x.astype(jnp.float32), self.weights[...].astype(jnp.float32))
        return Index(q, weights, k[:, :, 0, :], self.config.top_k)


class LatentAttention(nnx.Module):
    """Attention whose keys and values are computed from one latent per token (see `LatentConfig`).

    There are two ways to the same result. Either keys and values are computed from all latents; or, since they are
    linear in the latents, their kernel is applied to queries and results instead, and heads attend to the latents
    themselves. The second is cheaper for few queries: a generated token costs as much as with a single key head.
    """

    q: Linear
    q_down: Linear
    q_up: Linear
    kv_down: Linear
    kv_up: Linear
    o: Linear

    def __init__(self, config: AttentionConfig, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        for name, one in make_projections(config, model.d_model, rngs=rngs, dtype=dtype).items():
            setattr(self, name, one)
        latent = self._latent
        if latent.q_rank is not None:
            self.q_norm = Norm("rms", latent.q_rank, latent.norm_eps, dtype=dtype)
        self.kv_norm = Norm("rms", latent.kv_rank, latent.norm_eps, dtype=dtype)
        if latent.has_own_indexer:
            self.indexer = Indexer(latent, model.d_model, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B T d"],
        visible: Visibility,
        *,
        rope: tuple[Array, Array] | None = None,
        cache: LatentCache | None = None,
        slots: Slots | None = None,
        bias: None = None,
        key: Array | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T d"], LatentCache | None]:
        """Attends to the input itself, or to a cache; arguments as in `Attention`."""
        keys = {name: fold_in(key, index) for index, name in enumerate(self.config.projections)}
        index = None
        if self._latent.q_rank is None:
            q = self.q(x, keys["q"])
        else:
            of_queries = self.q_norm(shard_batch(self.q_down(x, keys["q_down"])))
            q = self.q_up(of_queries, keys["q_up"])
            index = self.indexer(x, of_queries, rope) if self._latent.has_own_indexer else None
        q = q.reshape(*x.shape[:2], -1, self.config.head_dim)
        # Every device needs whole latents: norms are over their width, and heads are computed from all of it.
        down = shard_batch(self.kv_down(x, keys["kv_down"]))
        latent, shared = self.kv_norm(down[..., : self._latent.kv_rank]), down[..., self._latent.kv_rank :]
        if rope is not None:
            turn = partial(apply_rope, cos=rope[0], sin=rope[1], interleaved=self._latent.interleaved)
            q = jnp.concatenate([q[..., : self._plain], turn(q[..., self._plain :])], axis=-1)
            shared = turn(shared[:, :, None, :])[:, :, 0, :]
        q = _scaled(self.config, q, positions)
        begins = True
        if cache is not None:
            assert slots is not None, "a cache goes with slots"
            kept = None if cache.index is None or index is None else slots.write(cache.index, index.keys)
            cache = LatentCache(slots.write(cache.latent, latent), slots.write(cache.key, shared), kept)
            begins = slots.begins
            if not begins:
                latent, shared = (slots.read(one).astype(x.dtype) for one in (cache.latent, cache.key))
                visible = visible._replace(key_positions=slots.key_positions(latent.shape[1]))
                index = None if index is None or kept is None else index._replace(keys=slots.read(kept))
        if index is not None and latent.shape[1] <= index.top_k:
            index = None  # every query chooses all that it sees
        if not begins and self._is_cheaper_absorbed(x.shape[1], latent.shape[1]):
            y = self._attend_to_latents(q, latent, shared, visible, index)
        else:
            y = self._attend_to_heads(q, latent, shared, visible, index, keys["kv_up"], aligned=begins)
        return self.o(y.reshape(*x.shape[:2], -1), keys["o"]), cache

    def _attend_to_heads(
        self,
        q: Array,
        latent: Array,
        shared: Array,
        visible: Visibility,
        index: Index | None,
        key: Array | None,
        *,
        aligned: bool,
    ) -> Float[Array, "B T H W"]:
        """Attends to keys and values of every head, computed from the latents."""
        made = self.kv_up(latent, key).reshape(*latent.shape[:2], self.config.num_heads, -1)
        of_all = jnp.broadcast_to(shared[:, :, None, :], (*made.shape[:3], shared.shape[-1]))
        k, v = jnp.concatenate([made[..., : self._plain], of_all], axis=-1), made[..., self._plain :]
        if index is None:
            return _attend(self.config, q, k, v, visible, aligned=aligned)
        k, v = (one.transpose(0, 2, 1, 3) for one in (k, v))
        return indexed_attention([(q, k)], v, visible, _options(self.config), index)

    def _attend_to_latents(
        self, q: Array, latent: Array, shared: Array, visible: Visibility, index: Index | None
    ) -> Float[Array, "B T H W"]:
        """Attends to latents, for caches: turns queries into queries of latents, and results into results of heads."""
        up = self.kv_up.materialise().astype(q.dtype).reshape(self._latent.kv_rank, self.config.num_heads, -1)
        of_latents = jnp.einsum("bthn,rhn->bthr", q[..., : self._plain], up[..., : self._plain])
        if q.shape[1] <= MOST_QUERIES or index is not None:
            values = latent[:, None]
            parts = [(of_latents, values), (q[..., self._plain :], shared[:, None])]
            attend = cached_attention if index is None else partial(indexed_attention, index=index)
            y = attend(parts, values, visible, _options(self.config))
        else:
            q = jnp.concatenate([of_latents, q[..., self._plain :]], axis=-1)
            k = jnp.concatenate([latent, shared], axis=-1)[:, :, None, :]
            y = _attend(self.config, q, k, latent[:, :, None, :], visible, aligned=False)
        return jnp.einsum("bthr,rhw->bthw", y, up[..., self._plain :])

    def _is_cheaper_absorbed(self, queries: int, slots: int) -> bool:
        """Whether attending to latents takes fewer multiplications per row and head."""
        rank, rotated = self._latent.kv_rank, self._latent.rope_dim
        made = self._plain + self._latent.value_dim
        of_heads = slots * rank * made + queries * slots * (made + rotated)
        return queries * rank * made + queries * slots * (2 * rank + rotated) < of_heads

    @property
    def _latent(self) -> LatentConfig:
        assert self.config.latent is not None
        return self.config.latent

    @property
    def _plain(self) -> int:
        """Width of the part of queries and keys that is not rotated."""
        return self.config.head_dim - self.config.rope_dim
