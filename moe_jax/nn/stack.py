"""The layers of a model: one is a block; those that repeat are stacked and scanned."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.errors import InputError, check_member, shown
from moe_jax.experts.devices import shard_batch
from moe_jax.experts.shapes import ShapesOnly, normal_kernel, shapes_of
from moe_jax.experts.summaries import Summarised, size_of
from moe_jax.functional import keys
from moe_jax.functional.position_embeddings import bias_by_distance
from moe_jax.functional.routing import RouterStats
from moe_jax.kernels.by_platform import PRODUCT
from moe_jax.models.config import AttentionConfig, LayerConfig, ModelConfig, MoEConfig, Segment, segments_of
from moe_jax.nn.attention import Attention, LatentAttention
from moe_jax.nn.context import (
    Cache,
    Caches,
    Context,
    FixedContext,
    KVCache,
    longest_row,
    make_context,
    source_slots,
)
from moe_jax.nn.inputs import as_array, is_traced
from moe_jax.nn.layer_views import Layers
from moe_jax.nn.layer_words import layer_lines, layer_words
from moe_jax.nn.layers import FFN, Norm
from moe_jax.nn.moe import OFF, MoE, Router, StackedStats, TokenRouting, routers_of_layer


class Block(Summarised):
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
        return self.with_routing(x, context, cache, key)[:3]

    def _summary(self) -> list[str]:
        return [layer_words(self), size_of(self)]

    def with_routing(
        self,
        x: Float[Array, "B T d"],
        context: Context,
        cache: Cache | None,
        key: Array | None = None,
        bias: Float[Array, " E"] | None = None,
    ) -> tuple[Float[Array, "B T d"], Cache | None, tuple[RouterStats, ...], TokenRouting | None]:
        """Applies the layer, and also returns what its router decided, if it has one and the context asks for it.

        `bias` is added to the logits of its router; see `MoE.with_routing`.
        """

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

        def apply_mlp(x: Array) -> tuple[Array, tuple[tuple[RouterStats, ...], TokenRouting | None]]:
            if isinstance(self.mlp, MoE) and (context.keeps_routing or bias is not None):
                y, stats, routing = self.mlp.with_routing(x, context.valid, key, bias=bias)
                return y, (stats, routing if context.keeps_routing else None)
            mlp: Any = self.mlp  # perhaps one of the user's
            if self.is_moe:
                y, stats = mlp(x, context.valid, key)
                return y, (stats, None)
            return mlp(x, keys.fold_in(key, keys.FFN)), ((), None)

        if self.parallel:
            for_attention = self.attention_norm(x)
            attended, cache = attend(for_attention)
            y, reported = apply_mlp(for_attention if self.shared_norm else self.mlp_norm(x))
            return x + attended + y, cache, *reported
        x, cache = self._add("attention", attend, x)
        if self.crosses:
            x, cross = self._add("cross_attention", attend_across, x)
            cache = None if cache is None else cache._replace(cross=cross)
        x, reported = self._add("mlp", apply_mlp, x)
        return x, cache, *reported

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


# What is saved for the backward pass: only the input of a repeat, or also every product with a kernel.
REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, jax.checkpoint_policies.save_only_these_names(PRODUCT)
    ),
}


class StackOutput(NamedTuple):
    """Attributes:
    x: activations, after the final norm where there is one.
    caches: updated caches, or None without caches.
    router: statistics of the routers (see `StackedStats`).
    routing, hidden_states: by layer, where asked for, and otherwise empty; see `Stack`.
    """

    x: Float[Array, "B T d"]
    caches: Caches | None
    router: StackedStats
    routing: dict[int, TokenRouting]
    hidden_states: dict[int, Float[Array, "B T d"]]


class Stack(Summarised):
    """The layers of a model and its final norm: a decoder's, an encoder's, or those of any tokens given as embeddings.

    Attributes:
      config: the description that the stack was built from; embedding and head in it are ignored.
      remat: what the backward pass recomputes: `none`, `dots` (all but matrix products) or `full`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, remat: str = "none"):
        check_member("remat", remat, ("none", *REMAT_POLICIES))
        assert not config.has_encoder, "an encoder and a decoder are two stacks"
        dtype = jnp.dtype(config.dtype)
        self.config = config
        self.remat = remat
        self.segments = nnx.List(
            [_fresh_segment(segment, config, rngs=rngs, dtype=dtype) for segment in segments_of(config.layers)]
        )
        self.final_norm = make_final_norm(config)
        biased = config.shared_bias()
        if biased is not None:
            self.relative_bias = RelativeBias(biased, rngs=rngs, dtype=dtype)

    def _summary(self) -> list[str]:
        words = f"{len(self.layers)} layers of width {self.config.d_model:,}, {size_of(self)}"
        return [words, *layer_lines(self.segments)]

    def routers(self) -> list[Router]:
        """Returns the routers of the layers as they are, replaced ones too, in the order in which they report."""
        found = []
        for segment in self.segments:
            for position, block in enumerate(segment.blocks):
                moe = getattr(getattr(block, "mlp", None), "config", None)
                if isinstance(moe, MoEConfig):
                    found += routers_of_layer(moe, [segment.layer(i, position) for i in range(segment.repeats)])
        return found

    @property
    def layers(self) -> Layers:
        """The layers by their index: read, written, replaced; see `Layers`."""
        return Layers(self)

    def __call__(
        self,
        x: Float[Array, "B T d"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        prefix: Int[Array, " B"] | None = None,
        encoder_output: Float[Array, "B S e"] | None = None,
        encoder_valid: Bool[Array, "B S"] | None = None,
        caches: Caches | None = None,
        begins: bool = False,
        routing: bool = False,
        hidden_states: Sequence[int] = (),
        experts_off: Mapping[int, Sequence[int]] | None = None,
        router_bias: Mapping[int, Float[Array, " E"]] | None = None,
        key: Array | None = None,
    ) -> StackOutput:
        """Applies all layers.

        Args:
          x: activations; their dtype is that of the computation.
          positions: position of every token in its document; default 0, 1, ... With caches it decides the slot that the
            token takes, and a query sees tokens at positions up to its own.
          segment_ids: document of every token when several are packed in a row, counted from 1; attention stays inside
            a document and 0 marks padding.
          valid: tokens that are not padding; with caches, only padding may follow padding. None: all tokens, or with
            `segment_ids` all tokens of documents.
          prefix: length of the prefix of every row, for attention with that mask.
          encoder_output: the sequence that cross-attention attends to; with caches, only in the first call: its keys
            and values are kept there.
          encoder_valid: tokens of it that are not padding; None: all.
          caches: from `init_cache`, to continue a row.
          begins: with caches, whether the rows begin with this call, at position 0: its tokens then see only each
            other, at no cost for slots that are still empty.
          routing: whether to return what the router of every MoE decided for every token.
          hidden_states: layers whose inputs to return; the number of layers stands for what comes after the last one
            and the final norm. So numbers are those of Transformers' `hidden_states`.
          experts_off: by layer, experts that no token goes to; the others take their place.
          router_bias: by layer, what is added to the logits of its router; zeros change nothing.
          key: random key for everything random in training; None: deterministic.

        Raises:
          InputError: if the arguments do not go together or with the model.
        """
        wanted = _checked_layers(hidden_states, len(self.layers))
        biases = self._biases(experts_off or {}, router_bias or {})
        context = make_context(
            self.config,
            x.shape[:2],
            positions=positions,
            segment_ids=segment_ids,
            valid=valid,
            prefix=prefix,
            encoder_output=encoder_output,
            encoder_valid=encoder_valid,
            num_slots=longest_row(caches),
            num_source_slots=source_slots(caches),
            begins=begins,
            relative_bias=self.relative_bias() if self.config.shared_bias() is not None else None,
            keeps_routing=routing,
        )
        x = shard_batch(x)
        new_caches, router, kept = [], [], Kept({}, {})
        for index, segment in enumerate(self.segments):
            x, cache, stats, of_segment = segment(
                x, context, None if caches is None else caches[index], self.remat, key, wanted, biases
            )
            x = shard_batch(x)
            new_caches.append(cache)
            router.extend(stats)
            kept = Kept(kept.routing | of_segment.routing, kept.hidden_states | of_segment.hidden_states)
        x = self.final_norm(x)
        if len(self.layers) in wanted:
            kept.hidden_states[len(self.layers)] = x
        return StackOutput(
            x,
            None if caches is None else tuple(new_caches),
            tuple(router),
            kept.routing,
            {layer: kept.hidden_states[layer] for layer in sorted(wanted)},
        )

    def _biases(
        self, off: Mapping[int, Sequence[int]], added: Mapping[int, Float[Array, " E"]]
    ) -> dict[int, Float[Array, " E"]]:
        """Returns what is added to the logits of routers, by layer; raises `InputError` for what is not there."""
        found: dict[int, Array] = {}
        for name, layer in [("experts_off", layer) for layer in off] + [("router_bias", layer) for layer in added]:
            module = self._moe_at(name, layer)
            found[layer] = jnp.zeros(module.config.num_experts, jnp.float32)
        for layer, bias in added.items():
            bias = as_array(f"router_bias[{layer}]", bias, "floating-point numbers", found[layer].shape)
            found[layer] = jnp.asarray(bias, jnp.float32)
        for layer, experts in off.items():
            count = len(found[layer])
            for expert in experts:
                if not isinstance(expert, int) or not 0 <= expert < count:
                    raise InputError(f"experts_off[{layer}] names {shown(expert)}; there are 0 to {count - 1}")
            if len(set(experts)) == count:
                raise InputError(f"experts_off[{layer}] names all {count} experts; leave one")
            found[layer] = found[layer].at[jnp.asarray(list(experts), jnp.int32)].set(OFF)
        return found

    def _moe_at(self, name: str, layer: int) -> MoE:
        """Returns the MoE of a layer, stacked with others; raises `InputError` if it has none."""
        if isinstance(layer, int) and 0 <= layer < len(self.layers):
            block, _ = self.layers.stacked(layer)
            if isinstance(block, Block) and isinstance(block.mlp, MoE):
                return block.mlp
        raise InputError(f"{name} names layer {shown(layer)}, which is no layer with an MoE")


def _checked_layers(given: Sequence[int], count: int) -> frozenset[int]:
    """Returns the numbers of layers; raises `InputError` for others than 0 to `count`."""
    for layer in given:
        if not isinstance(layer, int) or not 0 <= layer <= count:
            raise InputError(
                f"hidden_states names {shown(layer)}; there are the inputs of layers 0 to {count - 1}, and {count} "
                "after the last one"
            )
    return frozenset(given)


class RelativeBias(nnx.Module):
    """The table of relative biases [buckets, H] that all attention layers of a stack share."""

    def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        assert config.relative_bias is not None
        self.attention = config
        self.table = nnx.Param(normal_kernel(rngs, (config.relative_bias.buckets, config.num_heads), dtype))

    def __call__(self) -> Float[Array, "H n"]:
        """Returns the bias of every distance, float32 (see `bias_by_distance`)."""
        assert self.attention.relative_bias is not None
        return bias_by_distance(self.table[...], self.attention.relative_bias, self.attention.mask)


def make_final_norm(config: ModelConfig) -> Norm:
    """Makes the norm after the last layer, which does nothing in models without one."""
    kind = config.norm if config.final_norm else "none"
    return Norm(kind, config.d_model, config.norm_eps, dtype=jnp.dtype(config.dtype))


class Kept(NamedTuple):
    """By layer, what a call was asked to keep: decisions of routers, and inputs of layers."""

    routing: dict[int, TokenRouting]
    hidden_states: dict[int, Float[Array, "B T d"]]


class BlockStack(Summarised):
    """A segment: every parameter of its pattern of blocks carries a leading axis [repeats].

    Attributes:
      start: index in the stack of the first layer.
      repeats: number of repeats of the pattern.
      blocks: one per layer of the pattern.
    """

    def __init__(self, start: int, repeats: int, blocks: Iterable[Block]):
        self.start = start
        self.repeats = repeats
        self.blocks = nnx.List(blocks)

    def _summary(self) -> list[str]:
        words = f"a pattern of {len(self.blocks)}, {self.repeats} times, {size_of(self)}"
        return [words, *layer_lines([self])]

    def layer(self, repeat: int, position: int) -> int:
        """Returns the index in the stack of the layer at a place in the pattern, in a repeat of it."""
        return self.start + repeat * len(self.blocks) + position

    def __call__(
        self,
        x: Float[Array, "B T d"],
        context: Context,
        caches: tuple[Cache, ...] | None,
        remat: str,
        key: Array | None = None,
        hidden_states: frozenset[int] = frozenset(),
        biases: Mapping[int, Float[Array, " E"]] = MappingProxyType({}),
    ) -> tuple[Float[Array, "B T d"], tuple[Cache, ...] | None, tuple[RouterStats, ...], Kept]:
        """Applies the pattern `repeats` times.

        Args:
          x: activations.
          context: of the forward pass.
          caches: one per block of the pattern, arrays stacked over the repeats, or None.
          remat: `none`, or a key of `REMAT_POLICIES`: what is saved for the backward pass.
          key: random key of the forward pass in training; None: deterministic.
          hidden_states: the layers whose inputs are kept; they are of all layers that are stacked with one of them.
          biases: by layer, what is added to the logits of its router.

        Returns:
          Activations, caches, stacked statistics of every router of every position, and what was asked to be kept.
        """
        graphdef, params = nnx.split(self.blocks)
        fills_cross = context.source is not None and context.source.output is not None
        arrays, fixed = context.split()
        if caches is not None and self.repeats == 1:
            # Without a loop: caches would be copied into and out of a loop of one turn.
            first = jax.tree.map(lambda array: array[0], (params, caches, self._by_position(biases)))
            given = first[0], first[1], jnp.int32(self.start), first[2]
            x, found = _apply_once(graphdef, fixed, self._positions(hidden_states), x, given, arrays, key)
            new_caches, stats, kept = jax.tree.map(lambda array: array[None], found)
            return x, _with_cross(new_caches, caches, fills_cross), stats, self._kept(kept[0], kept[1], hidden_states)
        first_layers = self.start + len(self.blocks) * jnp.arange(self.repeats, dtype=jnp.int32)
        scanned = params, caches, first_layers, self._by_position(biases)
        positions = self._positions(hidden_states)
        given = graphdef, fixed, positions, remat, x, scanned, arrays, key
        if any(map(is_traced, jax.tree.leaves(given[4:]))):
            x, (new_caches, stats, kept) = _apply_repeats(*given)
        else:
            # Modules that were patched, as is done to look into them, are other ones.
            modules = (type(module) for _, module in nnx.iter_modules(self.blocks))
            calls = tuple(inspect.getattr_static(module, "__call__", None) for module in modules)
            x, (new_caches, stats, kept) = _apply_repeats_alone(calls, *given)
        new_caches = None if caches is None else _with_cross(new_caches, caches, fills_cross)
        return x, new_caches, stats, self._kept(kept[0], kept[1], hidden_states)

    def _by_position(self, biases: Mapping[int, Array]) -> dict[int, Float[Array, "R E"]]:
        """Returns biases by place in the pattern, over the repeats; zeros for layers without one."""
        found: dict[int, Array] = {}
        for position in self._positions(frozenset(biases)):
            layers = [self.layer(repeat, position) for repeat in range(self.repeats)]
            one = next(biases[layer] for layer in layers if layer in biases)
            found[position] = jnp.stack([biases.get(layer, jnp.zeros_like(one)) for layer in layers])
        return found

    def _positions(self, layers: frozenset[int]) -> tuple[int, ...]:
        """Returns the places in the pattern of some of the layers."""
        number = len(self.blocks)
        of_segment = range(self.start, self.start + self.repeats * number)
        return tuple(sorted({(layer - self.start) % number for layer in layers if layer in of_segment}))

    def _kept(self, routing: dict[int, Any], inputs: dict[int, Array], wanted: frozenset[int]) -> Kept:
        """Returns by layer what is kept by place in the pattern, stacked over the repeats."""

        def by_layer(kept: dict[int, Any]) -> dict[int, Any]:
            return {
                self.layer(repeat, position): jax.tree.map(lambda leaf, at=repeat: leaf[at], one)
                for repeat in range(self.repeats)
                for position, one in kept.items()
            }

        return Kept(by_layer(routing), {layer: x for layer, x in by_layer(inputs).items() if layer in wanted})


def _apply_repeats(
    graphdef: nnx.GraphDef,
    fixed: FixedContext,
    kept: tuple[int, ...],
    remat: str,
    x: Array,
    scanned: tuple,
    arrays: Any,
    key: Array | None,
) -> tuple[Array, tuple]:
    """Applies a pattern again and again; `scanned` is what `_apply_pattern` is given, stacked over the repeats."""
    context = Context.joined(arrays, fixed)

    def repeat(x: Array, given: tuple) -> tuple[Array, tuple]:
        return _apply_pattern(graphdef, x, given, context, key, kept)

    if remat != "none":
        # Inside scan the loop itself keeps the compiler from merging the two forward passes.
        repeat = jax.checkpoint(repeat, policy=REMAT_POLICIES[remat], prevent_cse=False)
    return jax.lax.scan(repeat, x, scanned)


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _apply_repeats_alone(calls: tuple[Any, ...], *given: Any) -> tuple[Array, tuple]:
    """Does the same as a program of its own, outside of any other: it is compiled once for each shape.

    `calls` are the functions by which the modules are called.
    """
    return _apply_repeats(*given)


def _apply_pattern(
    graphdef: nnx.GraphDef, x: Array, given: tuple, context: Context, key: Array | None, kept: tuple[int, ...]
) -> tuple[Array, tuple]:
    """Applies blocks in order; `given` are their parameters, their caches, the index of the first block, and biases.

    `kept` are the places of those whose inputs are returned. With `x` come the caches, the statistics, and what the
    routers decided and these inputs, both by place.
    """
    params, caches, first_layer, biases = given
    fills_cross = context.source is not None and context.source.output is not None
    new_caches, stats, routings, inputs = [], [], {}, {}
    for position, block in enumerate(nnx.merge(graphdef, params)):
        layer_key = keys.fold_in(key, first_layer + position)
        if position in kept:
            inputs[position] = x
        cache = None if caches is None else caches[position]
        if isinstance(block, Block) and (context.keeps_routing or position in biases):
            x, cache, router, routing = block.with_routing(x, context, cache, layer_key, biases.get(position))
            routings |= {} if routing is None else {position: routing}
        else:
            x, cache, router = block(x, context, cache, layer_key)
        # Caches of cross-attention that are filled already must not be copied for every token.
        new_caches.append(cache if cache is None or fills_cross else cache._replace(cross=None))
        stats.extend(router)
    return x, (None if caches is None else tuple(new_caches), tuple(stats), (routings, inputs))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _apply_once(
    graphdef: nnx.GraphDef,
    fixed: FixedContext,
    kept: tuple[int, ...],
    x: Array,
    given: tuple,
    arrays: Any,
    key: Array | None,
) -> tuple[Array, tuple]:
    """Does the same as a program of its own: equal layers that are not stacked are traced only once."""
    return _apply_pattern(graphdef, x, given, Context.joined(arrays, fixed), key, kept)


def _with_cross(new: tuple[Cache, ...], old: tuple[Cache, ...], filled: bool) -> tuple[Cache, ...]:
    """Returns the new caches with those of cross-attention, which are the old ones unless they were just filled."""
    return new if filled else tuple(a._replace(cross=b.cross) for a, b in zip(new, old, strict=True))


def _fresh_segment(segment: Segment, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> BlockStack:
    blocks = [_stack(layer, model, segment.repeats, rngs, dtype) for layer in segment.pattern]
    return BlockStack(segment.start, segment.repeats, blocks)


def _stack(layer: LayerConfig, model: ModelConfig, repeats: int, rngs: nnx.Rngs, dtype: jnp.dtype) -> Block:
    def make(rngs: nnx.Rngs) -> Block:
        return Block(layer, model, rngs=rngs, dtype=dtype)

    graphdef, shapes = nnx.split(shapes_of(make))
    if isinstance(rngs, ShapesOnly):
        return nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.zeros((repeats, *leaf.shape), leaf.dtype), shapes))
    # With lax.map and not vmap, one fresh layer is drawn at a time, so that drawing needs no extra memory.
    random_keys = jax.random.split(rngs.params(), repeats)
    return nnx.merge(graphdef, jax.lax.map(lambda key: nnx.state(make(nnx.Rngs(params=key))), random_keys))
