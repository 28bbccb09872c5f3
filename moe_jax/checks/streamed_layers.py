"""Parts of a model applied to their leaves: they are the modules that training runs, made anew around these."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import path_name
from moe_jax.experts.coded_table import CodedTable
from moe_jax.experts.linear import Linear
from moe_jax.experts.shapes import Matrix, shapes_of
from moe_jax.functional.position_embeddings import bias_by_distance
from moe_jax.functional.routing.router_stats import RouterStats
from moe_jax.functional.routing.token_choices import Routing
from moe_jax.models import LayerConfig, ModelConfig
from moe_jax.models.linear_codes import EMBED, EMBEDDING, codes_of
from moe_jax.nn.block import make_layer
from moe_jax.nn.context import make_context
from moe_jax.nn.layers import Embed, Head, Table
from moe_jax.nn.stack import make_final_norm

CODED_EMBEDDING = "embed/coded/"
TABLE = "relative_bias/table"

Read = Callable[[str], np.ndarray]
Specs = Mapping[str, jax.ShapeDtypeStruct]
Watch = Callable[[Any], list[Any]]
"""Prepares a layer so that applying it records something in the list that is returned."""


def mlp_inputs(block: Any) -> list[Any]:
    """A `Watch` that records the input of a layer's FFN or MoE, [B, T, d], if it has one.

    The block itself decides where that is among norms and branches.
    """
    apply, seen = getattr(block, "mlp", None), []
    if apply is None:
        return seen

    def apply_seen(x: Array, *rest: Any) -> Any:
        seen.append(x)
        return apply(x, *rest)

    block.mlp = apply_seen
    return seen


class BankCall(NamedTuple):
    """A call of an MoE's bank: tokens [T, d], their experts and weights, and the statistics of the router."""

    tokens: Float[Array, "T d"]
    routing: Routing
    stats: RouterStats


def bank_calls(block: Any) -> list[Any]:
    """A `Watch` that records the `BankCall` of an MoE, and nothing for an FFN."""
    calls: list[Any] = []
    if not block.is_moe:
        return calls
    moe, experts, given = block.mlp, block.mlp.experts, []
    if moe.config.weighs_inputs and moe.config.top_k > 1:
        raise InputError(
            f"what experts are given is not recorded where inputs are weighted and a token has {moe.config.top_k} of "
            "them: each is given another one"
        )

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


class LinearInput(NamedTuple):
    """The input [..., i] of a linear map, and the map's path below its layer, such as `attention/q`."""

    path: str
    x: Float[Array, "... i"]


def linear_inputs(block: Any) -> list[Any]:
    """A `Watch` that records the `LinearInput` of every linear map but those of routers, banks and PEFT experts."""
    seen: list[Any] = []

    def watched(path: str, linear: Linear) -> Callable[..., Array]:
        def apply(x: Array, *rest: Any) -> Array:
            seen.append(LinearInput(path, x))
            return linear(x, *rest)

        return apply

    def watch(module: nnx.Module, prefix: str) -> None:
        for name, child in list(vars(module).items()):
            if name in ("router", "experts", "perft") or not isinstance(child, nnx.Module):
                continue
            if isinstance(child, Linear):
                setattr(module, name, watched(prefix + name, child))
            else:
                watch(child, f"{prefix}{name}/")

    watch(block, "")
    return seen


def embed_tokens(
    config: ModelConfig, leaves: Mapping[str, np.ndarray], tokens: Int[np.ndarray, "B T"]
) -> Float[Array, "B T d"]:
    """Returns the activations of tokens before the first layer; `leaves` by their paths, on the host."""
    # Only what belongs to these tokens is taken from the table, which may be larger than a layer.
    rows = tokens.reshape(-1)

    def taken(path: str, leaf: np.ndarray) -> np.ndarray:
        if path == EMBEDDING:
            return leaf[rows]
        has_columns = path.startswith(CODED_EMBEDDING) and leaf.shape[-1] == config.vocab_size
        return leaf[:, rows] if has_columns else leaf

    own = {path: taken(path, leaf) for path, leaf in leaves.items()}
    config = dataclasses.replace(config, vocab_size=tokens.size, bos_id=None, eos_ids=())
    embed: Any = module_with_leaves(lambda rngs: Embed(config, rngs=rngs), jax.tree.map(jnp.asarray, own), "embed/")
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
    """Returns the output of a layer for activations `x`, and the values recorded by `watch`.

    Args:
      leaves: of the layer, by their paths below it; for a relative bias, also the model's `TABLE`.
      source: output of the encoder, for a layer with cross-attention.
      valid: tokens that are not padding; None: all.
    """
    config = dataclasses.replace(config, layers=(layer,))
    bias, attention = None, layer.attention
    if attention.relative_bias is not None:
        bias = bias_by_distance(leaves[TABLE], attention.relative_bias, attention.mask)
    context = make_context(config, x.shape[:2], valid=valid, encoder_output=source, relative_bias=bias)
    block: Any = module_with_leaves(
        lambda rngs: make_layer(layer, config, rngs=rngs, dtype=jnp.dtype(config.dtype)), leaves
    )
    noted = watch(block)
    return block(x, context, None)[0], noted


def apply_final_norm(
    config: ModelConfig, leaves: Mapping[str, Array], x: Float[Array, "B T d"], where: str = "final_norm/"
) -> Float[Array, "B T d"]:
    """Applies the norm after the last layer of a model, or of its encoder (`encoder_norm/`)."""
    norm: Any = module_with_leaves(lambda _: make_final_norm(config), leaves, where)
    return norm(x)


def head_leaves(config: ModelConfig, paths: Iterable[str]) -> list[str]:
    """Returns those of a model's paths that `output_logits` and `text_loss` need."""
    tied = (EMBEDDING, CODED_EMBEDDING) if config.tie_embeddings else ()
    return [path for path in paths if path.startswith(("final_norm/", "lm_head/", *tied))]


def _tied(config: ModelConfig, leaves: Mapping[str, Array]) -> Table | None:
    """Returns the embeddings that a tied head needs."""
    if not config.tie_embeddings:
        return None
    codes = codes_of(config.codes, EMBED)
    if codes is None:
        return leaves[EMBEDDING]
    own = {path.removeprefix("embed/"): leaf for path, leaf in leaves.items() if path.startswith(CODED_EMBEDDING)}
    return CodedTable(codes, Matrix("", (config.d_model, config.vocab_size)), own)


def output_logits(config: ModelConfig, leaves: Mapping[str, Array], x: Float[Array, "B T d"]) -> Float[Array, "B T V"]:
    """Returns the logits: applies the norm after the last layer, and the head."""
    head: Any = module_with_leaves(lambda rngs: Head(config, rngs=rngs), leaves, "lm_head/")
    return head(apply_final_norm(config, leaves, x), _tied(config, leaves))


def text_loss(
    config: ModelConfig,
    leaves: Mapping[str, Array],
    x: Float[Array, "B T d"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> Float[Array, ""]:
    """Returns the weighted negative log-likelihood, nats, of the next tokens; float32.

    The leaves are those of the norm after the last layer, and of the head; `x` are the activations after that layer.
    """
    head: Any = module_with_leaves(lambda rngs: Head(config, rngs=rngs), leaves, "lm_head/")
    return head.weighted_loss(apply_final_norm(config, leaves, x), targets, weights, _tied(config, leaves))


def module_with_leaves(
    make: Callable[[nnx.Rngs], nnx.Module], leaves: Mapping[str, Array], prefix: str = ""
) -> nnx.Module:
    """Returns the module that `make` makes, with these leaves: prefix and path below the module -> array."""
    graphdef, state = nnx.split(shapes_of(make))
    return nnx.merge(
        graphdef, jax.tree_util.tree_map_with_path(lambda path, _: leaves[prefix + path_name(path)], state)
    )
