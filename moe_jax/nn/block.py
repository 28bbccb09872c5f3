"""One layer: attention, perhaps cross-attention, and an FFN or an MoE, added to their input in some order."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.functional import keys
from moe_jax.functional.routing import RouterStats
from moe_jax.models.config import LayerConfig, ModelConfig, MoEConfig
from moe_jax.nn.attention import Attention
from moe_jax.nn.cache import Cache, KVCache
from moe_jax.nn.context import Context
from moe_jax.nn.latent_attention import LatentAttention
from moe_jax.nn.layers import FFN, Norm
from moe_jax.nn.moe import MoE


class Block(nnx.Module):
    """One layer. Every branch has a norm, such as `attention_norm`, placed as `LayerConfig.norm_position` says."""

    attention_norm: Norm
    mlp_norm: Norm

    def __init__(self, config: LayerConfig, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.is_moe = isinstance(config.mlp, MoEConfig)
        self.norm_position, self.parallel, self.shared_norm = config.norm_position, config.parallel, config.shared_norm
        self.crosses = config.cross is not None
        self.is_biased = config.attention.relative_bias is not None
        self.rope = (model.rope_of(config), config.attention.rope_dim)
        for name in ("attention", *["cross_attention"] * self.crosses, *["mlp"] * (not self.shared_norm)):
            for kind in ("norm", "output_norm") if self.norm_position == "both" else ("norm",):
                setattr(self, f"{name}_{kind}", Norm(model.norm, model.d_model, model.norm_eps, dtype=dtype))
        attention: Any = Attention if config.attention.latent is None else LatentAttention
        self.attention = attention(config.attention, model, rngs=rngs, dtype=dtype)
        if self.crosses:
            assert config.cross is not None
            self.cross_attention = Attention(config.cross, model, rngs=rngs, dtype=dtype)
        make: Any = MoE if self.is_moe else FFN
        self.mlp = make(config.mlp, model.d_model, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B T d"], context: Context, cache: Cache | None, key: Array | None = None
    ) -> tuple[Float[Array, "B T d"], Cache | None, tuple[RouterStats, ...]]:
        """Applies the layer; `key` is its random key in training. Also returns the statistics of its routers."""

        def attend(x: Array) -> tuple[Array, Cache | None]:
            rope, bias = context.rope[self.rope], context.relative_bias if self.is_biased else None
            attention_key = keys.fold_in(key, keys.ATTENTION)
            return self.attention(
                x, context.visible, rope=rope, cache=cache, slots=context.slots, bias=bias, key=attention_key
            )

        def attend_across(x: Array) -> tuple[Array, KVCache | None]:
            assert context.source is not None
            source, visible = context.source
            kept, cross_key = None if cache is None else cache.cross, keys.fold_in(key, keys.CROSS_ATTENTION)
            return self.cross_attention.attend_across(x, visible, source=source, cache=kept, key=cross_key)

        def apply_mlp(x: Array) -> tuple[Array, tuple[RouterStats, ...]]:
            if self.is_moe:
                return self.mlp(x, context.valid, key)
            return self.mlp(x, keys.fold_in(key, keys.FFN)), ()

        if self.parallel:
            for_attention = self.attention_norm(x)
            attended, cache = attend(for_attention)
            y, stats = apply_mlp(for_attention if self.shared_norm else self.mlp_norm(x))
            return x + attended + y, cache, stats
        x, cache = self._add("attention", attend, x)
        if self.crosses:
            x, cross = self._add("cross_attention", attend_across, x)
            cache = None if cache is None else cache._replace(cross=cross)
        x, stats = self._add("mlp", apply_mlp, x)
        return x, cache, stats

    def _add(self, name: str, branch: Callable[[Array], tuple[Array, Any]], x: Array) -> tuple[Array, Any]:
        """Returns the input plus a branch of it, with norms at their places, and the branch's second result."""
        norm = getattr(self, f"{name}_norm")
        if self.norm_position == "post":
            y, extra = branch(x)
            return norm(x + y), extra
        if self.norm_position == "output":
            y, extra = branch(x)
            return x + norm(y), extra
        y, extra = branch(norm(x))
        return x + (getattr(self, f"{name}_output_norm")(y) if self.norm_position == "both" else y), extra
