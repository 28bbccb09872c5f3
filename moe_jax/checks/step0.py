"""Step-0 equality: an upcycled or adapted model computes its source's logits before it is trained (methods.md 2.5).

Both models are run on the same tokens, layer by layer from disk, so that only one layer is in memory at a time,
whatever the size of the model. The layers are the modules that training runs; the final logits are compared.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.checks.streamed_layers import EMBEDDING, TABLE, apply_layer, embed_tokens, finish, mlp_inputs, normalise
from moe_jax.models import ModelConfig

PROBE_SHAPE = (2, 32)
TOLERANCE = 1e-5
TOLERANCE_PER_LAYER = 1e-6

Read = Callable[[str], np.ndarray]
Specs = Mapping[str, jax.ShapeDtypeStruct]


class Step0(NamedTuple):
    """The difference between the logits of the new model and those of its source.

    Attributes:
      difference: largest absolute difference of two logits; infinite where one is not finite.
      largest: largest absolute logit of the source.
      allowed: the difference that rounding can explain (see `compare_logits`).
    """

    difference: float
    largest: float
    allowed: float

    @property
    def equal(self) -> bool:
        return self.difference <= self.allowed


def compare_logits(before: Float[np.ndarray, "B T V"], after: Float[np.ndarray, "B T V"], num_layers: int) -> Step0:
    """Compares the logits of two models in float32.

    Allowed is 1e-5, relative to the largest logit if that is above 1. Rounding differs from layer to layer and adds up:
    measured on 24 layers of width 256, 1e-6 relative with well-scaled weights and 1e-5 with weights three times as
    large. So beyond 10 layers 1e-6 per layer is allowed. A wrong leaf or gate shows as 1e-2 or more.
    """
    difference = float(np.max(np.abs(before - after)))
    largest = float(np.max(np.abs(before)))
    allowed = max(TOLERANCE, TOLERANCE_PER_LAYER * num_layers) * max(1.0, largest)
    return Step0(difference if np.isfinite(difference) else np.inf, largest, allowed)


def probe_tokens(config: ModelConfig, seed: int) -> Int[np.ndarray, "B T"]:
    """Draws tokens to compare models on, uniform over the vocabulary."""
    batch, length = PROBE_SHAPE
    random = np.random.Generator(np.random.Philox(seed))
    return random.integers(0, config.vocab_size, (batch, min(length, config.max_positions)), dtype=np.int32)


class _Part(NamedTuple):
    """An encoder, or a decoder, which without an encoder is the whole model.

    Attributes:
      config: of this part.
      start: index in the model of its first layer.
      prefix: of its leaves that belong to no layer.
      tokens: that it is run on.
    """

    config: ModelConfig
    start: int
    prefix: str
    tokens: Int[np.ndarray, "B T"]


def _parts(config: ModelConfig, tokens: Int[np.ndarray, "B T"]) -> list[_Part]:
    """Returns the parts in the order in which they run. With an encoder, the decoder gets its tokens, shifted."""
    if not config.has_encoder:
        return [_Part(config, 0, "", tokens)]
    start = np.full_like(tokens[:, :1], config.decoder_start_id)
    shifted = np.concatenate([start, tokens[:, :-1]], axis=1)
    encoder = _Part(config.encoder, 0, "encoder_", tokens)
    return [encoder, _Part(config.decoder, config.num_encoder_layers, "", shifted)]


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

        Args:
          config: of the model.
          specs: shape and dtype, as stored, of every leaf, by path.
          tokens: the batch; in a model with an encoder, the encoder's.
          like: a model that runs the same batch and differs only in its layers; equal parts are not compiled again.
          with_logits: whether `logits` will be called.
        """
        self._config = config
        self._parts = _parts(config, tokens)
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
                [self._layer(part, i, specs) for i in range(part.config.num_layers)] for part in self._parts
            ]
            if config.has_encoder:
                self._norm = self._program("norm", lambda: jax.jit(partial(normalise, config)).lower(norm, self._x))
            if with_logits:
                self._finish = self._program("finish", lambda: jax.jit(partial(finish, config)).lower(last, self._x))
        self.memory = max(map(_memory, self._programs.values()))

    def _layer(self, part: _Part, index: int, specs: Specs) -> tuple[dict[str, str], jax.stages.Compiled]:
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
        """Runs the model.

        Args:
          read: reads a leaf.
          on_layer: called after every layer.
        """
        with _on_cpu():
            x = self._run(read, lambda *_: on_layer())
            return np.asarray(self._finish({name: read(name) for name in self._last_leaves}, x))

    def mlp_inputs(
        self, read: Read, see: Callable[[int, Float[Array, "B T d"]], None], *, stop: int | None = None
    ) -> None:
        """Runs the layers, or those before `stop`, and calls `see` with each index and the input of the layer's FFN.

        Args:
          read: reads a leaf.
          see: called after every layer.
          stop: None: all layers are run.
        """
        with _on_cpu():
            self._run(read, see, stop)

    def _run(
        self, read: Read, see: Callable[[int, Float[Array, "B T d"]], None], stop: int | None = None
    ) -> Float[Array, "B T d"]:
        x = source = None
        for part, layers in zip(self._parts, self._layers, strict=True):
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
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  #  JAX_PLATFORMS names an accelerator only
        device = jax.local_devices()[0]
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        yield
