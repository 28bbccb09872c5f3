"""From results to what tables, figures and claims are made of."""

import statistics
from collections.abc import Mapping
from typing import Any

from evidence.results import ResultsFile

BySeed = Mapping[str, dict[str, Any]]


def runs(results: ResultsFile, study: str, scale: str, shape: str) -> BySeed:
    """The results of a shape by seed, of the longest runs that there are; empty if there are none."""
    found = results.get(study, scale) or {}
    lengths = [steps for steps, shapes in found.items() if shape in shapes]
    return found[max(lengths, key=lambda steps: int(steps.split()[0]))][shape] if lengths else {}


def mean_losses(found: BySeed) -> dict[str, float]:
    """By seed, the mean over the texts, nats per token; diverged runs are left out."""
    return {seed: statistics.fmean(run["losses"].values()) for seed, run in found.items() if "losses" in run}


def losses_of(results: ResultsFile, study: str, scale: str, shape: str) -> dict[str, float]:
    """Test losses of a shape by seed."""
    return mean_losses(runs(results, study, scale, shape))


def spread(values: Mapping[str, float]) -> float:
    """Standard deviation over seeds (n - 1); 0 for a single one."""
    return statistics.stdev(values.values()) if len(values) > 1 else 0.0
