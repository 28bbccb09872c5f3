"""From results to what tables, figures and claims are made of."""

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from evidence.results import ResultsFile
from evidence.studies.scales import SCALES

COMPRESSION = "compression"
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


class Measured(NamedTuple):
    """A thing that claims are about.

    Attributes:
      study: whose results are meant.
      what: a shape, or a variant of compression.
      value: of the variant's swept option, as it stands in the results.
    """

    study: str
    what: str
    value: str = ""

    def losses(self, results: ResultsFile) -> dict[str, dict[str, float]]:
        """Test losses by seed, of every setting that there are results of: a scale, or one of its kept models."""
        if self.study != COMPRESSION:
            by_scale = {scale: losses_of(results, self.study, scale, self.what) for scale in SCALES}
            return {scale: losses for scale, losses in by_scale.items() if losses}
        return {
            f"{scale}, {model}": mean_losses(found)
            for scale, models in (results.get(COMPRESSION) or {}).items()
            for model in models
            if (found := results.get(COMPRESSION, scale, model, self.what, self.value))
        }


def spread(values: Mapping[str, float]) -> float:
    """Standard deviation over seeds (n - 1); 0 for a single one."""
    return statistics.stdev(values.values()) if len(values) > 1 else 0.0
