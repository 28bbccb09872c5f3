"""One layer of a model: attention or a recurrence, perhaps cross-attention, and an FFN or an MoE; or one of them."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.core.errors import InputError, shown
from moe_jax.experts.linear import Fixed, Linear
from moe_jax.experts.summaries import Summarised, size_of
from moe_jax.functional import keys
from moe_jax.functional.routing.router_stats import RouterStats
from moe_jax.models.config import ModelConfig
from moe_jax.models.layer_config import LayerConfig
from moe_jax.models.moe_config import MoEConfig
from moe_jax.models.own_parts import LAYERS
from moe_jax.nn.attention import Attention, LatentAttention
from moe_jax.nn.context import Cache, Context, KVCache
from moe_jax.nn.layer_words import layer_words
from moe_jax.nn.layers import FFN, Norm
from moe_jax.nn.moe import MoE
from moe_jax.nn.recurrent import MODULES


class Block(Summarised):
    """One layer. Every branch has a norm, such as `attention_norm`, placed as `LayerConfig.norm_position` says."""

    attention_norm: Norm
    mlp_norm: Norm
    output_scale: nnx.Variable[Array]

    def __init__(self, config: LayerConfig, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.is_moe = isinstance(config.mlp, MoEConfig)
        self.norm_position, self.parallel, self.shared_norm = config.norm_position, config.parallel, config.shared_norm
        self.residual_scale = config.residual_scale
        self.branches = config.branches
        self.is_biased = config.attention.relative_bias is not None
        self.is_recurrent = config.is_recurrent
        self.rope = None if config.is_recurrent else (model.rope_of(config), config.softmax_attention.rope_dim)
        self.needs_positions = not config.is_recurrent and config.softmax_attention.needs_positions
        for name in (name for name in self.branches if not (name == "mlp" and self.shared_norm)):
            for kind in ("norm", "output_norm") if self.norm_position == "both" else ("norm",):
                inside = name == "mlp" and kind == "norm" and config.norms_inside
                norm = "none" if inside else model.norm
                setattr(self, f"{name}_{kind}", Norm(norm, model.d_model, model.norm_eps, dtype=dtype))
        if config.branch_scales:
            for name in self.branches:
                setattr(self, f"{name}_scale", nnx.Param(jnp.ones(model.d_model, dtype)))
        if "attention" in self.branches:
            self.attention = _mixer_class(config)(config.attention, model, rngs=rngs, dtype=dtype)
        if config.cross is not None:
            self.cross_attention = Attention(config.cross, model, rngs=rngs, dtype=dtype)
        self.scales_output = config.output_scale
        if self.scales_output:
            self.output_scale = Fixed(jnp.ones(1, dtype))
        if "mlp" in self.branches:
            make: Any = MoE if self.is_moe else FFN
            self.mlp = make(config.mlp, model.d_model, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B T d"], context: Context, cache: Cache | None, key: Array | None = None
    ) -> tuple[Float[Array, "B T d"], Cache | None, tuple[RouterStats, ...]]:
        """Applies the layer. Also returns its cache after the call, and the statistics of its routers.

        Args:
          x: activations.
          context: of the pass; `make_context` makes one.
          cache: of the layer's attention or recurrence; None: there is none.
          key: the layer's random key in training; None: deterministic.
        """

        def attend(x: Array) -> tuple[Array, Cache | None]:
            attention_key = keys.fold_in(key, keys.ATTENTION)
            if self.is_recurrent:
                slots = context.slots
                if cache is None or slots is None:
                    return self.attention(x, context.documents, cache=None, begins=True, key=attention_key)
                before = jax.tree.map(slots.read, cache)
                y, after = self.attention(x, context.documents, cache=before, begins=slots.begins, key=attention_key)
                return y, jax.tree.map(slots.put, cache, after)
            assert self.rope is not None, "attention has a rotary embedding"
            rope, bias = context.rope[self.rope], context.relative_bias if self.is_biased else None
            asked: Any = {"positions": context.positions} if self.needs_positions else {}
            return self.attention(
                x, context.visible, rope=rope, cache=cache, slots=context.slots, bias=bias, key=attention_key, **asked
            )

        def attend_across(x: Array) -> tuple[Array, KVCache | None]:
            assert context.source is not None
            source, visible = context.source
            across, cross_key = self.cross_attention.attend_across, keys.fold_in(key, keys.CROSS_ATTENTION)
            if cache is None or cache.cross is None or (slots := context.slots) is None:
                return across(x, visible, source=source, key=cross_key)[0], None
            y, kept = across(x, visible, source=source, cache=jax.tree.map(slots.read, cache.cross), key=cross_key)
            return y, jax.tree.map(slots.put, cache.cross, kept) if context.fills_cross else cache.cross

        def apply_mlp(x: Array) -> tuple[Array, tuple[RouterStats, ...]]:
            asked = context.at_router
            if isinstance(self.mlp, MoE) and not (asked.is_nothing and self.mlp.config.sequence_balance_coef == 0):
                changes = {"bias": asked.bias, "change": asked.change, "documents": context.visible.segments}
                y, stats, routing = self.mlp.with_routing(x, context.valid, key, **changes)
                if asked.kept is not None:
                    asked.kept.append(routing)
                return y, stats
            mlp: Any = self.mlp  # perhaps one of the user's, which is called as what it replaces
            if isinstance(mlp, FFN) or not (self.is_moe or isinstance(mlp, MoE)):
                return mlp(x, keys.fold_in(key, keys.FFN)), ()
            return mlp(x, context.valid, key)

        if self.parallel:
            for_attention = self.attention_norm(x)
            attended, cache = attend(for_attention)
            y, stats = apply_mlp(for_attention if self.shared_norm else self.mlp_norm(x))
            return self._scaled(x + attended + y), cache, stats
        if "attention" in self.branches:
            x, cache = self._add("attention", attend, x)
        if "cross_attention" in self.branches:
            x, cross = self._add("cross_attention", attend_across, x)
            cache = None if cache is None else cache._replace(cross=cross)
        stats: tuple[RouterStats, ...] = ()
        if "mlp" in self.branches:
            x, stats = self._add("mlp", apply_mlp, x)
        return self._scaled(x), cache, stats

    def _scaled(self, x: Float[Array, "B T d"]) -> Float[Array, "B T d"]:
        if not self.scales_output:
            return x
        return x * jax.lax.stop_gradient(self.output_scale[...]).astype(x.dtype)[None, None]

    def _summary(self) -> list[str]:
        return [layer_words(self), size_of(self)]

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
        if (scale := getattr(self, f"{name}_scale", None)) is not None:
            y = y * scale[...].astype(y.dtype)[None, None]
        if self.residual_scale != 1.0:
            y = y * jnp.asarray(self.residual_scale, y.dtype)
        return x + (getattr(self, f"{name}_output_norm")(y) if self.norm_position == "both" else y), extra


def _mixer_class(config: LayerConfig) -> Any:
    """Returns the class of the branch that tells tokens of each other."""
    if config.is_recurrent:
        return MODULES[type(config.recurrence)]
    return Attention if config.softmax_attention.latent is None else LatentAttention


def make_layer(config: LayerConfig, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> Any:
    """Makes a layer of a model: a `Block`, or the one of a user's own that the config names.

    Raises `InputError` if linear maps are to be in codes that it does not have.
    """
    make = LAYERS[config.module] or Block
    layer = make(config, model, rngs=rngs, dtype=dtype)
    for one in config.codes:
        for path in one.paths:
            *folders, name = path.split("/")
            parent = reduce(lambda module, folder: getattr(module, folder, None), folders, layer)
            linear = getattr(parent, name, None)
            if not isinstance(linear, Linear):
                raise InputError(f"codes of {shown(path)}: the layer has no such linear map")
            setattr(parent, name, linear.in_codes(one.form, rngs=rngs, dtype=dtype))
    return layer
