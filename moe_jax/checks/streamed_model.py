"""Runs a model one layer after another, so that one layer is in memory at a time, whatever the size of the model."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.checks.streamed_layers import (
    TABLE,
    Read,
    Specs,
    apply_final_norm,
    apply_layer,
    embed_tokens,
    head_leaves,
    mlp_inputs,
    output_logits,
)
from moe_jax.checks.streamed_vision import Pictures, StreamedVision
from moe_jax.model_io.tuned_base import host_cpu
from moe_jax.models import ModelConfig


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
        pictures: Pictures | None = None,
        like: "StreamedModel | None" = None,
        with_logits: bool = True,
    ):
        """Compiles every distinct layer; no weights are needed.

        In a model with an encoder, `tokens` are the encoder's. `pictures` are of the first rows of one that sees.
        `like` is a model that runs the same batch and differs only in its layers: equal parts are not compiled again.
        `with_logits`: whether `logits` will be called.
        """
        self._config = config
        self._stacks = _stacks(config, tokens)
        self._x = jax.ShapeDtypeStruct((*tokens.shape, config.d_model), jnp.float32)
        self._programs: dict[Any, jax.stages.Compiled] = {} if like is None else dict(like._programs)
        self._embed_leaves = [name for name in specs if name.startswith("embed/")]
        last = {name: specs[name] for name in head_leaves(config, specs)}
        self._last_leaves = list(last)
        norm = {name: spec for name, spec in specs.items() if name.startswith("encoder_norm/")}
        self._norm_leaves = list(norm)
        with _on_cpu():
            self._vision = None if pictures is None else StreamedVision(config, specs, pictures, self._program)
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
        """Runs the layers, or those before `stop`, and calls `see` with each index and the input of the layer's FFN.

        In the place of one that it does not have, `see` gets the layer's output.
        """
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
            x = x if self._vision is None else self._vision(x, read)
            for index, (paths, program) in enumerate(layers, start=part.start):
                if index == stop:
                    return x
                x, seen = program({name: read(path) for name, path in paths.items()}, x, source)
                x.block_until_ready()
                see(index, seen[0] if seen else x)
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
