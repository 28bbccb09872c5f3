"""Step-0 equality: an upcycled or adapted model computes its source's logits before it is trained (methods.md 2.5).

Both models are run on the same tokens, and pictures if they see, layer by layer from disk, and the final logits are
compared; on a text also the predictions, since a difference of logits may be equal for all tokens, or affect only very
unlikely ones. `Probe` does so before the new model appears on disk.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from moe_jax.checks.streamed_model import StreamedModel
from moe_jax.checks.streamed_vision import Pictures
from moe_jax.core.data_sheets import available_memory
from moe_jax.core.errors import InputError
from moe_jax.core.finite import REMEDY, check_finite
from moe_jax.core.formatting import show_bytes
from moe_jax.core.terminal import Progress
from moe_jax.model_io.model_source import ModelSource
from moe_jax.model_io.tuned_base import LeavesOverBase, as_base, base_config, is_tuned
from moe_jax.models import ModelConfig
from moe_jax.nn.projector import tokens_per_picture

WINDOW = 128
"""Tokens of a window; each window is predicted from its own tokens alone."""

MOST_TOKENS = 512
"""Most tokens of a text that are compared: the logits of all of them are held at once."""


class ProbeText(NamedTuple):
    """A text that models are compared on, named by the path of its file; the first `MOST_TOKENS` ids are used."""

    name: str
    ids: Int[np.ndarray, " n"]


class TextComparison(NamedTuple):
    """Comparison of the predictions of a text by two models; natural logarithms, means over the scored tokens.

    `kl` is the KL divergence of the distributions of a next token, from the first model's to the second's.
    """

    text: str
    tokens: int
    kl: float
    loss_before: float
    loss_after: float

    def in_words(self) -> str:
        """Returns the figures as a sentence."""
        return (
            f"loss {self.loss_before:.4f} -> {self.loss_after:.4f}, KL divergence {self.kl:.3g} nats per token "
            f"({self.tokens:,} scored)"
        )


def text_rows(text: ProbeText, max_positions: int) -> tuple[Int[np.ndarray, "R T"], Bool[np.ndarray, "R T"]]:
    """Returns a text in rows, consecutive windows, and which of their tokens are scored: all but the first of each.

    The last row is padded with token 0 (models that read from left to right do not see it earlier).
    """
    ids, length = text.ids[:MOST_TOKENS], min(WINDOW, max_positions)
    rows = -(-len(ids) // length)
    tokens, scored = np.zeros(rows * length, np.int32), np.zeros(rows * length, bool)
    tokens[: len(ids)], scored[: len(ids)] = ids, True
    tokens, scored = tokens.reshape(rows, length), scored.reshape(rows, length)
    scored[:, 0] = False
    return tokens, scored


def compare_predictions(
    name: str,
    before: Float[np.ndarray, "R T V"],
    after: Float[np.ndarray, "R T V"],
    tokens: Int[np.ndarray, "R T"],
    scored: Bool[np.ndarray, "R T"],
) -> TextComparison:
    """Compares the logits of two models for the rows of `text_rows`, in float64, a row at a time."""
    if not scored.any():
        raise InputError(f"{name}: one token has nothing before it to be predicted from; give a longer text")
    kl = loss_before = loss_after = 0.0
    for row, (targets, counts) in enumerate(zip(tokens, scored, strict=True)):
        at = np.flatnonzero(counts)
        first, second = (_log_softmax(logits[row, at - 1]) for logits in (before, after))
        kl += float(np.sum(np.exp(first) * (first - second)))
        loss_before -= float(first[np.arange(len(at)), targets[at]].sum())
        loss_after -= float(second[np.arange(len(at)), targets[at]].sum())
    count = int(scored.sum())
    return TextComparison(name, count, kl / count, loss_before / count, loss_after / count)


def _log_softmax(logits: Float[np.ndarray, "n V"]) -> Float[np.ndarray, "n V"]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


PROBE_SHAPE = (2, 32)
# Separates the draws of pixels from those of tokens, which have the same seed.
_PICTURES = 0x9E5
TOLERANCE = 1e-5
TOLERANCE_PER_LAYER = 1e-6


class Step0(NamedTuple):
    """The largest absolute difference between logits of the new model and of its source; infinite if one is not finite.

    `largest` is the largest absolute logit of the source; see `compare_logits` for the difference that is allowed.
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
    difference, largest = float(np.max(np.abs(before - after))), float(np.max(np.abs(before)))
    allowed = max(TOLERANCE, TOLERANCE_PER_LAYER * num_layers) * max(1.0, largest)
    return Step0(difference if np.isfinite(difference) else np.inf, largest, allowed)


def probe_tokens(config: ModelConfig, seed: int) -> Int[np.ndarray, "B T"]:
    """Draws tokens to compare models on, uniform over the vocabulary."""
    batch, length = PROBE_SHAPE
    random = np.random.Generator(np.random.Philox(seed))
    return random.integers(0, config.vocab_size, (batch, min(length, config.max_positions)), dtype=np.int32)


def probe_pictures(config: ModelConfig, seed: int) -> Pictures | None:
    """Draws a picture for every row of `probe_tokens`, of pixels that are uniform; None: the model takes no pictures.

    Every second token of a row is a feature of its picture: as many as find room, evenly from all of them.
    """
    if config.vision is None:
        return None
    rows, length = probe_tokens(config, seed).shape
    random = np.random.Generator(np.random.Philox([seed, _PICTURES]))
    size = config.vision.processing.size
    pixels = random.integers(0, 256, (rows, 1, *size, 3), dtype=np.uint8)
    slots = np.zeros((rows, length), np.int32)
    places = slots[:, 1::2].shape[1]
    slots[:, 1::2] = np.linspace(1, tokens_per_picture(config.vision, config.d_model), places).round()
    return Pictures(pixels, slots)


class Comparisons(NamedTuple):
    """The comparisons that `Probe` makes.

    In `step0` the new model is compared with its source, or with the source with NF4 kernels if the new model has such;
    in `quantization` that with the source, and in `on_text` the same on a text.
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

        `config` and `specs` are of the new model, and `seed` of the tokens. Without NF4 kernels, `text` is not used.
        With `allow_nonfinite`, the source's weights may be NaN or infinite. Raises `InputError` if the largest layer
        does not fit into this machine's memory.
        """
        probe, pictures = probe_tokens(source.config, seed), probe_pictures(source.config, seed)
        nf4 = as_base(base_config(config, keep_nf4=True))
        tokens, self._probed = probe, probe.shape
        self._text: tuple[str, np.ndarray, np.ndarray] | None = None
        if text is not None and is_tuned(nf4):
            rows, scored = text_rows(text, source.config.max_positions)
            self._text = text.name, rows, scored
            # One batch: the layers are read, and compiled, once for both.
            padding = (0, 0), (0, rows.shape[1] - probe.shape[1])
            tokens = np.concatenate([np.pad(probe, padding), rows])
            pictures = None if pictures is None else pictures._replace(slots=np.pad(pictures.slots, padding))
        self._source, self._allow_nonfinite = source, allow_nonfinite
        self._before = StreamedModel(source.config, source.specs(), tokens, pictures=pictures)
        self._after = StreamedModel(config, specs, tokens, pictures=pictures, like=self._before)
        models = [self._before, self._after]
        self._nf4: tuple[StreamedModel, LeavesOverBase] | None = None
        if is_tuned(nf4):
            leaves = LeavesOverBase(nf4, source)
            self._nf4 = StreamedModel(nf4, leaves.specs, tokens, pictures=pictures, like=self._after), leaves
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
        """Compares the new model, whose leaves `read` reads, with the source; `progress` is called after every layer.

        If it `may_differ`, it is meant to compute something else; its logits must be finite all the same.

        Raises:
          InputError: if they should be equal and are not, or the source has weights or logits that are not finite.
        """
        done = itertools.count(1)

        def on_layer() -> None:
            progress("checking step 0", next(done), self._total)

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
