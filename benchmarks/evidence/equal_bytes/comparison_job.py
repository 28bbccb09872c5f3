"""The job of the comparison: a model is compressed, and held against what it was."""

import dataclasses
import tempfile
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from evidence.equal_bytes.entries import ALLOCATE, Entry
from evidence.equal_bytes.models import Subject, calibration, opened
from evidence.equal_bytes.recovery import recovered
from evidence.studies.compression_job import dense_source, scored_texts
from evidence.studies.full_experts import all_full_experts, count_of, experts_of, with_experts
from evidence.studies.jobs import Place
from evidence.studies.models import model_of
from evidence.studies.probes import Probes, probed
from evidence.studies.scales import SCALES
from evidence.studies.training_job import SELECTION, TEST
from moe_jax.compression import Calibration, compress, make_method
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.nn import Decoder

_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Asked:
    """One compressed model.

    Attributes:
      subject: what is compressed.
      entry: how; None: not at all.
      draw: of the calibration text.
      probes: what is asked of it beside the loss.
    """

    subject: Subject
    entry: Entry | None
    draw: int = 0
    probes: Probes | None = None


def compare(place: Place, asked: Asked) -> dict[str, Any]:
    """Compresses and scores.

    Returns:
      losses, selection_losses: of every domain's test and selection text, nats per token.
      window_losses: of every window of the test texts, likewise; of the first draw alone.
      kl: of every domain's test text, KL(p || q) in nats per token, p being what the model was and q what it is.
      bits_per_weight, expert_bytes: of the experts on the disk, everything included.
      output_error: of every layer, of calibrated methods.
      predicted_kl: what `allocate` expected, nats per token.
      rate, tried: of a recovery, see `recovery.Recovered`.
      What the probes give.
    """
    source, whole = opened(place, asked.subject)
    if asked.entry is None:
        found = _scores(place, asked.subject, model_of(whole))
        return found | (probed(place, asked.subject.scale, whole, whole, asked.probes) if asked.probes else {})
    entry, scale = asked.entry, asked.subject.scale
    place.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.work, prefix="compared-") as name:
        report = compress(
            source,
            Path(name) / "model",
            make_method(entry.method, dict(entry.options)),
            base=dense_source(place, scale) if entry.dense else None,
            calibration=_calibration(place, asked) if entry.calibrated else None,
            described={},
        )
        model = ModelDirectory(Path(name) / "model")
        made, learned = None, {}
        if entry.recovered:
            recovery = recovered(place, asked.subject, model, source, seed=asked.draw)
            made, learned = recovery.model, {"rate": recovery.rate, "tried": recovery.tried}
        same = all(model.config.moe(i).num_experts == whole.config.moe(i).num_experts for i in whole.config.moe_layers)
        if made is not None:
            leaves, same = whole, False
        elif same:  # one program scores the models of all these methods
            leaves = with_experts(whole, all_full_experts(model))
            made = model_of(leaves)
        else:
            leaves, made = whole, load_model(model, param_dtype="float32")
    found = _scores(place, asked.subject, made) | learned
    if asked.draw:
        del found["window_losses"]
    found["expert_bytes"] = report.expert_bytes_after
    found["bits_per_weight"] = 8 * report.expert_bytes_after / count_of(experts_of(whole))
    errors = [layer.output_error for layer in report.layers]
    if None not in errors:
        found["output_error"] = errors
    predicted = [layer.predicted_divergence for layer in report.layers]
    if None not in predicted:
        found["predicted_kl"] = sum(predicted)
    return found | (probed(place, scale, leaves, whole, asked.probes) if asked.probes and same else {})


def _calibration(place: Place, asked: Asked) -> Calibration:
    assert asked.entry is not None
    allocates = asked.entry.method == ALLOCATE
    return calibration(place, asked.subject, asked.draw, gradients=asked.entry.gradients, sensitivities=allocates)


def _scores(place: Place, subject: Subject, model: Decoder) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": {}, "kl": {}, "window_losses": {}, "selection_losses": {}}
    length = SCALES[subject.scale].seq_len
    program = _program(nnx.graphdef(model))
    for split, into in ((TEST, "losses"), (SELECTION, "selection_losses")):
        for name, ids in scored_texts(place, subject.scale, split).items():
            windows = ids[: len(ids) // length * length].reshape(-1, length)
            before = _of_whole(place, subject, split, name)
            parts = [
                program(nnx.state(model), windows[start : start + _ROWS], before[start : start + _ROWS])
                for start in range(0, len(windows), _ROWS)
            ]
            nll, kl = np.concatenate(parts, axis=1).astype(np.float64)
            found[into][name] = float(nll.mean())
            if split == TEST:
                found["kl"][name] = float(kl.mean())
                found["window_losses"][name] = np.round(nll, 5).tolist()
    return found


@lru_cache(maxsize=8)
def _of_whole(place: Place, subject: Subject, split: str, name: str) -> np.ndarray:
    """Log-probabilities of the model before it is compressed, for every window but its last token; float16[n, L, V].

    Half of the digits are enough: the divergences of interest are of 1e-3 nats and more.
    """
    _, whole = opened(place, subject)
    model, length = model_of(whole), SCALES[subject.scale].seq_len
    ids = scored_texts(place, subject.scale, split)[name]
    windows = ids[: len(ids) // length * length].reshape(-1, length)
    program = jax.jit(partial(_log_probabilities, nnx.graphdef(model)))
    parts = [
        np.asarray(program(nnx.state(model), windows[start : start + _ROWS])).astype(np.float16)
        for start in range(0, len(windows), _ROWS)
    ]
    return np.concatenate(parts)


@lru_cache(maxsize=4)
def _program(graphdef: nnx.GraphDef) -> Any:
    def means(state: nnx.State, rows: jax.Array, before: jax.Array) -> jax.Array:
        """Of every row, means over tokens: the negative log-likelihood, and the divergence from what it was."""
        after = _log_probabilities(graphdef, state, rows)
        nll = -jnp.take_along_axis(after, rows[:, 1:, None], 2)[..., 0].mean(axis=1)
        p = before.astype(jnp.float32)
        return jnp.stack([nll, jnp.sum(jnp.exp(p) * (p - after), axis=2).mean(axis=1)])

    return jax.jit(means)


def _log_probabilities(graphdef: nnx.GraphDef, state: nnx.State, rows: jax.Array) -> jax.Array:
    logits = nnx.merge(graphdef, state)(rows).logits[:, :-1]
    return jax.nn.log_softmax(logits.astype(jnp.float32))
