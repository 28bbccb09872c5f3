"""The comparison as a picture."""

from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from evidence.equal_bytes.entries import (
    ABLATIONS,
    ALLOCATED,
    ALLOCATED_FITTED,
    ENTRIES,
    GPTQ,
    RTN,
    SHARED_FACTORS,
    SHARED_GPTQ,
    SHARED_RTN,
)
from evidence.equal_bytes.models import PERMUTED
from evidence.equal_bytes.points import Point, models, points, whole_loss
from evidence.results import ResultsFile

_IMPORTANT = (RTN, GPTQ, SHARED_FACTORS, SHARED_GPTQ, ALLOCATED, ALLOCATED_FITTED)
_LINEAR_UP_TO = 0.01
"""Nats; a logarithmic axis shows little of a model that loses no more."""
_MARKERS = "os^"


def draw(results: ResultsFile, file: Path) -> None:
    """Added loss and greedy agreement over bits per weight: a column for every model, a line for every family.

    Models whose neurons are permuted are left out: what is not the same for them is in the tables.
    """
    compared = [(scale, label) for scale, label in models(results) if not label.endswith(PERMUTED)]
    if not compared:
        return
    figure, panels = plt.subplots(2, len(compared), figsize=(5.2 * len(compared), 8), squeeze=False, sharex="col")
    for (scale, label), (losses, agreements) in zip(compared, panels.T, strict=True):
        before = whole_loss(results, scale, label)
        every = [point for point in points(results, scale, label) if not point.entry.recovered]
        _lines(losses, ((point, point.loss - before) for point in every))
        _lines(agreements, ((point, 100 * point.agreement) for point in every if point.agreement is not None))
        losses.set_title(f"{scale}: {label}", fontsize=9)
        if max((point.loss - before for point in every), default=0) > _LINEAR_UP_TO:
            losses.set_yscale("symlog", linthresh=_LINEAR_UP_TO)
        agreements.set_xlabel("bits per weight of the experts, everything included")
    panels[0, 0].set_ylabel("added loss, nats per token")
    panels[1, 0].set_ylabel("greedy tokens until the first other one, %")
    handles: dict[str, object] = {}
    for panel in panels.flat:
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        panel.grid(alpha=0.3)
        handles |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    shown = [family for family in _families() if family in handles]
    figure.tight_layout()
    lines = [handles[name] for name in shown]
    figure.legend(lines, shown, fontsize=8, ncols=6, loc="upper center", bbox_to_anchor=(0.5, 0))
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _families() -> list[str]:
    """All but those that are steps of an ablation, which has a table."""
    steps = {entry.family for some in ABLATIONS.values() for _, entry in some}
    steps -= {SHARED_RTN, SHARED_GPTQ, SHARED_FACTORS}
    return [name for name in dict.fromkeys(entry.family for entry in ENTRIES) if name not in steps]


def _lines(panel: Axes, found: Iterable[tuple[Point, float]]) -> None:
    by_family: dict[str, list[tuple[float, float]]] = {}
    for point, value in found:
        by_family.setdefault(point.entry.family, []).append((point.bits, value))
    colours = matplotlib.colormaps["tab20"]
    for number, family in enumerate(_families()):
        if family in by_family:
            bits, values = zip(*sorted(by_family[family]), strict=True)
            important = family in _IMPORTANT
            panel.plot(
                bits,
                values,
                marker=_MARKERS[number // 20],
                markersize=4 if important else 3,
                linewidth=2 if important else 0.8,
                # First the ten strong colours, then the ten light ones, then again with another marker.
                color=colours(2 * number % 20 + number // 10 % 2),
                label=family,
            )
