"""The attention module: grouped-query attention with its projections and cache."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.layout.mesh import attention_placement, shard_cache
from moe_jax.experts.linear import lora_for
from moe_jax.functional.attention import Visibility, attention
from moe_jax.functional.attention_chunks import MOST_QUERIES, cached_attention
from moe_jax.functional.keys import fold_in
from moe_jax.functional.position_embeddings import apply_rope
from moe_jax.models.config import PROJECTIONS, AttentionConfig, ModelConfig
from moe_jax.nn.cache import KVCache, Slots
from moe_jax.nn.layers import Linear, Norm


def make_projections(config: AttentionConfig, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> dict[str, Linear]:
    """Makes the linear maps of an attention, by name."""
    linears = {}
    for name, shape in config.shapes(d_model).items():
        # Where `tensor` splits heads, it splits the outputs of q, k and v, and the inputs of o.
        split = "in" if name == "o" else "out"
        bias, lora = name in config.biases, lora_for(config.lora, name)
        linears[name] = Linear(shape, bias=bias, nf4=config.nf4, lora=lora, split=split, rngs=rngs, dtype=dtype)
    return linears


class Attention(nnx.Module):
    """Grouped-query attention: of tokens to each other, or to the tokens of another sequence."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Norm
    k_norm: Norm

    def __init__(self, config: AttentionConfig, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        for name, linear in make_projections(config, model.d_model, rngs=rngs, dtype=dtype).items():
            setattr(self, name, linear)
        width = config.head_dim
        if config.qk_norm == "head_layer":
            heads = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
            for name, count in heads.items():
                setattr(self, name, Norm("layer_unbiased", (count, width), model.norm_eps, dtype=dtype))
        elif config.qk_norm != "none":
            per_head, kind = config.qk_norm == "head", "rms_plus_one" if model.norm == "rms_plus_one" else "rms"
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
        """
        keys = {name: fold_in(key, index) for index, name in enumerate(PROJECTIONS)}
        q = self._queries(x, keys["q"])
        k, v = self._keys_and_values(x, keys["k"], keys["v"])
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        if cache is None:
            return self.o(self._attend(q, k, v, visible, bias, aligned=True), keys["o"]), None
        assert slots is not None, "a cache goes with slots"
        cache = cache._replace(
            k=slots.write(cache.k, k.transpose(0, 2, 1, 3)), v=slots.write(cache.v, v.transpose(0, 2, 1, 3))
        )
        if slots.begins:
            y = self._attend(q, k, v, visible, bias, aligned=True)
        else:
            visible = visible._replace(key_positions=slots.key_positions(cache.k.shape[2]))
            y = self._attend_to_cache(q, cache, visible, bias)
        return self.o(y, keys["o"]), cache

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
            y = self._attend(q, k, v, visible, None, aligned=False)
            if cache is not None:
                k, v = (shard_cache(made.astype(cache.k.dtype).transpose(0, 2, 1, 3)) for made in (k, v))
                cache = KVCache(k, v)
        else:
            assert cache is not None, "cross-attention needs an encoder's output, or what was made of it"
            y = self._attend_to_cache(q, cache, visible, None)
        return self.o(y, keys["o"]), cache

    def _queries(self, x: Float[Array, "B T d"], key: Array | None) -> Float[Array, "B T H D"]:
        return self._heads(self.q(x, key), "q_norm")

    def _keys_and_values(
        self, x: Float[Array, "B S e"], key_of_k: Array | None, key_of_v: Array | None
    ) -> tuple[Float[Array, "B S K D"], Float[Array, "B S K D"]]:
        return self._heads(self.k(x, key_of_k), "k_norm"), self._heads(self.v(x, key_of_v), None)

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
            return self._attend(q, k, v, visible, bias, aligned=False)
        y = cached_attention(
            [(q, cache.k)],
            cache.v,
            visible,
            mask=self.config.mask,
            window=self.config.sliding_window,
            scale=self.config.scale,
            soft_cap=self.config.score_soft_cap,
            bias=bias,
        )
        return y.reshape(*q.shape[:2], -1)

    def _attend(
        self, q: Array, k: Array, v: Array, visible: Visibility, bias: Array | None, *, aligned: bool
    ) -> Float[Array, "B T w"]:
        y = attention(
            q,
            k,
            v,
            visible,
            mask=self.config.mask,
            window=self.config.sliding_window,
            scale=self.config.scale,
            soft_cap=self.config.score_soft_cap,
            bias=bias,
            aligned=aligned,
            placement=attention_placement(*q.shape[:2]),
        )
        return y.reshape(*q.shape[:2], -1)
