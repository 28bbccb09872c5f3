"""What was measured of one model, entry by entry."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from evidence.equal_bytes.entries import COMPARISON, ENTRIES, RECOVERIES, UNCOMPRESSED, Entry
from evidence.equal_bytes.models import PERMUTED
from evidence.results import ResultsFile
from evidence.studies.summary import BySeed
from evidence.tables import markdown


class Point(NamedTuple):
    """An entry on one model, means over draws.

    Attributes:
      entry: what was done.
      bits: per weight of the experts, everything included.
      loss: nats per token of the test texts, mean of the domains. spread: its standard deviation over draws; None:
        there is one.
      selection_loss: likewise of the selection texts, by which the best of several is chosen.
      kl: from the model as it was.
      agreement: share of greedy tokens that are those of the model as it was, until the first other one; None: not
        asked.
      predicted_kl: what `allocate` expected; None: the entry is another method.
      runs: all results, by draw; that of the first has the losses of all windows and the answers.
    """

    entry: Entry
    bits: float
    loss: float
    spread: float | None
    selection_loss: float
    kl: float
    agreement: float | None
    predicted_kl: float | None
    runs: BySeed

    @property
    def first(self) -> BySeed:
        """The result of the first draw alone."""
        draw, run = next(iter(self.runs.items()))
        return {draw: run}


def points(results: ResultsFile, scale: str, label: str) -> Iterator[Point]:
    """All entries that were done on a model."""
    for entry in (*ENTRIES, *(recovered for _, recovered in RECOVERIES)):
        runs = results.get(COMPARISON, scale, label, entry.label) or {}
        if runs:
            first = next(iter(runs.values()))
            losses = [mean_of(run["losses"]) for run in runs.values()]
            yield Point(
                entry,
                first["bits_per_weight"],
                statistics.fmean(losses),
                statistics.stdev(losses) if len(losses) > 1 else None,
                statistics.fmean(mean_of(run["selection_losses"]) for run in runs.values()),
                statistics.fmean(mean_of(run["kl"]) for run in runs.values()),
                first.get("agreement", {}).get("until_first"),
                statistics.fmean(run["predicted_kl"] for run in runs.values()) if "predicted_kl" in first else None,
                runs,
            )


def models(results: ResultsFile) -> Iterator[tuple[str, str]]:
    """Scale and label of every model that was scored as it is."""
    for scale, by_label in (results.get(COMPARISON) or {}).items():
        for label, found in by_label.items():
            if UNCOMPRESSED in found:
                yield scale, label


def by_model(
    results: ResultsFile,
    title: str,
    head: Sequence[str],
    rows: Callable[[ResultsFile, str, str], Iterable[Sequence[str]]],
) -> dict[str, str]:
    """A table for every model that has rows; but for those with permuted neurons, which stand beside what they were."""
    return {
        f"{scale}, {label}, {title}": markdown(head, found)
        for scale, label in models(results)
        if not label.endswith(PERMUTED) and (found := list(rows(results, scale, label)))
    }


def whole(results: ResultsFile, scale: str, label: str) -> dict[str, Any]:
    """What was measured of a model as it is."""
    return results.get(COMPARISON, scale, label, UNCOMPRESSED, "0")


def whole_loss(results: ResultsFile, scale: str, label: str) -> float:
    """Its loss, nats per token, mean of the domains."""
    return mean_of(whole(results, scale, label)["losses"])


def chosen(points: Iterable[Point], most: float) -> Point | None:
    """The best of so many bits and less, by the selection texts; None if there is none."""
    return min((point for point in points if point.bits <= most), key=lambda point: point.selection_loss, default=None)


def mean_of(by_domain: dict[str, float]) -> float:
    """All domains count alike."""
    return statistics.fmean(by_domain.values())
