"""The comparison as tables in Markdown and a picture."""

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from evidence.equal_bytes.entries import (
    ABLATIONS,
    ALLOCATED,
    ALLOCATED_FITTED,
    COMPARISON,
    ENTRIES,
    GPTQ,
    RECOVERIES,
    RTN,
    SHARED_GPTQ,
    SHARED_RTN,
    UNCOMPRESSED,
    Entry,
)
from evidence.equal_bytes.models import PERMUTED
from evidence.results import NoSettings, ResultsFile
from evidence.tables import markdown

NAME = "equal_bytes"
OTHER = "others"
_COLUMNS = (RTN, GPTQ, SHARED_RTN, SHARED_GPTQ, ALLOCATED, ALLOCATED_FITTED)
_SIZES = (1.6, 1.85, 2.3, 2.85, 3.3, 4.3, 5.35, 8.3)


class Point(NamedTuple):
    """An entry on one model, means over draws.

    Attributes:
      entry: what was done.
      bits: per weight of the experts, everything included.
      loss: nats per token, mean of the domains. spread: its standard deviation over draws; None: there is one.
      kl: from the model as it was.
      agreement: share of greedy tokens that are those of the model as it was, until the first other one; None: not
        asked.
      predicted_kl: what `allocate` expected; None: the entry is another method.
    """

    entry: Entry
    bits: float
    loss: float
    spread: float | None
    kl: float
    agreement: float | None
    predicted_kl: float | None


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
    return tables(results) | ablations(results) | recoveries(results)


def blocks(results: ResultsFile) -> dict[str, str]:
    """The tables of BENCHMARKS.md: of every family the lowest loss within so many bits, by model."""
    found = {}
    for scale, label in _models(results):
        before, best = _whole(results, scale, label), {}
        for point in points(results, scale, label):
            if point.entry.recovery is not None:
                continue  # in a table of their own
            column = point.entry.family if point.entry.family in _COLUMNS else OTHER
            best.setdefault(column, []).append(point)
        rows = [(f"{most:g}", *(_lowest(best.get(column, ()), most, before) for column in (*_COLUMNS, OTHER)))
                for most in _SIZES]  # fmt: skip
        found[f"{scale}, {label}"] = markdown(("bits per weight at most", *_COLUMNS, OTHER), rows)
    return found | ablations(results) | recoveries(results)


def ablations(results: ResultsFile) -> dict[str, str]:
    """What every step of the method adds, by model and bits of the residuals."""
    found = {}
    for scale, label in _models(results):
        before = _whole(results, scale, label)
        by_entry = {point.entry.label: point for point in points(results, scale, label)}
        for residual, steps in ABLATIONS.items():
            rows = [(words, *_figures(by_entry[entry.label], before)) for words, entry in steps
                    if entry.label in by_entry]  # fmt: skip
            if len(rows) > 1 and not label.endswith(PERMUTED):
                head = (f"{residual}-bit residuals", "bits per weight", f"added to {before:.4f} nats", "KL, nats")
                found[f"{scale}, {label}, {residual} bits"] = markdown(head, rows)
    return found


def recoveries(results: ResultsFile) -> dict[str, str]:
    """What routers and norms win back by learning, by model."""
    found = {}
    for scale, label in _models(results):
        before = _whole(results, scale, label)
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
    """The lowest loss of points of that size and less."""
    fitting = [point for point in points if point.bits <= most]
    if not fitting:
        return "none"
    point = min(fitting, key=lambda point: point.loss)
    name = point.entry.name if point.entry.family in _COLUMNS else point.entry.label
    return f"{point.loss - before:+.4f}, {name} ({point.bits:.2f})"


def tables(results: ResultsFile) -> dict[str, str]:
    """A table for every model, by its heading."""
    found = {}
    for scale, label in _models(results):
        before = _whole(results, scale, label)
        rows = [
            (
                point.entry.label,
                *_figures(point, before),
                "" if point.predicted_kl is None else f"{point.predicted_kl:.4f}",
                "" if point.agreement is None else f"{100 * point.agreement:.1f}",
            )
            for point in sorted(points(results, scale, label), key=lambda point: point.bits)
        ]
        added = f"added to {before:.4f} nats"
        head = ("experts", "bits per weight", added, "KL, nats", "predicted", "greedy agreement, %")
        found[f"{scale}, {label}"] = markdown(head, rows)
    return found


def points(results: ResultsFile, scale: str, label: str) -> Iterator[Point]:
    """All entries that were done on a model."""
    for entry in (*ENTRIES, *(recovered for _, recovered in RECOVERIES)):
        runs = list((results.get(COMPARISON, scale, label, entry.label) or {}).values())
        if runs:
            losses = [_mean(run["losses"]) for run in runs]
            yield Point(
                entry,
                runs[0]["bits_per_weight"],
                statistics.fmean(losses),
                statistics.stdev(losses) if len(losses) > 1 else None,
                statistics.fmean(_mean(run["kl"]) for run in runs),
                runs[0].get("agreement", {}).get("until_first"),
                statistics.fmean(run["predicted_kl"] for run in runs) if "predicted_kl" in runs[0] else None,
            )


def draw(results: ResultsFile, file: Path) -> None:
    """Added loss over bits per weight: a panel for every model, a line for every family of methods."""
    models = list(_models(results))
    if not models:
        return
    columns = min(3, len(models))
    rows = -(-len(models) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(5.2 * columns, 4.2 * rows), squeeze=False)
    steps = {entry.family for some in ABLATIONS.values() for _, entry in some} - set(_COLUMNS)
    families = [name for name in dict.fromkeys(entry.family for entry in ENTRIES) if name not in steps]
    colours = matplotlib.colormaps["tab20"]
    for panel in panels.flat[len(models) :]:
        panel.set_axis_off()
    for panel, (scale, label) in zip(panels.flat, models, strict=False):
        before, by_family = _whole(results, scale, label), {}
        for point in points(results, scale, label):
            if point.entry.recovery is not None:
                continue
            by_family.setdefault(point.entry.family, []).append((point.bits, point.loss - before))
        for number, family in enumerate(families):
            if family in by_family:
                bits, added = zip(*sorted(by_family[family]), strict=True)
                important = family in (RTN, GPTQ, SHARED_GPTQ, ALLOCATED, ALLOCATED_FITTED)
                panel.plot(
                    bits,
                    added,
                    marker="o",
                    markersize=4 if important else 3,
                    linewidth=2 if important else 0.8,
                    # First the ten strong colours, then the ten light ones.
                    color=colours(2 * number % 20 + number // 10 % 2),
                    label=family,
                )
        panel.set_title(f"{scale}: {label}", fontsize=9)
        panel.set_xlabel("bits per weight of the experts, everything included")
        panel.set_ylabel("added loss, nats per token")
        panel.set_yscale("symlog", linthresh=0.01)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        panel.grid(alpha=0.3)
    handles = {}
    for panel in panels.flat:
        handles |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    shown = [family for family in families if family in handles]
    figure.tight_layout()
    lines = [handles[name] for name in shown]
    figure.legend(lines, shown, fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 0))
    figure.savefig(file, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _models(results: ResultsFile) -> Iterator[tuple[str, str]]:
    for scale, by_label in (results.get(COMPARISON) or {}).items():
        for label, found in by_label.items():
            if UNCOMPRESSED in found:
                yield scale, label


def _whole(results: ResultsFile, scale: str, label: str) -> float:
    return _mean(results.get(COMPARISON, scale, label, UNCOMPRESSED, "0")["losses"])


def _mean(by_domain: dict[str, Any]) -> float:
    return statistics.fmean(by_domain.values())
