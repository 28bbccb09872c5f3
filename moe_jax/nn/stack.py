"""The layers of a model, which are stacked where they repeat, and its final norm."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.errors import InputError, check_member, shown
from moe_jax.experts.devices import shard_batch
from moe_jax.experts.shapes import ShapesOnly, normal_kernel, shapes_of
from moe_jax.experts.summaries import Summarised, size_of
from moe_jax.functional.position_embeddings import bias_by_distance
from moe_jax.models.attention_config import AttentionConfig
from moe_jax.models.config import ModelConfig
from moe_jax.models.layer_config import LayerConfig
from moe_jax.models.moe_config import MoEConfig
from moe_jax.models.segments import Segment, segments_of
from moe_jax.nn.block import make_layer
from moe_jax.nn.block_stack import REMAT_POLICIES, BlockStack
from moe_jax.nn.context import Caches, check_caches, longest_row, make_context, source_slots
from moe_jax.nn.inside import ChangeLogits, Inside, Kept, TokenRouting, as_index, ask_routers, check_layers
from moe_jax.nn.layer_views import Layers
from moe_jax.nn.layer_words import layer_lines
from moe_jax.nn.layers import Norm
from moe_jax.nn.moe import MoE, Router, StackedStats, routers_of_layer


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

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, remat: str = "none", cuts: Collection[int] = ()):
        """Draws the parameters; `cuts` are layers at which a segment begins, so that a call may `stop` there."""
        check_member("remat", remat, ("none", *REMAT_POLICIES))
        assert not config.has_encoder, "an encoder and a decoder are two stacks"
        dtype = jnp.dtype(config.dtype)
        self.config = config
        self.remat = remat
        self.segments = nnx.List(
            [
                _fresh_segment(segment, config, rngs=rngs, dtype=dtype)
                for segment in segments_of(config.layers, cuts=cuts)
            ]
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
        router_logits: Mapping[int, ChangeLogits] | None = None,
        stop: int | None = None,
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
          router_logits: by layer, a function of the logits of its router, float32[B, T, E], that returns others. It is
            traced, and outside of `jax.jit` such a call is compiled every time.
          stop: the layer before which to stop, which begins a segment: its input is returned. None: behind the final
            norm.
          key: random key for everything random in training; None: deterministic.

        Raises:
          InputError: if the arguments do not go together or with the model.
        """
        asked = ask_routers(self._experts_of, experts_off or {}, router_bias or {}, router_logits or {})
        inside = Inside(check_layers(hidden_states, len(self.layers)), *asked)
        if caches is not None:
            if len(caches) != len(self.segments):
                raise InputError(
                    f"the caches are of {len(caches)} segments of layers, and the model has {len(self.segments)}, as "
                    "where one was replaced: take nn.unstacked(model), and init_cache(..., stacked=False)"
                )
            check_caches(self.config, caches, x.shape[:2], positions, valid)
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
        if stop is not None and stop not in {segment.start for segment in self.segments}:
            raise InputError(f"stop = {stop}: no segment of layers begins there; build the stack with cuts=({stop},)")
        x = shard_batch(x)
        new_caches, router, kept = [], [], Kept({}, {})
        for index, segment in enumerate(self.segments):
            if segment.start == stop:
                break
            # Of a layer in the middle, the inputs of all that are stacked with it are in the program.
            if segment.start in inside.hidden_states:
                kept.hidden_states[segment.start] = x
            of_middle = inside._replace(hidden_states=inside.hidden_states - {segment.start})
            x, cache, stats, of_segment = segment(
                x, context, None if caches is None else caches[index], self.remat, key, of_middle
            )
            x = shard_batch(x)
            new_caches.append(cache)
            router.extend(stats)
            kept = Kept(kept.routing | of_segment.routing, kept.hidden_states | of_segment.hidden_states)
        last = len(self.layers) if stop is None else stop
        x = self.final_norm(x) if stop is None else x
        if last in inside.hidden_states:
            kept.hidden_states[last] = x
        return StackOutput(
            x,
            None if caches is None else tuple(new_caches),
            tuple(router),
            kept.routing,
            {layer: kept.hidden_states[layer] for layer in sorted(inside.hidden_states)},
        )

    def _experts_of(self, name: str, layer: int) -> int:
        """Returns the number of experts of a layer's MoE; raises `InputError`, naming the argument, if it has none."""
        at = as_index(layer)
        if at is not None and 0 <= at < len(self.layers):
            block, _ = self.layers.stacked(at)
            if isinstance(mlp := getattr(block, "mlp", None), MoE):
                return mlp.config.num_experts
        raise InputError(f"{name} names layer {shown(layer)}, which is no layer with an MoE")


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


def _fresh_segment(segment: Segment, model: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> BlockStack:
    blocks = [_stack(layer, model, segment.repeats, rngs, dtype) for layer in segment.pattern]
    return BlockStack(segment.start, segment.repeats, blocks)


def _stack(layer: LayerConfig, model: ModelConfig, repeats: int, rngs: nnx.Rngs, dtype: jnp.dtype) -> Any:
    def make(rngs: nnx.Rngs) -> Any:
        return make_layer(layer, model, rngs=rngs, dtype=dtype)

    graphdef, shapes = nnx.split(shapes_of(make))
    if isinstance(rngs, ShapesOnly):
        return nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.zeros((repeats, *leaf.shape), leaf.dtype), shapes))
    # With lax.map and not vmap, one fresh layer is drawn at a time, so that drawing needs no extra memory.
    random_keys = jax.random.split(rngs.params(), repeats)
    return nnx.merge(graphdef, jax.lax.map(lambda key: nnx.state(make(nnx.Rngs(params=key))), random_keys))
