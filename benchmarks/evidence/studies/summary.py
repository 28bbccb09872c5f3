"""From results to what tables, figures and claims are made of."""

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from evidence.results import ResultsFile

BySeed = Mapping[str, dict[str, Any]]


def mean_losses(found: BySeed) -> dict[str, float]:
    """By seed, the mean over the texts, nats per token; diverged runs are left out."""
    return {seed: statistics.fmean(run["losses"].values()) for seed, run in found.items() if "losses" in run}


class Measured(NamedTuple):
    """A thing that claims are about.

    Attributes:
      study: whose results are meant.
      what: a shape, or how a kept model was compressed (`variants.label`).
    """

    study: str
    what: str

    def losses(self, results: ResultsFile) -> dict[str, dict[str, float]]:
        """Test losses by seed, of every setting that there are results of: a scale with a length of runs, or with the
        name of kept models."""
        return {
            f"{scale}, {setting}": losses
            for scale, settings in (results.get(self.study) or {}).items()
            for setting in settings
            if (losses := mean_losses(results.get(self.study, scale, setting, self.what) or {}))
        }


def spread(values: Mapping[str, float]) -> float:
    """Standard deviation over seeds (n - 1); 0 for a single one."""
    return statistics.stdev(values.values()) if len(values) > 1 else 0.0
