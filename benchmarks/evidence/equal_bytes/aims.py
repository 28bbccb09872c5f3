"""The method held against GPTQ with the same levels, groups and texts, at its bytes."""

from collections.abc import Iterator

from evidence.equal_bytes.entries import GPTQ, OURS
from evidence.equal_bytes.points import Point, by_model, chosen, points, whole_loss
from evidence.results import ResultsFile
from evidence.studies.summary import difference, mean_losses
from evidence.studies.verdicts import paired

HEAD = (
    *("GPTQ", "bits per weight", "added, nats", "ours, within its bytes", "beside GPTQ, nats [95 %]"),
    *("ours, the smallest that is no worse", "beside GPTQ, nats [95 %]"),
)


def aims(results: ResultsFile) -> dict[str, str]:
    """A table for every model.

    Ours are chosen by the selection texts; differences are of the test texts, intervals over their windows with the
    first draw of the calibration text.
    """
    return by_model(results, "against GPTQ", HEAD, _rows)


def _rows(results: ResultsFile, scale: str, label: str) -> Iterator[list[str]]:
    before = whole_loss(results, scale, label)
    every = list(points(results, scale, label))
    ours = [point for point in every if point.entry.family in OURS and not point.entry.recovered]
    for gptq in every:
        if gptq.entry.family != GPTQ or gptq.entry.recovered or gptq.entry.name == "8 bits":
            continue
        no_worse = [point for point in ours if point.selection_loss <= gptq.selection_loss]
        least = min(no_worse, key=lambda point: point.bits, default=None)
        yield [
            gptq.entry.name,
            f"{gptq.bits:.2f}",
            f"{gptq.loss - before:+.4f}",
            *_against(chosen(ours, gptq.bits), gptq),
            *_against(least, gptq),
        ]


def _against(point: Point | None, gptq: Point) -> tuple[str, str]:
    if point is None:
        return "none", ""
    found = str(difference(point.first, gptq.first) or "")
    drawn = paired(mean_losses(point.runs), mean_losses(gptq.runs))
    if len(drawn) > 1:
        found += f"; by draw {', '.join(f'{more:+.4f}' for more in drawn)}"
    return f"{point.entry.label} ({point.bits:.2f})", found
