"""The comparison as tables in Markdown."""

from collections.abc import Iterable
from pathlib import Path

from evidence.equal_bytes.aims import aims
from evidence.equal_bytes.allocations import allocations
from evidence.equal_bytes.entries import (
    ABLATIONS,
    ALLOCATED,
    ALLOCATED_FITTED,
    GPTQ,
    RECOVERIES,
    RTN,
    SHARED_FACTORS,
    SHARED_GPTQ,
    SHARED_RTN,
)
from evidence.equal_bytes.models import PERMUTED
from evidence.equal_bytes.picture import draw
from evidence.equal_bytes.points import Point, chosen, mean_of, models, points, whole, whole_loss
from evidence.results import NoSettings, ResultsFile
from evidence.studies.compression_tables import accuracy
from evidence.tables import markdown

NAME = "equal_bytes"
OTHER = "others"
_COLUMNS = (RTN, GPTQ, SHARED_FACTORS, SHARED_RTN, SHARED_GPTQ, ALLOCATED, ALLOCATED_FITTED)
_SIZES = (0.8, 1.25, 1.6, 1.85, 2.3, 2.85, 3.3, 4.3, 5.35, 8.3)


def opened(folder: Path) -> ResultsFile:
    """The file of results in a folder."""
    return ResultsFile(folder / f"{NAME}.json", NoSettings())


def write_report(results: ResultsFile, out: Path) -> str:
    """Writes `equal_bytes.md` and `equal_bytes.png`; returns the Markdown."""
    text = report(results)
    (out / f"{NAME}.md").write_text(text)
    draw(results, out / f"{NAME}.png")
    return text


def report(results: ResultsFile) -> str:
    """Everything that was measured."""
    text = "\n\n".join(f"## {title}\n\n{table}" for title, table in _all_tables(results).items())
    return f"# Equal bytes\n\n{text}\n"


def _all_tables(results: ResultsFile) -> dict[str, str]:
    return tables(results) | _comparisons(results)


def blocks(results: ResultsFile) -> dict[str, str]:
    """The tables of the pages: all entries of models that were asked questions; of the others the best of every
    family within so many bits."""
    found = {}
    for (scale, label), table in zip(models(results), tables(results).values(), strict=True):
        if label.endswith(PERMUTED):
            continue  # beside the model that it was
        asked = "answers" in whole(results, scale, label)
        found[f"{scale}, {label}"] = table if asked else _by_size(results, scale, label)
    return found | _comparisons(results)


def _comparisons(results: ResultsFile) -> dict[str, str]:
    """What is held against what."""
    every = (aims, allocations, permutations, ablations, recoveries)
    return {title: table for tables_of in every for title, table in tables_of(results).items()}


def _by_size(results: ResultsFile, scale: str, label: str) -> str:
    before, best = whole_loss(results, scale, label), {}
    for point in points(results, scale, label):
        if point.entry.recovered:
            continue  # in a table of their own
        column = point.entry.family if point.entry.family in _COLUMNS else OTHER
        best.setdefault(column, []).append(point)
    rows = [
        (f"{most:g}", *(_lowest(best.get(column, ()), most, before) for column in (*_COLUMNS, OTHER)))
        for most in _SIZES
    ]
    return markdown(("bits per weight at most", *_COLUMNS, OTHER), rows)


def ablations(results: ResultsFile) -> dict[str, str]:
    """What every step of the method adds, by model and what residuals are stored in."""
    found = {}
    for scale, label in models(results):
        before = whole_loss(results, scale, label)
        by_entry = {point.entry.label: point for point in points(results, scale, label)}
        for residual, steps in ABLATIONS.items():
            rows = [(words, *_figures(by_entry[entry.label], before)) for words, entry in steps
                    if entry.label in by_entry]  # fmt: skip
            if len(rows) > 1 and not label.endswith(PERMUTED):
                head = (f"residuals in {residual}", "bits per weight", f"added to {before:.4f} nats", "KL, nats")
                found[f"{scale}, {label}, {residual}"] = markdown(head, rows)
    return found


def permutations(results: ResultsFile) -> dict[str, str]:
    """What every entry loses of a model, and of the same with its neurons permuted, with the first draw."""
    found = {}
    for scale, label in models(results):
        before = whole_loss(results, scale, label)
        permuted = {point.entry.label: point for point in points(results, scale, label + PERMUTED)}
        rows = []
        for point in points(results, scale, label):
            if (other := permuted.get(point.entry.label)) is not None:
                (one,), (two,) = (point.first.values(), other.first.values())
                losses = [mean_of(run["losses"]) for run in (one, two)]
                added = [f"{loss - before:+.4f}" for loss in losses]
                rows.append((point.entry.label, f"{point.bits:.2f}", *added, f"{losses[1] - losses[0]:+.4f}"))
        if rows:
            head = ("experts", "bits per weight", f"added to {before:.4f} nats", "neurons permuted", "difference")
            found[f"{scale}, {label}, neurons permuted"] = markdown(head, rows)
    return found


def recoveries(results: ResultsFile) -> dict[str, str]:
    """What routers and norms win back by learning, by model."""
    found = {}
    for scale, label in models(results):
        before = whole_loss(results, scale, label)
        by_entry = {point.entry.label: point for point in points(results, scale, label)}
        rows = []
        for entry, recovered in RECOVERIES:
            if entry.label in by_entry and recovered.label in by_entry:
                rows += [(one.label, *_figures(by_entry[one.label], before)) for one in (entry, recovered)]
        if rows:
            head = ("experts", "bits per weight", f"added to {before:.4f} nats", "KL, nats")
            found[f"{scale}, {label}, recovered"] = markdown(head, rows)
    return found


def _figures(point: Point, before: float) -> tuple[str, str, str]:
    spread = f" ± {point.spread:.4f}" if point.spread is not None else ""
    return f"{point.bits:.2f}", f"{point.loss - before:+.4f}{spread}", f"{point.kl:.4f}"


def _lowest(points: Iterable[Point], most: float, before: float) -> str:
    """The loss of the best of that size and less, chosen by the selection texts."""
    point = chosen(points, most)
    if point is None:
        return "none"
    name = point.entry.name if point.entry.family in _COLUMNS else point.entry.label
    return f"{point.loss - before:+.4f}, {name} ({point.bits:.2f})"


def tables(results: ResultsFile) -> dict[str, str]:
    """A table for every model, by its heading."""
    found = {}
    for scale, label in models(results):
        before = whole_loss(results, scale, label)
        answers = whole(results, scale, label).get("answers", {})
        rows = [
            (
                point.entry.label,
                *_figures(point, before),
                "" if point.predicted_kl is None else f"{point.predicted_kl:.4f}",
                "" if point.agreement is None else f"{100 * point.agreement:.1f}",
                *(_right(point, task, of_whole) for task, of_whole in answers.items()),
            )
            for point in sorted(points(results, scale, label), key=lambda point: point.bits)
        ]
        added = f"added to {before:.4f} nats"
        right = (f"{task} ({100 * of_whole.count('1') / len(of_whole):.1f} %)" for task, of_whole in answers.items())
        head = ("experts", "bits per weight", added, "KL, nats", "predicted", "greedy agreement, %", *right)
        found[f"{scale}, {label}"] = markdown(head, rows)
    return found


def _right(point: Point, task: str, of_whole: str) -> str:
    """The share of questions that are answered right, beside that of the model as it was; empty: not asked."""
    pairs = {draw: (run["answers"][task], of_whole) for draw, run in point.first.items() if "answers" in run}
    return accuracy(pairs) if pairs else ""
