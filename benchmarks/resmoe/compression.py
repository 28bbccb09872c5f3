"""Compresses every trained model in every way, and scores what comes out."""

import dataclasses
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from moe_jax.compress import METHODS, make_method
from moe_jax.compress.job.report import Report
from moe_jax.counting import count_parameters
from moe_jax.loading import load_model
from moe_jax.nn import Decoder
from quality.compression import compressed
from quality.scoring import Scorer
from resmoe.experts import Designs, designs, with_experts
from resmoe.likeness import cosines, least_error_per_neuron, squared_norm
from resmoe.results import Results
from resmoe.settings import ORIGINS, Origin
from resmoe.training import Task
from resmoe.variants import VARIANTS, Variant, values_for

# Losses of one model differ by rounding alone.
_SAME = 1e-5


@dataclasses.dataclass(frozen=True)
class _Job:
    """One compressed model."""

    name: str
    value: float
    origin: Origin
    seed: int

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.name]

    @property
    def place(self) -> tuple[str, ...]:
        """Of its figures in the results."""
        return "compression", self.origin.name, self.name, f"{self.value:g}", str(self.seed)

    @property
    def is_served(self) -> bool:
        """Whether the compressed model is also scored as it is: one of every variant. Each has its own program."""
        return self.value == self.variant.values[-1] and self.seed == 0 and self.origin == next(iter(ORIGINS.values()))

    @property
    def order(self) -> tuple[bool, bool, int, int, float]:
        """The main table first, the curves last; one variant after another, for they share programs."""
        is_main, is_curve = self.value == self.variant.main_value, self.variant.curve
        return not is_main, is_curve, list(VARIANTS).index(self.name), -self.origin.num_experts, self.value


def describe_models(task: Task, results: Results, origins: Iterable[Origin]) -> None:
    """Scores the models as they are, and says how alike their experts are. They must be there."""
    score = Scorer(task.held_out, task.settings.seq_len)
    for origin in origins:
        for seed in task.seeds:
            place = "models", origin.name, str(seed)
            model = task.model(origin, seed)
            loss, there = score(load_model(model)), results.get(*place)
            if there is not None:
                if abs(there["loss"] - loss) > _SAME:
                    raise SystemExit(
                        f"{origin.name}, seed {seed}: the model in the folder of models has held-out loss {loss:.6f}, "
                        f"that of the results had {there['loss']:.6f}: choose another --out, and measure all again"
                    )
                continue
            experts = [designs(model, layer) for layer in model.config.moe_layers]
            pairs = [cosines(layer) for layer in experts]
            result = {
                "loss": loss,
                "params": count_parameters(model.specs().values()),
                "expert_params": sum(layer.size for layer in experts),
                "cosine": [as_is for as_is, _ in pairs],
                "matched_cosine": [matched for _, matched in pairs],
                "squared_norm": [squared_norm(layer) for layer in experts],
            }
            results.put(*place, value=result)
            print(
                f"{origin.name}, seed {seed}: held-out loss {result['loss']:.4f}, cosine between experts "
                f"{np.mean(result['cosine']):.3f}, with neurons matched {np.mean(result['matched_cosine']):.3f}",
                flush=True,
            )


def compress_models(task: Task, results: Results, origins: Iterable[Origin], names: Iterable[str]) -> None:
    """Does the compressions that are not in the results yet. The trained models must be there."""
    origins = tuple(origins)
    unknown = sorted({VARIANTS[name].method for name in names} - METHODS.keys())
    if unknown:
        print(f"left out: there is no method {', '.join(unknown)}", flush=True)
    jobs = [
        _Job(name, value, origin, seed)
        for name in names
        if VARIANTS[name].method not in unknown
        for origin in origins
        for value in values_for(VARIANTS[name], origin.num_experts)
        for seed in task.seeds
    ]
    jobs = sorted((job for job in jobs if results.get(*job.place) is None), key=lambda job: job.order)
    print(f"compression: {len(jobs)} models to make", flush=True)
    score, score_served = (Scorer(task.held_out, task.settings.seq_len) for _ in range(2))

    @cache
    def uncompressed(origin: Origin, seed: int) -> tuple[Decoder, list[Designs]]:
        source = task.model(origin, seed)
        return load_model(source), [designs(source, layer) for layer in source.config.moe_layers]

    calibration = cache(task.calibration)
    for number, job in enumerate(jobs, start=1):
        whole, before = uncompressed(job.origin, job.seed)
        method = make_method(job.variant.method, {**job.variant.options, job.variant.swept: job.value})
        recorded = calibration(job.origin, job.seed) if job.variant.calibrated else None
        with compressed(task.model(job.origin, job.seed), method, calibration=recorded) as (model, report):
            # What the experts became, put into the uncompressed model: one program scores the models of all methods.
            after = [designs(model, layer, before[0].shape[1]) for layer in model.config.moe_layers]
            result = _figures(report) | {
                "loss": score(with_experts(whole, after)),
                "least_error_per_neuron": [least_error_per_neuron(*pair) for pair in zip(before, after, strict=True)],
            }
            if job.is_served:
                result["served_loss"] = score_served(load_model(model))
        results.put(*job.place, value=result)
        print(
            f"[{number}/{len(jobs)}] {job.name} {job.value:g}, {job.origin.name}, seed {job.seed}: "
            f"eps/f {np.mean(result['error_per_neuron']):.4g}, held-out loss {result['loss']:.4f}",
            flush=True,
        )


def _figures(report: Report) -> dict[str, Any]:
    """What is kept of a report, layer by layer where it says so."""
    layers = {
        name: [getattr(layer, name) for layer in report.layers]
        for name in ("error_per_neuron", "relative_error", "objective", "rounds", "converged", "seconds")
    }
    return {
        "expert_bytes_before": report.expert_bytes_before,
        "expert_bytes_after": report.expert_bytes_after,
        **layers,
    }
