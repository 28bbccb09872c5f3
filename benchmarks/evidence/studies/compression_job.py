"""The job that all studies of compression have: a kept model is compressed by one method, and scored."""

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from evidence.studies.bfloat16 import rounded
from evidence.studies.corpus import Corpus, given_model, tokenizer_file
from evidence.studies.full_experts import (
    Kernels,
    all_full_experts,
    count_of,
    designs,
    experts_of,
    widths_of,
    with_experts,
    with_permuted_neurons,
)
from evidence.studies.jobs import Place
from evidence.studies.likeness import cosines, least_error_per_neuron, squared_norm
from evidence.studies.models import Leaves, model_of, read_leaves
from evidence.studies.probes import Probes, probed
from evidence.studies.scales import MIDDLE, SCALES
from evidence.studies.texts import DOMAINS
from evidence.studies.trainer import Trainer
from evidence.studies.training_job import DENSE, TEST, kept_path, start_config
from evidence.studies.variants import NO_DELTAS
from moe_jax.compression import Calibration, Report, compress, make_method
from moe_jax.compression.calibration.recording import LayerCalibration
from moe_jax.distributed.sharding import make_mesh
from moe_jax.evaluation.held_out import measure_router_statistics
from moe_jax.model_io.in_memory import CastSource
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig
from moe_jax.nn import Decoder

# Of a report, layer by layer.
_FIGURES = ("error_per_neuron", "relative_error", "delta_error", "cosine_mean", "objective")


@dataclasses.dataclass(frozen=True)
class Compression:
    """One compressed model.

    Attributes:
      scale: name of one of `SCALES`.
      model: name under which the model is kept.
      method: a key of `moe_jax.compression.METHODS`, or `NO_DELTAS`: every expert becomes the base.
      options: of the method.
      dense: whether deltas are taken from the dense model; else from the mean of the experts, where they are taken.
      calibrated: whether the method is given the statistics of the routers on the text of the training.
      permuted: the seed by which the neurons of experts are put into another order first; None: they are not.
      served: whether the compressed model is also scored as it is, with a program of its own.
      matched: whether the error is also computed with the neurons matched anew.
      windows: whether the losses of all windows of text are kept.
      probes: what is asked of it beside the loss.
    """

    scale: str
    model: str
    method: str
    options: tuple[tuple[str, Any], ...] = ()
    dense: bool = False
    calibrated: bool = False
    permuted: int | None = None
    served: bool = False
    matched: bool = False
    windows: bool = False
    probes: Probes | None = None


def compress_model(place: Place, asked: Compression) -> dict[str, Any]:
    """Compresses and scores.

    Returns:
      losses: of every domain, nats per token, of the uncompressed model with what the experts became. One program
        scores the models of all methods so. window_losses: if asked for, of every window of these texts.
      served_losses: if asked for, of the compressed model as it is.
      expert_bytes_before, expert_bytes_after: on the disk. bits_per_weight: the latter, of an expert's weight before.
      error_per_neuron, relative_error, delta_error, cosine_mean, objective: of every layer, as `LayerFigures` has them.
      least_error_per_neuron: likewise, if asked for.
      What the probes give.
    """
    source, whole = kept_model(place, asked.scale, asked.model)
    if asked.permuted is not None:
        source = with_permuted_neurons(source, asked.permuted)
        whole = read_leaves(CastSource(source, "float32"))
    before = experts_of(whole)
    if asked.method == NO_DELTAS:
        after = _bases(before, dense_source(place, asked.scale) if asked.dense else None)
        found: dict[str, Any] = {}
    else:
        with _compressed(place, source, asked) as (model, report):
            after = all_full_experts(model, widths_of(source))
            found = _figures(report, count_of(before))
            if asked.served:
                found["served_losses"] = losses(place, asked.scale, load_model(model))
    if asked.matched and found:
        found["least_error_per_neuron"] = [
            least_error_per_neuron(designs(before[layer]), designs(after[layer])) for layer in before
        ]
    leaves = with_experts(whole, after)
    found = _scores(place, asked.scale, model_of(leaves), windows=asked.windows) | found
    return found | (probed(place, asked.scale, leaves, whole, asked.probes) if asked.probes else {})


def describe_model(
    place: Place, scale: str, model: str, probes: Probes | None = None, *, windows: bool = False
) -> dict[str, Any]:
    """Scores a kept model as it is stored, in bfloat16, and says how alike its experts are.

    Returns:
      losses: of every domain. window_losses: if asked for, of their windows. expert_params: of all experts.
      cosine, matched_cosine: of every layer, between two experts, on average; with their neurons matched.
      squared_norm: of every layer, of an expert, on average.
      What the probes give.
    """
    _, whole = kept_model(place, scale, model)
    by_layer = experts_of(whole)
    pairs = [cosines(designs(experts)) for experts in by_layer.values()]
    found = _scores(place, scale, model_of(whole), windows=windows) | {
        "expert_params": count_of(by_layer),
        "cosine": [as_they_are for as_they_are, _ in pairs],
        "matched_cosine": [matched for _, matched in pairs],
        "squared_norm": [squared_norm(designs(experts)) for experts in by_layer.values()],
    }
    return found | (probed(place, scale, whole, whole, probes) if probes else {})


def losses(place: Place, scale: str, model: Decoder) -> dict[str, float]:
    """Of every domain's test text, nats per token."""
    trainer, texts = _trainer(model.config), scored_texts(place, scale, TEST)
    return {name: trainer.score(model, ids, SCALES[scale].seq_len) for name, ids in texts.items()}


def _scores(place: Place, scale: str, model: Decoder, *, windows: bool) -> dict[str, Any]:
    """`losses`, or those of windows with their means."""
    if not windows:
        return {"losses": losses(place, scale, model)}
    trainer, texts = _trainer(model.config), scored_texts(place, scale, TEST)
    found = {name: trainer.score_windows(model, ids, SCALES[scale].seq_len) for name, ids in texts.items()}
    means = {name: float(np.mean(of_text)) for name, of_text in found.items()}
    return {"losses": means, "window_losses": {name: np.round(of, 6).tolist() for name, of in found.items()}}


@lru_cache(maxsize=2)
def kept_model(place: Place, scale: str, name: str) -> tuple[ModelSource, Leaves]:
    """A kept model in bfloat16, and the same numbers in float32."""
    source = rounded(place, scale, name)
    return source, read_leaves(CastSource(source, "float32"))


def dense_source(place: Place, scale: str) -> ModelSource:
    """The dense model that MoEs of a scale come from."""
    return ModelDirectory(kept_path(place, scale, DENSE)) if scale == MIDDLE.name else given_model(place, SCALES[scale])


@lru_cache(maxsize=4)
def scored_texts(place: Place, scale: str, split: str) -> dict[str, np.ndarray]:
    """Int32[n] of every domain, as much of it as is scored."""
    config = start_config(place, scale, DENSE)
    return Corpus(place, SCALES[scale], config, tokenizer_file(place, SCALES[scale])).scored(split, DOMAINS)


@lru_cache(maxsize=2)
def _trainer(config: ModelConfig) -> Trainer:
    return Trainer(config, steps=1, warmup_steps=0)


@contextmanager
def _compressed(place: Place, source: ModelSource, asked: Compression) -> Iterator[tuple[ModelDirectory, Report]]:
    """The compressed model, which is there as long as it is looked at."""
    place.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.work, prefix="compressed-") as name:
        folder = Path(name) / "model"
        report = compress(
            source,
            folder,
            make_method(asked.method, dict(asked.options)),
            base=dense_source(place, asked.scale) if asked.dense else None,
            calibration=_calibration(place, asked.scale, asked.model) if asked.calibrated else None,
            described={},
        )
        yield ModelDirectory(folder), report


@lru_cache(maxsize=2)
def _calibration(place: Place, scale: str, model: str) -> Calibration:
    """What the routers of a model do on the beginning of the texts that it was trained on."""
    source, whole = kept_model(place, scale, model)
    ids = np.concatenate(list(scored_texts(place, scale, "train").values()))
    mesh = make_mesh({}, jax.devices()[:1])
    statistics = measure_router_statistics(
        load_model(whole, mesh=mesh), ids, seq_len=SCALES[scale].seq_len, batch_size=16, mesh=mesh
    )
    # Only the lineage of a model that is thrown away names a file: it needs one that is there.
    layers = {layer: LayerCalibration(found) for layer, found in statistics.items()}
    return Calibration((source.path / "config.json",), layers)


def _bases(experts: Mapping[int, Kernels], dense: ModelSource | None) -> dict[int, Kernels]:
    """The base in place of every expert, rounded as it is stored: how much there is to lose at most."""

    def base(layer: int, name: str, kernels: np.ndarray) -> np.ndarray:
        one = kernels.mean(axis=0) if dense is None else dense.read(f"layers/{layer}/mlp/{name}/kernel")
        return np.broadcast_to(one.astype(ml_dtypes.bfloat16).astype(np.float32), kernels.shape)

    return {
        layer: {name: base(layer, name, kernels) for name, kernels in by_name.items()}
        for layer, by_name in experts.items()
    }


def _figures(report: Report, expert_params: int) -> dict[str, Any]:
    """What is kept of a report."""
    by_name = {name: [getattr(layer, name) for layer in report.layers] for name in _FIGURES}
    return {
        "expert_bytes_before": report.expert_bytes_before,
        "expert_bytes_after": report.expert_bytes_after,
        "bits_per_weight": 8 * report.expert_bytes_after / expert_params,
        **{name: values for name, values in by_name.items() if None not in values},
    }
