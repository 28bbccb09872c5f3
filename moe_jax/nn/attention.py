"""The attention module, with its key-value cache."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.linear import lora_for
from moe_jax.functional.attention import Visibility, attention
from moe_jax.functional.keys import fold_in
from moe_jax.functional.rope import apply_rope
from moe_jax.models.config import PROJECTIONS, AttentionConfig, ModelConfig
from moe_jax.nn.layers import Linear, Norm


class KVCache(NamedTuple):
    """Keys (rotated) and values of one layer; slot s holds the token at position s of the row."""

    k: Float[Array, "B S K D"]
    v: Float[Array, "B S K D"]


class Attention(nnx.Module):
    """Grouped-query attention: of tokens to each other, or to those of another sequence."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Norm
    k_norm: Norm

    def __init__(self, config: AttentionConfig, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        d, width = model.d_model, config.head_dim
        source = d if config.source_dim is None else config.source_dim
        q_width, kv_width = config.num_heads * width, config.num_kv_heads * width
        shapes = {"q": (d, q_width), "k": (source, kv_width), "v": (source, kv_width), "o": (q_width, d)}
        for name, shape in shapes.items():
            bias, lora = name in config.biases, lora_for(config.lora, name)
            split = "in" if name == "o" else "out"
            linear = Linear(shape, bias=bias, nf4=config.nf4, lora=lora, split=split, rngs=rngs, dtype=dtype)
            setattr(self, name, linear)
        if config.qk_norm == "head_layer":
            heads = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
            for name, count in heads.items():
                setattr(self, name, Norm("layer_unbiased", (count, width), model.norm_eps, dtype=dtype))
        elif config.qk_norm != "none":
            per_head, kind = config.qk_norm == "head", "rms_plus_one" if model.norm == "rms_plus_one" else "rms"
            self.q_norm = Norm(kind, width if per_head else q_width, model.norm_eps, dtype=dtype)
            self.k_norm = Norm(kind, width if per_head else kv_width, model.norm_eps, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B T d"],
        visible: Visibility,
        *,
        rope: tuple[Array, Array] | None = None,
        source: Float[Array, "B S e"] | None = None,
        cache: KVCache | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T d"], KVCache | None]:
        """Attends to the input itself, to another sequence, or to a cache.

        Args:
          x: what queries are made of.
          visible: which queries see which keys.
          rope: cosines and sines for queries and keys; None: neither is rotated.
          source: what keys and values are made of; None: `x`.
          cache: keys and values of the row so far; those of `x` are written into the slots that are its positions.
          key: for LoRA's dropout in training.
        """
        keys = {name: fold_in(key, index) for index, name in enumerate(PROJECTIONS)}
        other = x if source is None else source.astype(x.dtype)
        q, k, v = self.q(x, keys["q"]), self.k(other, keys["k"]), self.v(other, keys["v"])
        if self.config.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.config.clip_qkv is not None:
            q, k, v = (jnp.clip(a, -self.config.clip_qkv, self.config.clip_qkv) for a in (q, k, v))
        q, k, v = (a.reshape(*a.shape[:2], -1, self.config.head_dim) for a in (q, k, v))
        if self.config.qk_norm in ("head", "head_layer"):
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        if cache is not None:
            rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
            slots = visible.positions
            cache = KVCache(
                cache.k.at[rows, slots].set(k.astype(cache.k.dtype)),
                cache.v.at[rows, slots].set(v.astype(cache.v.dtype)),
            )
            k, v = (a.astype(x.dtype) for a in cache)
        y = attention(
            q,
            k,
            v,
            visible,
            mask=self.config.mask,
            window=self.config.sliding_window,
            scale=self.config.scale,
            soft_cap=self.config.score_soft_cap,
            aligned=cache is None and source is None,
        )
        return self.o(y.reshape(*x.shape[:2], -1), keys["o"]), cache
