"""What `allocate` chose, held against the best single choice of the same codes within its bytes."""

from collections.abc import Iterator

from evidence.equal_bytes.entries import ALLOCATED, GPTQ, SHARED_FACTORS, SHARED_GPTQ
from evidence.equal_bytes.points import Point, by_model, chosen, mean_of, points
from evidence.results import ResultsFile
from evidence.studies.summary import difference

HEAD = (
    *("allocated", "bits per weight", "KL, nats", "best single choice within them", "bits per weight", "KL, nats"),
    *("KL of the allocation, %", "by draw", "loss beside it, nats [95 %]"),
)
_SINGLE = frozenset({GPTQ, SHARED_GPTQ, SHARED_FACTORS})


def allocations(results: ResultsFile) -> dict[str, str]:
    """A table for every model. Single choices are made by the selection texts; divergences and losses are of the test
    texts, the intervals over their windows with the first draw of the calibration text."""
    return by_model(results, "allocation", HEAD, _rows)


def _rows(results: ResultsFile, scale: str, label: str) -> Iterator[list[str]]:
    every = [point for point in points(results, scale, label) if not point.entry.recovered]
    single = [point for point in every if point.entry.family in _SINGLE]
    allocated = [point for point in every if point.entry.family == ALLOCATED]
    for point in sorted(allocated, key=lambda point: point.bits):
        beside = chosen(single, point.bits)
        if beside is None:
            yield [point.entry.name, f"{point.bits:.2f}", f"{point.kl:.4f}", "none", *[""] * 5]
            continue
        yield [
            *(point.entry.name, f"{point.bits:.2f}", f"{point.kl:.4f}"),
            *(beside.entry.label, f"{beside.bits:.2f}", f"{beside.kl:.4f}"),
            f"{100 * point.kl / beside.kl:.0f}",
            ", ".join(f"{100 * share:.0f}" for share in _by_draw(point, beside)),
            str(difference(point.first, beside.first) or ""),
        ]


def _by_draw(point: Point, beside: Point) -> list[float]:
    """The ratio of divergences for every draw that both have."""
    return [
        mean_of(run["kl"]) / mean_of(beside.runs[draw]["kl"]) for draw, run in point.runs.items() if draw in beside.runs
    ]
