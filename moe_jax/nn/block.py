"""One decoder layer, and a segment of layers that are stacked and scanned."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from moe_jax.functional import keys
from moe_jax.functional.attention import Visibility
from moe_jax.functional.grouped import PRODUCT
from moe_jax.functional.rope import RopeConfig
from moe_jax.functional.routing import RouterStats
from moe_jax.models.config import LayerConfig, ModelConfig, MoEConfig
from moe_jax.models.segments import Segment
from moe_jax.nn.attention import Attention, KVCache
from moe_jax.nn.layers import FFN, Norm
from moe_jax.nn.moe import MoE

# What the backward pass finds saved: nothing but the input of a repeat, or also every product with a kernel.
REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(PRODUCT),
    ),
}


class Context(NamedTuple):
    """What is the same for all layers of a forward pass.

    Attributes:
      rope: cosines and sines of the tokens, by rotary embedding and width of a head.
      visible: who sees whom; with caches, a query's position is also its slot.
      valid: tokens that are not padding; None: all.
    """

    rope: Mapping[tuple[RopeConfig, int], tuple[Float[Array, "B T r"], Float[Array, "B T r"]]]
    visible: Visibility
    valid: Bool[Array, "B T"] | None


class Block(nnx.Module):
    """Pre-norm decoder layer: attention, then an FFN or an MoE."""

    def __init__(self, config: LayerConfig, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.is_moe = isinstance(config.mlp, MoEConfig)
        self.rope = (model.rope, config.attention.head_dim)
        self.attention_norm = Norm(model.norm, model.d_model, model.norm_eps, dtype=dtype)
        self.attention = Attention(config.attention, model, rngs=rngs, dtype=dtype)
        self.mlp_norm = Norm(model.norm, model.d_model, model.norm_eps, dtype=dtype)
        self.mlp = (MoE if self.is_moe else FFN)(config.mlp, model.d_model, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B T d"], context: Context, cache: KVCache | None, key: Array | None = None
    ) -> tuple[Float[Array, "B T d"], KVCache | None, tuple[RouterStats, ...]]:
        """Applies the layer; `key` is its own random key in training. Also gives the statistics of its routers."""
        attention_key = keys.fold_in(key, keys.ATTENTION)
        rope = context.rope[self.rope]
        y, cache = self.attention(self.attention_norm(x), rope, context.visible, cache, attention_key)
        x = x + y
        if self.is_moe:
            y, stats = self.mlp(self.mlp_norm(x), context.valid, key)
            return x + y, cache, stats
        return x + self.mlp(self.mlp_norm(x), keys.fold_in(key, keys.FFN)), cache, ()


class BlockStack(nnx.Module):
    """A segment: every parameter of its pattern of blocks carries a leading axis [repeats]."""

    def __init__(self, segment: Segment, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.start = segment.start
        self.repeats = segment.repeats
        self.blocks = nnx.List([_stack(layer, model, segment.repeats, rngs, dtype) for layer in segment.pattern])

    def __call__(
        self,
        x: Float[Array, "B T d"],
        context: Context,
        caches: tuple[KVCache, ...] | None,
        remat: str,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T d"], tuple[KVCache, ...] | None, tuple[RouterStats, ...]]:
        """Applies the pattern `repeats` times.

        Args:
          x: activations.
          context: of the forward pass.
          caches: one per block of the pattern, arrays stacked over the repeats, or None.
          remat: `none`, or a key of `REMAT_POLICIES`: what the backward pass finds saved.
          key: random key of the forward pass in training; None: deterministic.

        Returns:
          Activations, caches, and stacked statistics of every router of every position.
        """
        graphdef, params = nnx.split(self.blocks)

        def repeat(x: Array, scanned: tuple) -> tuple[Array, tuple]:
            params, caches, first_layer = scanned
            blocks = nnx.merge(graphdef, params)
            new_caches, stats = [], []
            for position, block in enumerate(blocks):
                layer_key = keys.fold_in(key, first_layer + position)
                x, cache, router = block(x, context, None if caches is None else caches[position], layer_key)
                new_caches.append(cache)
                stats.extend(router)
            return x, (None if caches is None else tuple(new_caches), tuple(stats))

        if remat != "none":
            # Inside scan the loop itself keeps the compiler from merging the two forward passes.
            repeat = jax.checkpoint(repeat, policy=REMAT_POLICIES[remat], prevent_cse=False)
        first_layers = self.start + len(self.blocks) * jnp.arange(self.repeats, dtype=jnp.int32)
        x, (caches, stats) = jax.lax.scan(repeat, x, (params, caches, first_layers))
        return x, caches, stats


def _stack(layer: LayerConfig, model: ModelConfig, repeats: int, rngs: nnx.Rngs, dtype: jnp.dtype) -> Block:
    def make(key: Array) -> Block:
        return Block(layer, model, rngs=nnx.Rngs(params=key), dtype=dtype)

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(jax.random.key(0))))
    # lax.map and not vmap: a fresh layer is drawn at a time, so that drawing needs no room of its own.
    params = jax.lax.map(lambda key: nnx.state(make(key)), jax.random.split(rngs.params(), repeats))
    return nnx.merge(graphdef, params)
