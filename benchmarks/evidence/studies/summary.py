"""From results to what tables, figures and claims are made of."""

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from evidence.results import ResultsFile
from evidence.studies.verdicts import Effect, effect, paired

BySeed = Mapping[str, dict[str, Any]]


def mean_losses(found: BySeed) -> dict[str, float]:
    """By seed, the mean over the texts, nats per token; diverged runs are left out."""
    return {seed: statistics.fmean(run["losses"].values()) for seed, run in found.items() if "losses" in run}


def difference(these: BySeed, those: BySeed) -> Effect | None:
    """What these runs lose more than those: over the seeds that both have, or if that is a single one, over the windows
    of text that its models were scored with; None if they have none in common."""
    seeds = [seed for seed in mean_losses(these) if seed in mean_losses(those)]
    if len(seeds) == 1:
        one, other = (_windows(runs[seeds[0]]) for runs in (these, those))
        if one and other:
            found = effect(paired(one, other))
            return found and dataclasses.replace(found, over="windows")
    return effect(paired(mean_losses(these), mean_losses(those)))


def _windows(run: Mapping[str, Any]) -> dict[str, float]:
    """Losses of single windows; of every text as many."""
    by_text = run.get("window_losses", {})
    return {f"{name} {n}": loss for name, losses in by_text.items() for n, loss in enumerate(losses)}


class Measured(NamedTuple):
    """A thing that claims are about.

    Attributes:
      study: whose results are meant.
      what: a shape, or how a kept model was compressed (`variants.label`).
    """

    study: str
    what: str

    def runs(self, results: ResultsFile) -> dict[str, BySeed]:
        """By seed, of every setting that there are results of: a scale with a length of runs, or with the name of kept
        models."""
        return {
            f"{scale}, {setting}": runs
            for scale, settings in (results.get(self.study) or {}).items()
            for setting in settings
            if mean_losses(runs := results.get(self.study, scale, setting, self.what) or {})
        }


def spread(values: Mapping[str, float]) -> float:
    """Standard deviation over seeds (n - 1); 0 for a single one."""
    return statistics.stdev(values.values()) if len(values) > 1 else 0.0
