"""A model's parts as functions of their leaves, to run it one layer after another.

They are the modules that training runs, made anew around the leaves that are given.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from moe_jax.distributed.sharding import path_name
from moe_jax.experts.forms.fresh import shapes_of
from moe_jax.functional.attention.relative_bias import bias_by_distance
from moe_jax.functional.routing.decision import RouterStats, Routing
from moe_jax.models import LayerConfig, ModelConfig
from moe_jax.nn.block import Block
from moe_jax.nn.context import make_context
from moe_jax.nn.embed import Embed
from moe_jax.nn.head import Head
from moe_jax.nn.stack import make_final_norm

EMBEDDING = "embed/embedding"
TABLE = "relative_bias/table"

Watch = Callable[[Block], list[Any]]
"""Prepares a layer so that, when it is applied, it notes something in the list that is returned."""


def mlp_inputs(block: Any) -> list[Any]:
    """A `Watch` that notes what the FFN or MoE of a layer is given, [B, T, d].

    Where that stands among norms and branches is the block's own matter.
    """
    apply, seen = block.mlp, []

    def apply_seen(x: Array, *rest: Any) -> Any:
        seen.append(x)
        return apply(x, *rest)

    block.mlp = apply_seen
    return seen


class BankCall(NamedTuple):
    """What the bank of an MoE is given, and what its router did.

    Attributes:
      tokens: [T, d].
      routing: experts of the bank, and weights.
      stats: of the router.
    """

    tokens: Float[Array, "T d"]
    routing: Routing
    stats: RouterStats


def bank_calls(block: Any) -> list[Any]:
    """A `Watch` that notes the `BankCall` of an MoE; of an FFN nothing."""
    calls: list[Any] = []
    if not block.is_moe:
        return calls
    moe, experts, given = block.mlp, block.mlp.experts, []

    def apply_experts(tokens: Array, routing: Routing, key: Array | None) -> Array:
        given.append((tokens, routing))
        return experts(tokens, routing, key)

    def apply_moe(*arguments: Any) -> Any:
        y, stats = moe(*arguments)
        tokens, routing = given.pop()
        calls.append(BankCall(tokens, routing, stats[0]))
        return y, stats

    moe.experts, block.mlp = apply_experts, apply_moe
    return calls


def embed_tokens(
    config: ModelConfig, leaves: Mapping[str, np.ndarray], tokens: Int[np.ndarray, "B T"]
) -> Float[Array, "B T d"]:
    """The activations of tokens before the first layer; `leaves` by their paths, on the host."""
    # Of the table only the rows of the tokens: it may be larger than a layer.
    leaves = {**leaves, EMBEDDING: leaves[EMBEDDING][tokens.reshape(-1)]}
    embed: Any = filled(lambda rngs: Embed(config, rngs=rngs), jax.tree.map(jnp.asarray, leaves), "embed/")
    return embed(jnp.arange(tokens.size, dtype=jnp.int32).reshape(tokens.shape))


def apply_layer(
    config: ModelConfig,
    layer: LayerConfig,
    leaves: Mapping[str, Array],
    x: Float[Array, "B T d"],
    source: Float[Array, "B S d"] | None,
    watch: Watch,
    valid: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T d"], list[Any]]:
    """What a layer gives, and what is noted on the way.

    Args:
      config: of the model.
      layer: of the layer.
      leaves: of the layer, by their paths below it; of a relative bias, the model's `TABLE`.
      x: activations.
      source: what the encoder gave, for a layer that looks at it.
      watch: notes something.
      valid: tokens that are not padding; None: all.
    """
    config = dataclasses.replace(config, layers=(layer,))
    bias, attention = None, layer.attention
    if attention.relative_bias is not None:
        bias = bias_by_distance(leaves[TABLE], attention.relative_bias, attention.mask)
    context = make_context(config, x.shape[:2], valid=valid, encoder_output=source, relative_bias=bias)
    block: Any = filled(lambda rngs: Block(layer, config, rngs=rngs, dtype=jnp.dtype(config.dtype)), leaves)
    noted = watch(block)
    return block(x, context, None)[0], noted


def normalise(config: ModelConfig, leaves: Mapping[str, Array], x: Float[Array, "B T d"]) -> Float[Array, "B T d"]:
    """The norm after an encoder."""
    norm: Any = filled(lambda _: make_final_norm(config), leaves, "encoder_norm/")
    return norm(x)


def finish(config: ModelConfig, leaves: Mapping[str, Array], x: Float[Array, "B T d"]) -> Float[Array, "B T V"]:
    """The logits: the norm after the last layer, and the head."""
    norm = filled(lambda _: make_final_norm(config), leaves, "final_norm/")
    head = filled(lambda rngs: Head(config, rngs=rngs), leaves, "lm_head/")
    return head(norm(x), leaves.get(EMBEDDING))


def text_loss(
    config: ModelConfig, leaves: Mapping[str, Array], x: Float[Array, "B T d"], tokens: Int[Array, "B T"]
) -> Float[Array, ""]:
    """Negative log-likelihood, nats, of all tokens but the first of every row; float32.

    Args:
      config: of the model.
      leaves: of the norm after the last layer, and of the head.
      x: activations after the last layer.
      tokens: that the rows consist of.
    """
    norm: Any = filled(lambda _: make_final_norm(config), leaves, "final_norm/")
    head: Any = filled(lambda rngs: Head(config, rngs=rngs), leaves, "lm_head/")
    last = jnp.arange(tokens.shape[1], dtype=jnp.int32) == tokens.shape[1] - 1
    weights = jnp.broadcast_to(jnp.where(last, jnp.float32(0), jnp.float32(1)), tokens.shape)
    return head.weighted_loss(norm(x), jnp.roll(tokens, -1, axis=1), weights, leaves.get(EMBEDDING))


def filled(make: Callable[[nnx.Rngs], nnx.Module], leaves: Mapping[str, Array], prefix: str = "") -> nnx.Module:
    """The module that `make` makes, with these leaves: prefix and path below the module -> array."""
    graphdef, state = nnx.split(shapes_of(make))
    return nnx.merge(
        graphdef, jax.tree_util.tree_map_with_path(lambda path, _: leaves[prefix + path_name(path)], state)
    )
