"""Runs a model one layer after another, so that only one layer is in memory at a time, whatever the size of the model.

The layers are the modules that training runs, made anew around the given leaves.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from moe_jax.distributed.sharding import path_name
from moe_jax.experts.shapes import shapes_of
from moe_jax.functional.position_embeddings import bias_by_distance
from moe_jax.functional.routing import RouterStats, Routing
from moe_jax.model_io.tuned_base import host_cpu
from moe_jax.models import LayerConfig, ModelConfig
from moe_jax.nn.block import make_layer
from moe_jax.nn.context import make_context
from moe_jax.nn.layers import Embed, Head
from moe_jax.nn.stack import make_final_norm

EMBEDDING = "embed/embedding"
TABLE = "relative_bias/table"

Read = Callable[[str], np.ndarray]
Specs = Mapping[str, jax.ShapeDtypeStruct]
Watch = Callable[[Any], list[Any]]
"""Prepares a layer so that applying it records something in the list that is returned."""


def mlp_inputs(block: Any) -> list[Any]:
    """A `Watch` that records the input of a layer's FFN or MoE, [B, T, d].

    The block itself decides where that is among norms and branches.
    """
    apply, seen = block.mlp, []

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
    """Returns the activations of tokens before the first layer; `leaves` by their paths, on the host."""
    # Only the rows of these tokens are taken from the table, which may be larger than a layer.
    leaves = {**leaves, EMBEDDING: leaves[EMBEDDING][tokens.reshape(-1)]}
    embed: Any = module_with_leaves(lambda rngs: Embed(config, rngs=rngs), jax.tree.map(jnp.asarray, leaves), "embed/")
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


def output_logits(config: ModelConfig, leaves: Mapping[str, Array], x: Float[Array, "B T d"]) -> Float[Array, "B T V"]:
    """Returns the logits: applies the norm after the last layer, and the head."""
    head: Any = module_with_leaves(lambda rngs: Head(config, rngs=rngs), leaves, "lm_head/")
    return head(apply_final_norm(config, leaves, x), leaves.get(EMBEDDING))


def text_loss(
    config: ModelConfig, leaves: Mapping[str, Array], x: Float[Array, "B T d"], tokens: Int[Array, "B T"]
) -> Float[Array, ""]:
    """Returns the negative log-likelihood, nats, of all tokens but the first of every row; float32.

    The leaves are those of the norm after the last layer, and of the head; `x` are the activations after that layer.
    """
    head: Any = module_with_leaves(lambda rngs: Head(config, rngs=rngs), leaves, "lm_head/")
    last = jnp.arange(tokens.shape[1], dtype=jnp.int32) == tokens.shape[1] - 1
    weights = jnp.broadcast_to(jnp.where(last, jnp.float32(0), jnp.float32(1)), tokens.shape)
    x, targets = apply_final_norm(config, leaves, x), jnp.roll(tokens, -1, axis=1)
    return head.weighted_loss(x, targets, weights, leaves.get(EMBEDDING))


def module_with_leaves(
    make: Callable[[nnx.Rngs], nnx.Module], leaves: Mapping[str, Array], prefix: str = ""
) -> nnx.Module:
    """Returns the module that `make` makes, with these leaves: prefix and path below the module -> array."""
    graphdef, state = nnx.split(shapes_of(make))
    return nnx.merge(
        graphdef, jax.tree_util.tree_map_with_path(lambda path, _: leaves[prefix + path_name(path)], state)
    )


class _Stack(NamedTuple):
    """An encoder, or a decoder, which without an encoder is the whole model, and the tokens that it is run on.

    Attributes:
      start: index in the model of its first layer.
      prefix: of its leaves that belong to no layer.
    """

    config: ModelConfig
    start: int
    prefix: str
    tokens: Int[np.ndarray, "B T"]


def _stacks(config: ModelConfig, tokens: Int[np.ndarray, "B T"]) -> list[_Stack]:
    """Returns the parts in the order in which they run. With an encoder, the decoder gets its tokens, shifted."""
    if not config.has_encoder:
        return [_Stack(config, 0, "", tokens)]
    start = np.full_like(tokens[:, :1], config.decoder_start_id)
    shifted = np.concatenate([start, tokens[:, :-1]], axis=1)
    encoder = _Stack(config.encoder, 0, "encoder_", tokens)
    return [encoder, _Stack(config.decoder, config.num_encoder_layers, "", shifted)]


class StreamedModel:
    """A model that is run on one batch without ever being in memory as a whole. Float32, on the host's CPU.

    Attributes:
      memory: bytes that the largest layer takes, working memory included.
    """

    def __init__(
        self,
        config: ModelConfig,
        specs: Specs,
        tokens: Int[np.ndarray, "B T"],
        *,
        like: "StreamedModel | None" = None,
        with_logits: bool = True,
    ):
        """Compiles every distinct layer; no weights are needed.

        In a model with an encoder, `tokens` are the encoder's. `like` is a model that runs the same batch and differs
        only in its layers: equal parts are not compiled again. `with_logits`: whether `logits` will be called.
        """
        self._config = config
        self._stacks = _stacks(config, tokens)
        self._x = jax.ShapeDtypeStruct((*tokens.shape, config.d_model), jnp.float32)
        self._programs: dict[Any, jax.stages.Compiled] = {} if like is None else dict(like._programs)
        self._embed_leaves = [name for name in specs if name.startswith("embed/")]
        last = {name: spec for name, spec in specs.items() if name.startswith(("final_norm/", "lm_head/"))}
        if config.tie_embeddings:
            last[EMBEDDING] = specs[EMBEDDING]
        self._last_leaves = list(last)
        norm = {name: spec for name, spec in specs.items() if name.startswith("encoder_norm/")}
        self._norm_leaves = list(norm)
        with _on_cpu():
            self._layers = [
                [self._layer(part, i, specs) for i in range(part.config.num_layers)] for part in self._stacks
            ]
            if config.has_encoder:
                apply = partial(apply_final_norm, config, where="encoder_norm/")
                self._norm = self._program("norm", lambda: jax.jit(apply).lower(norm, self._x))
            if with_logits:
                finish = partial(output_logits, config)
                self._finish = self._program("finish", lambda: jax.jit(finish).lower(last, self._x))
        self.memory = max(map(_memory, self._programs.values()))

    def _layer(self, part: _Stack, index: int, specs: Specs) -> tuple[dict[str, str], jax.stages.Compiled]:
        """Returns a layer's leaves (name below the layer -> path), and the program that takes them."""
        prefix, layer = f"layers/{part.start + index}/", part.config.layers[index]
        paths = {path.removeprefix(prefix): path for path in specs if path.startswith(prefix)}
        if layer.attention.relative_bias is not None:
            paths[TABLE] = part.prefix + TABLE
        stored = {name: specs[path] for name, path in paths.items()}
        key = (layer, tuple((name, spec.dtype) for name, spec in sorted(stored.items())))
        source = None if layer.cross is None else self._x
        apply = partial(apply_layer, part.config, layer, watch=mlp_inputs)
        return paths, self._program(key, lambda: jax.jit(apply).lower(stored, self._x, source))

    def _program(self, key: Any, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        if key not in self._programs:
            self._programs[key] = lower().compile()
        return self._programs[key]

    def logits(self, read: Read, on_layer: Callable[[], None] = lambda: None) -> Float[np.ndarray, "B T V"]:
        """Runs the model; `read` reads a leaf, and `on_layer` is called after every layer."""
        with _on_cpu():
            x = self._run(read, lambda *_: on_layer())
            return np.asarray(self._finish({name: read(name) for name in self._last_leaves}, x))

    def mlp_inputs(
        self, read: Read, see: Callable[[int, Float[Array, "B T d"]], None], *, stop: int | None = None
    ) -> None:
        """Runs the layers, or those before `stop`, and calls `see` with each index and the input of the layer's FFN."""
        with _on_cpu():
            self._run(read, see, stop)

    def _run(
        self, read: Read, see: Callable[[int, Float[Array, "B T d"]], None], stop: int | None = None
    ) -> Float[Array, "B T d"]:
        x = source = None
        for part, layers in zip(self._stacks, self._layers, strict=True):
            if x is not None:
                source = self._norm({name: read(name) for name in self._norm_leaves}, x)
            x = embed_tokens(part.config, {name: read(name) for name in self._embed_leaves}, part.tokens)
            for index, (paths, program) in enumerate(layers, start=part.start):
                if index == stop:
                    return x
                x, seen = program({name: read(path) for name, path in paths.items()}, x, source)
                x.block_until_ready()
                see(index, seen[0])
        assert x is not None
        return x


def _memory(program: jax.stages.Compiled) -> int:
    """Returns the bytes of leaves as they are read, of leaves as the program takes them, and of its working memory."""
    analysis = program.memory_analysis()
    assert analysis is not None
    return 2 * analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """Runs on the CPU: an accelerator would round its products, and the weights come from the host anyway."""
    with jax.default_device(host_cpu()), jax.default_matmul_precision("highest"):
        yield
