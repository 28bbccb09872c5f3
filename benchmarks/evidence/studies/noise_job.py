"""What dropping entries of deltas costs, over the size of the deltas: DARE (arXiv 2311.03099)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from evidence.studies.compression_job import dense_source, kept_model, losses
from evidence.studies.full_experts import Kernels, all_full_experts, experts_of, with_experts
from evidence.studies.jobs import Place
from evidence.studies.models import Leaves, model_of
from moe_jax.compression import compress, make_method
from moe_jax.model_io.in_memory import InMemory, LeavesInMemory, ModelInMemory
from moe_jax.model_io.model_source import ModelSource


@dataclasses.dataclass(frozen=True)
class DeltaNoise:
    """One kept model.

    Attributes:
      scale: name of one of `SCALES`.
      model: name under which the model is kept.
      factor: that deltas from the dense model are multiplied by, before entries are dropped.
      rates: shares of entries that are dropped; the others are rescaled.
      seed: of what is dropped.
    """

    scale: str
    model: str
    factor: float
    rates: tuple[float, ...]
    seed: int


def measure_noise(place: Place, asked: DeltaNoise) -> dict[str, Any]:
    """Drops entries at every rate, and scores.

    Returns:
      losses: of every domain, with the multiplied deltas, none of whose entries is dropped.
      delta: energy of the multiplied deltas, of that of the experts' kernels.
      noise: by rate, energy of what dropping adds to the kernels, likewise.
      added: by rate, how much higher the loss is, mean of the domains.
    """
    _, whole = kept_model(place, asked.scale, asked.model)
    dense = dense_source(place, asked.scale)
    kept = experts_of(whole)
    bases = {layer: _base(dense, layer, experts) for layer, experts in kept.items()}
    scaled = {
        layer: {name: bases[layer][name] + np.float32(asked.factor) * (kernels - bases[layer][name])
                for name, kernels in experts.items()}
        for layer, experts in kept.items()
    }  # fmt: skip
    leaves = with_experts(whole, scaled)
    found: dict[str, Any] = {
        "losses": losses(place, asked.scale, model_of(leaves)),
        "delta": _energy(scaled, bases) / _energy(scaled),
        "noise": {},
        "added": {},
    }
    before = _mean(found["losses"])
    for rate in asked.rates:
        dropped = _dropped(leaves, dense, rate, asked.seed)
        model = model_of(with_experts(leaves, dropped))
        found["noise"][f"{rate:g}"] = _energy(scaled, dropped) / _energy(scaled)
        found["added"][f"{rate:g}"] = _mean(losses(place, asked.scale, model)) - before
    return found


def _dropped(leaves: Leaves, dense: ModelSource, rate: float, seed: int) -> dict[int, Kernels]:
    """The experts after dropping; nothing is rounded."""
    method = make_method("ders-sparsify", {"drop": rate, "keep": "random", "seed": seed})
    result = InMemory()
    compress(ModelInMemory(leaves.config, LeavesInMemory(leaves.leaves)), result, method, base=dense, described={})
    assert result.source is not None
    return all_full_experts(result.source)


def _base(dense: ModelSource, layer: int, experts: Kernels) -> Kernels:
    """The dense model's FFN, in float32."""
    return {name: dense.read(f"layers/{layer}/mlp/{name}/kernel").astype(np.float32) for name in experts}


def _energy(these: Mapping[int, Kernels], those: Mapping[int, Kernels] | None = None) -> float:
    """Squared norm of all kernels, or of their differences from others."""
    total = 0.0
    for layer, experts in these.items():
        for name, kernels in experts.items():
            difference = kernels - those[layer][name] if those is not None else kernels
            total += float(np.sum(np.square(difference, dtype=np.float64)))
    return total


def _mean(by_domain: Mapping[str, float]) -> float:
    return sum(by_domain.values()) / len(by_domain)
