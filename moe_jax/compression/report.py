"""Figures that say what compression did: to the experts of a layer, to a model, to the models of a sweep."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moe_jax.compression.calibration.expert_statistics import BACKGROUND
from moe_jax.compression.coding.half_products import weighed_squares
from moe_jax.compression.part_report import Losses, PartReport, TriedPlan, root_ratio
from moe_jax.compression.recovery_figures import Recovery
from moe_jax.core.formatting import show_bytes
from moe_jax.model_io.leaves_to_write import experts_by_layer, zero_experts_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFigures:
    """Over all matrices of a layer's experts: W before compression, W^ after it. None where a figure has no meaning.

    Attributes:
      relative_error: ||W^ - W|| / ||W||, of all experts together.
      error_per_neuron: (1/E) sum_k ||W^_k - W_k||^2 / f, the error of a layer in methods.md 5.
      output_error: of the outputs of all matrices on the calibration text, each for the inputs that it had: the root of
        sum tr(E^T H E) / sum tr(W^T H W), E = W^ - W, H being the second moment of the inputs; None without a text.
      predicted_divergence: KL(p || q) of the model's predictions, nats per token, that `allocate` expects.
      delta_error: ||W^ - W|| / ||W - base||; None also where every expert equals the base. It is 1 where nothing of
        the deltas is left, and sqrt(p / (1 - p)) for DARE, whose rescaled entries are right only on average.
      cosine_mean, cosine_min: between an expert and the base, mean and least over the experts.
      objective: of the barycenter, (1/E) sum_k ||T_k W_k - W_base||^2.
      rounds: until the experts were aligned.
      converged: whether the last round of the alignment changed nothing.
      seconds: spent on the layer.
      choice: in words, what was chosen for this layer; layers may differ in it.
      uniform_usage: whether, for want of a text, experts were taken to be used alike.
      zero_experts: those whose weights were all zero before compression.
      expert_tokens: of the calibration text, for each expert the tokens that are routed to it; None if a method does
        not look at what experts are given.
      expert_tokens_by_source: the same of every source of the calibration, by its name; None: there is but one.
    """

    relative_error: float
    error_per_neuron: float
    output_error: float | None = None
    predicted_divergence: float | None = None
    delta_error: float | None = None
    cosine_mean: float | None = None
    cosine_min: float | None = None
    objective: float | None = None
    rounds: int | None = None
    converged: bool | None = None
    seconds: float | None = None
    choice: str | None = None
    uniform_usage: bool | None = None
    zero_experts: tuple[int, ...] = ()
    expert_tokens: tuple[int, ...] | None = None
    expert_tokens_by_source: Mapping[str, tuple[int, ...]] | None = None

    @classmethod
    def from_note(cls, fields: Mapping[str, Any]) -> Self:
        """Figures that a job noted as JSON, which has lists for tuples."""
        made: dict[str, Any] = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        if by_source := fields.get("expert_tokens_by_source"):
            made["expert_tokens_by_source"] = {name: tuple(tokens) for name, tokens in by_source.items()}
        return cls(**{**fields, **made})


class Measure:
    """Adds up the figures of a layer, one kernel after another, in any order; and measures the time."""

    def __init__(self, num_experts: int, num_neurons: int):
        """Starts with no matrix added, and the clock; E experts, whose hidden width was `num_neurons`."""
        self._began = time.monotonic()
        # Per expert: |W|^2, |base|^2, W.base, |W - base|^2, |W^ - W|^2.
        self._sums = np.zeros((num_experts, 5))
        # Of all of them: tr(W^T H W), tr(E^T H E).
        self._outputs = np.zeros(2)
        self._num_neurons = num_neurons
        self._has_base = True

    def add(
        self,
        expert: int,
        kernel: np.ndarray,
        base: np.ndarray | None,
        approximation: np.ndarray | Array,
        moment: np.ndarray | None = None,
    ) -> None:
        """Adds one matrix of one expert.

        Args:
          expert: its index.
          kernel: [in, out], before compression.
          base: [in, out], as it is stored now; None: there is none.
          approximation: [in, out], what is added to the base now. As it is stored, not rounded to the base's dtype.
          moment: [in, in], second moment of the inputs; None: not known.
        """
        if base is None:
            self._has_base = False
            base = np.zeros((1, 1), np.float32)
        columns, unit = _column_sums(kernel, base, approximation)
        self._sums[expert] += np.asarray(columns, np.float64).sum(axis=1) * float(unit) ** 2
        if moment is not None:
            nothing = np.zeros((1, 1), np.float32)
            for number, left_out in enumerate(((nothing, nothing), (base, approximation))):
                columns = _output_sums(kernel, *left_out, moment)
                self._outputs[number] += np.sum(np.asarray(columns), dtype=np.float64)

    @property
    def squared_error(self) -> float:
        """sum of ||W^ - W||^2 over everything that was added."""
        return float(self._sums[:, 4].sum())

    def include(self, other: "Measure") -> None:
        """Adds everything that was added to another measure of the same layer."""
        self._sums += other._sums
        self._outputs += other._outputs
        self._has_base &= other._has_base

    def figures(self, *, analysed: np.ndarray | float | None = 0.0, **others: Any) -> LayerFigures:
        """The figures of everything that was added, and `others`; `analysed` are seconds before, None: no time."""
        weight, base, dot, delta, error = self._sums.T
        figures = LayerFigures(
            relative_error=root_ratio(error.sum(), weight.sum()) or 0.0,
            error_per_neuron=float(error.mean()) / self._num_neurons,
            zero_experts=tuple(np.flatnonzero(weight == 0).tolist()),
            output_error=root_ratio(self._outputs[1], self._outputs[0]),
            seconds=None if analysed is None else float(analysed) + time.monotonic() - self._began,
            **others,
        )
        if not self._has_base:
            return figures
        norms = np.sqrt(weight * base)
        # An expert of zeros points nowhere; it is no sign of another origin.
        cosines = np.divide(dot, norms, out=np.ones_like(dot), where=norms > 0)
        return dataclasses.replace(
            figures,
            delta_error=root_ratio(error.sum(), delta.sum()),
            cosine_mean=float(cosines.mean()),
            cosine_min=float(cosines.min()),
        )


@jax.jit
def _column_sums(
    kernel: Float[Array, "i o"], base: Float[Array, "#i #o"], approximation: Float[Array, "i o"]
) -> tuple[Float[Array, "5 o"], Float[Array, ""]]:
    """Sums over rows, and the unit of the numbers of which they are the squares.

    In float32, for which the unit is a power of two near the largest number: else squares of small numbers would be
    zero, and of large ones infinite. The host adds the sums up in float64, for float32 would lose most of 10^8 terms.
    """
    kernel, base = kernel.astype(jnp.float32), base.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(kernel)), jnp.max(jnp.abs(base)))
    unit = jnp.ldexp(jnp.float32(1), jnp.clip(jnp.frexp(largest)[1], -100, 100))
    kernel, approximation = kernel / unit, approximation / unit
    base = jnp.broadcast_to(base / unit, kernel.shape)
    delta = kernel - base
    terms = (kernel * kernel, base * base, kernel * base, delta * delta, (approximation - delta) ** 2)
    return jnp.stack([jnp.sum(term, axis=0) for term in terms]), unit


@jax.jit
def _output_sums(
    kernel: Float[Array, "i o"],
    base: Float[Array, "#i #o"],
    approximation: Float[Array, "#i #o"],
    moment: Float[Array, "i i"],
) -> Float[Array, " o"]:
    """The terms of tr(E^T H E) for what base and approximation leave of a kernel, a column each."""
    error = kernel.astype(jnp.float32) - base.astype(jnp.float32) - approximation
    return weighed_squares(moment, error)


DENSE = "dense model"
OWN = "base of the bank"
MEAN = "mean of the experts"
BARYCENTER = "barycenter of the experts"
NO_BASE = "experts themselves"
# Measured on stories260K, upcycled and trained for 300 steps: 0.995 at a learning rate of 1e-3, 0.89 at 6e-3. For
# independent experts it is 1/sqrt(E) to their own mean, at most 0.71, and 0 to a base that is not theirs.
LOW_COSINE = 0.8
# Nats per token, of a layer. Codes of the fewest bits make some ten times the least divergence that is measured.
MEASURABLE_DIVERGENCE = 1e-7


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerReport(LayerFigures):
    """Figures of one layer.

    Attributes:
      layer: its index.
      base: the base that the deltas are relative to.
      bytes_before, bytes_after: of its experts and universal FFN, on the disk if the model is there.
    """

    layer: int
    base: str
    bytes_before: int
    bytes_after: int

    @property
    def rare_experts(self) -> tuple[int, ...]:
        """Experts to which fewer tokens of the calibration text are routed than count for every expert anyway."""
        return tuple(expert for expert, tokens in enumerate(self.expert_tokens or ()) if tokens < BACKGROUND)

    @property
    def unseen_experts(self) -> tuple[int, ...]:
        """Experts to which no token of the calibration text is routed."""
        return tuple(expert for expert, tokens in enumerate(self.expert_tokens or ()) if not tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of a compressed model.

    Attributes:
      layers: the layers whose experts were compressed.
      parts: linear maps outside the experts that were put in codes, by part of the model.
      losses: of the calibration text, where it was run through the layers as they were compressed; else None.
      tried: plans that were tried before the best one was carried out.
      bytes_before, bytes_after: of all weights, on the disk if the model is there.
      earlier: compressions of the model before this one, in words (`options.in_words`).
      calibration_tokens: number of tokens of every source of the calibration, by its name; None: there was none.
      recovery: None: nothing was tuned after the compression.
    """

    layers: tuple[LayerReport, ...]
    parts: tuple[PartReport, ...] = ()
    losses: Losses | None = None
    tried: tuple[TriedPlan, ...] = ()
    bytes_before: int
    bytes_after: int
    earlier: tuple[str, ...] = ()
    calibration_tokens: Mapping[str, int] | None = None
    recovery: Recovery | None = None

    @property
    def expert_bytes_before(self) -> int:
        """Number of bytes of the experts of the compressed layers before compression."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def expert_bytes_after(self) -> int:
        """Number of bytes of the experts of the compressed layers after compression."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings to the user, one line each."""
        found = []
        zero = {layer.layer: layer.zero_experts for layer in self.layers if layer.zero_experts}
        if zero:
            found.append(zero_experts_line(zero))
        cosines = {layer: layer.cosine_mean for layer in self.layers if layer.base in (DENSE, OWN, MEAN)}
        low = {layer: cosine for layer, cosine in cosines.items() if cosine is not None and cosine < LOW_COSINE}
        if low:
            least = min(low.values())
            where = ", ".join(str(layer.layer) for layer in list(low)[:4]) + (", ..." if len(low) > 4 else "")
            found.append(
                f"the experts seem to have no common origin: cosine to the base {least:.2f} in layers {where}, where "
                f"upcycled experts have above {LOW_COSINE}; deltas from one base are the wrong tool for such a model, "
                "the right one is --method resmoe"
            )
        if any(layer.uniform_usage for layer in self.layers):
            found.append(
                "how the experts are used is not known: they were taken to be used alike, and as similar as the "
                "weights of the router say; --calibrate TEXT measures it"
            )
        predicted = [layer.predicted_divergence for layer in self.layers]
        if predicted and all(one is not None and one < MEASURABLE_DIVERGENCE for one in predicted):
            found.append(
                "what codes change of the predictions is too little to be measured (less than "
                f"{MEASURABLE_DIVERGENCE:g} nats per token in every layer), so that bits were chosen mostly by the "
                "errors of outputs; a model that is not trained is like that"
            )
        rare = {layer.layer: layer.rare_experts for layer in self.layers if layer.rare_experts}
        if rare:
            unseen = sum(len(layer.unseen_experts) for layer in self.layers)
            none_at_all = f" ({unseen} of them none at all)" if unseen else ""
            found.append(
                f"the calibration gives {experts_by_layer(rare)} fewer than {BACKGROUND} tokens each{none_at_all}: "
                "their statistics were shrunk towards those of their layers, which count for every expert as much as "
                f"{BACKGROUND} tokens, so that what is kept of them was chosen mostly by what their layers are given; "
                "more --samples, a text nearer to what the model is for, or further sources (built-in, self) reach them"
            )
        if self.expert_bytes_after > self.expert_bytes_before:
            found.append(
                f"the experts take {self.expert_bytes_after / self.expert_bytes_before:.0%} of the room they took: "
                "the deltas are not light enough"
            )
        return tuple(found)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the figures that `to_json` gave to the lineage."""
        made: dict[str, Any] = {name: fields[name] for name in ("bytes_before", "bytes_after")}
        made["layers"] = tuple(LayerReport.from_note(layer) for layer in fields["layers"])
        made["parts"] = tuple(PartReport(**part) for part in fields.get("parts", ()))
        made["losses"] = Losses(**fields["losses"]) if "losses" in fields else None
        made["tried"] = tuple(TriedPlan(**one) for one in fields.get("tried", ()))
        made["earlier"] = tuple(fields.get("earlier", ()))
        made["recovery"] = Recovery(**fields["recovery"]) if "recovery" in fields else None
        return cls(**made, calibration_tokens=fields.get("calibration_tokens"))

    def to_json(self) -> dict[str, Any]:
        """Returns the figures for the lineage and for programs."""
        recovery = {} if self.recovery is None else {"recovery": dataclasses.asdict(self.recovery)}
        return recovery | {
            "expert_bytes_before": self.expert_bytes_before,
            "expert_bytes_after": self.expert_bytes_after,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            **({} if self.calibration_tokens is None else {"calibration_tokens": dict(self.calibration_tokens)}),
            "warnings": list(self.warnings),
            **({} if not self.earlier else {"earlier": list(self.earlier)}),
            **({} if not self.parts else {"parts": [dataclasses.asdict(part) for part in self.parts]}),
            **({} if self.losses is None else {"losses": self.losses._asdict()}),
            **({} if not self.tried else {"tried": [one._asdict() for one in self.tried]}),
            "layers": [
                {"layer": layer.layer, "base": layer.base, **dataclasses.asdict(layer)} for layer in self.layers
            ],
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One compressed model."""

    method: str  # its name
    option: str  # the option that was varied, such as `drop` and 0.9
    value: float
    expert_bytes: int  # of the compressed layers' experts on the disk
    kept: float  # their share of the bytes before compression
    relative_error: float  # ||W^ - W|| / ||W||, averaged over layers
    nll: float  # of the text; at most `sweep.WORST_NLL`, which also stands for values that are not finite
    perplexity: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """All compressed models of a sweep.

    Attributes:
      nll, perplexity: of the text, without compression.
      expert_bytes: of the experts without compression.
      points: one for every method and value.
      warnings: of all of them; see `Report`.
    """

    nll: float
    perplexity: float
    expert_bytes: int
    points: tuple[Point, ...]
    warnings: tuple[str, ...]


WORDS = ("part", "base", "choice")
"""Columns of words; they are often the same in all layers."""


def layer_columns(layers: Sequence[LayerReport]) -> dict[str, list[str]]:
    """The figures of compressed layers as columns of a table: a text for every layer, by title.

    Columns without any figure are left out; `-` means no figure. A line break in a title is where it may be divided.
    """
    columns = {title: [show(layer) for layer in layers] for title, show in _COLUMNS.items()}
    return {
        title: ["-" if text is None else text for text in texts]
        for title, texts in columns.items()
        if any(text is not None for text in texts)
    }


def _number(name: str, form: str) -> Callable[[LayerReport], str | None]:
    return lambda layer: None if getattr(layer, name) is None else format(getattr(layer, name), form)


def _rounds(layer: LayerReport) -> str | None:
    if layer.rounds is None:
        return None
    return str(layer.rounds) if layer.converged else f"{layer.rounds}, not converged"


_COLUMNS: dict[str, Callable[[LayerReport], str | None]] = {
    "layer": _number("layer", ""),
    "base": _number("base", ""),
    "choice": _number("choice", ""),
    "cosine\nto base": _number("cosine_mean", ".4f"),
    "least": _number("cosine_min", ".4f"),
    "objective": _number("objective", ".4g"),
    "rounds": _rounds,
    "error": _number("relative_error", ".4f"),
    "of\noutputs": _number("output_error", ".4f"),
    "least\ntokens": lambda layer: None if layer.expert_tokens is None else f"{min(layer.expert_tokens):,}",
    "predicted\nKL": _number("predicted_divergence", ".5f"),
    "of the\ndelta": _number("delta_error", ".4f"),
    "per\nneuron": _number("error_per_neuron", ".4g"),
    "seconds": _number("seconds", ".1f"),
    "bytes": lambda layer: show_bytes(layer.bytes_after),
    "kept": lambda layer: f"{layer.bytes_after / layer.bytes_before:.1%}",
}
