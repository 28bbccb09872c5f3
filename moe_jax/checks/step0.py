"""Step-0 equality: an upcycled or adapted model computes its source's logits before it is trained (methods.md 2.5).

Both models are run on the same tokens, layer by layer from disk, so that only one layer is in memory at a time,
whatever the size of the model. The layers are the modules that training runs; the final logits are compared. `Probe`
does so before the new model appears on disk.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.checks.predictions import ProbeText, TextComparison, compare_predictions, text_rows
from moe_jax.checks.streamed_layers import (
    EMBEDDING,
    TABLE,
    apply_final_norm,
    apply_layer,
    embed_tokens,
    mlp_inputs,
    output_logits,
)
from moe_jax.core.errors import InputError
from moe_jax.core.finite import REMEDY, check_finite
from moe_jax.core.formatting import show_bytes
from moe_jax.core.memory import available_memory
from moe_jax.core.terminal import Progress
from moe_jax.model_io.model_source import ModelSource
from moe_jax.model_io.tuned_base import LeavesOverBase, as_base, base_config, is_tuned
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


class _Stack(NamedTuple):
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

        Args:
          config: of the model.
          specs: shape and dtype, as stored, of every leaf, by path.
          tokens: the batch; in a model with an encoder, the encoder's.
          like: a model that runs the same batch and differs only in its layers; equal parts are not compiled again.
          with_logits: whether `logits` will be called.
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
                self._norm = self._program(
                    "norm", lambda: jax.jit(partial(apply_final_norm, config)).lower(norm, self._x)
                )
            if with_logits:
                self._finish = self._program(
                    "finish", lambda: jax.jit(partial(output_logits, config)).lower(last, self._x)
                )
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
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  #  JAX_PLATFORMS names an accelerator only
        device = jax.local_devices()[0]
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        yield


class Comparisons(NamedTuple):
    """The comparisons that `Probe` makes.

    Attributes:
      step0: the new model compared with its source, or with the source with NF4 kernels if the new model has such.
      quantization: the source with NF4 kernels compared with the source; None: there are no NF4 kernels.
      on_text: the same on a text.
    """

    step0: Step0
    quantization: Step0 | None
    on_text: TextComparison | None


def has_nf4_kernels(config: ModelConfig) -> bool:
    """Whether the step-0 check of a model with this config also compares its source with NF4 kernels."""
    return is_tuned(as_base(base_config(config, keep_nf4=True)))


class Probe:
    """The source and the new model, compiled before anything is written; with NF4 kernels, also the source in NF4."""

    def __init__(
        self,
        source: ModelSource,
        config: ModelConfig,
        specs: Mapping[str, jax.ShapeDtypeStruct],
        seed: int,
        *,
        text: ProbeText | None = None,
        allow_nonfinite: bool = False,
    ):
        """Compiles; no weights are read.

        Args:
          source: the original model.
          config: of the new model.
          specs: shape and dtype of the leaves of the new model, by path.
          seed: of the tokens.
          text: on which the source with NF4 kernels is compared with the source; not used without NF4 kernels.
          allow_nonfinite: whether the source's weights may be NaN or infinite.

        Raises:
          InputError: if the largest layer does not fit into this machine's memory.
        """
        probe = probe_tokens(source.config, seed)
        nf4 = as_base(base_config(config, keep_nf4=True))
        tokens, self._probed = probe, probe.shape
        self._text: tuple[str, np.ndarray, np.ndarray] | None = None
        if text is not None and is_tuned(nf4):
            rows, scored = text_rows(text, source.config.max_positions)
            self._text = text.name, rows, scored
            # One batch: the layers are read, and compiled, once for both.
            tokens = np.concatenate([np.pad(probe, ((0, 0), (0, rows.shape[1] - probe.shape[1]))), rows])
        self._source = source
        self._allow_nonfinite = allow_nonfinite
        self._before = StreamedModel(source.config, source.specs(), tokens)
        self._after = StreamedModel(config, specs, tokens, like=self._before)
        models = [self._before, self._after]
        self._nf4: tuple[StreamedModel, LeavesOverBase] | None = None
        if is_tuned(nf4):
            leaves = LeavesOverBase(nf4, source)
            self._nf4 = StreamedModel(nf4, leaves.specs, tokens, like=self._after), leaves
            models.append(self._nf4[0])
        self._total = len(models) * config.num_layers
        needed, available = max(model.memory for model in models), available_memory()
        if available is not None and needed > available:
            raise InputError(
                f"the step-0 check needs {show_bytes(needed)} for the largest layer, {show_bytes(available)} are free; "
                "use a larger machine, or --no-step0-check"
            )

    def compare(
        self, read: Callable[[str], np.ndarray], progress: Progress, *, may_differ: bool = False
    ) -> Comparisons:
        """Compares the new model that `read` reads with the source.

        Args:
          read: reads a leaf of the new model.
          progress: called after every layer.
          may_differ: the new model is meant to compute something else; its logits must be finite all the same.

        Raises:
          InputError: if they should be equal and are not, or the source has weights or logits that are not finite.
        """
        done = 0

        def on_layer() -> None:
            nonlocal done
            done += 1
            progress("checking step 0", done, self._total)

        num_layers, quantization, on_text = self._source.config.num_layers, None, None
        expected = before = self._before.logits(self._read_source, on_layer)
        if not np.isfinite(before).all():
            raise InputError(
                "step-0 check: the source's logits are not finite, so that none can be compared with them; mend the "
                "source, or use --no-step0-check"
            )
        if self._nf4 is not None:
            model, leaves = self._nf4
            expected = model.logits(leaves.read, on_layer)
            quantization = compare_logits(self._probe_logits(before), self._probe_logits(expected), num_layers)
            if self._text is not None:
                name, rows, scored = self._text
                on_text = compare_predictions(name, before[-len(rows) :], expected[-len(rows) :], rows, scored)
        after = self._after.logits(read, on_layer)
        step0 = compare_logits(self._probe_logits(expected), self._probe_logits(after), num_layers)
        if may_differ and not np.isfinite(step0.difference):
            raise InputError("step-0 check: the new model's logits are not finite; nothing was kept")
        if not (may_differ or step0.equal):
            raise InputError(
                f"step-0 check: the new model's logits differ from the source's by {step0.difference:.3g} "
                f"(largest logit {step0.largest:.3g}, allowed {step0.allowed:.3g}); nothing was kept"
            )
        return Comparisons(step0, quantization, on_text)

    def _probe_logits(self, logits: np.ndarray) -> np.ndarray:
        """Returns the logits of the probe tokens, without the rows of the text and the padding to its length."""
        rows, length = self._probed
        return logits[:rows, :length]

    def _read_source(self, path: str) -> np.ndarray:
        leaf = self._source.read(path)
        if not self._allow_nonfinite:
            check_finite(path, leaf, REMEDY)
        return leaf
