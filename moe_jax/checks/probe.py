"""Runs a model and the one made from it on the same tokens, to compare them before the new one appears on disk."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from moe_jax.checks.predictions import ProbeText, TextComparison, compare_predictions, text_rows
from moe_jax.checks.step0 import Step0, StreamedModel, compare_logits, probe_tokens
from moe_jax.core.errors import InputError
from moe_jax.core.finite import REMEDY, check_finite
from moe_jax.core.formatting import show_bytes
from moe_jax.core.memory import available_memory
from moe_jax.core.terminal import Progress
from moe_jax.model_io.model_source import ModelSource
from moe_jax.model_io.over_base import LeavesOverBase
from moe_jax.model_io.tuned_base import as_base, base_config, is_tuned
from moe_jax.models import ModelConfig


class Compared(NamedTuple):
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

    def compare(self, read: Callable[[str], np.ndarray], progress: Progress, *, may_differ: bool = False) -> Compared:
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
            quantization = compare_logits(self._of_probe(before), self._of_probe(expected), num_layers)
            if self._text is not None:
                name, rows, scored = self._text
                on_text = compare_predictions(name, before[-len(rows) :], expected[-len(rows) :], rows, scored)
        after = self._after.logits(read, on_layer)
        step0 = compare_logits(self._of_probe(expected), self._of_probe(after), num_layers)
        if may_differ and not np.isfinite(step0.difference):
            raise InputError("step-0 check: the new model's logits are not finite; nothing was kept")
        if not (may_differ or step0.equal):
            raise InputError(
                f"step-0 check: the new model's logits differ from the source's by {step0.difference:.3g} "
                f"(largest logit {step0.largest:.3g}, allowed {step0.allowed:.3g}); nothing was kept"
            )
        return Compared(step0, quantization, on_text)

    def _of_probe(self, logits: np.ndarray) -> np.ndarray:
        """Returns the logits of the probe tokens, without the rows of the text and the padding to its length."""
        rows, length = self._probed
        return logits[:rows, :length]

    def _read_source(self, path: str) -> np.ndarray:
        leaf = self._source.read(path)
        if not self._allow_nonfinite:
            check_finite(path, leaf, REMEDY)
        return leaf
