"""The comparison as a picture."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from evidence.equal_bytes.entries import (
    ABLATIONS,
    ALLOCATED,
    ALLOCATED_FITTED,
    ENTRIES,
    GPTQ,
    RTN,
    SHARED_GPTQ,
    SHARED_RTN,
)
from evidence.equal_bytes.points import models, points, whole_loss
from evidence.results import ResultsFile


def draw(results: ResultsFile, file: Path) -> None:
    """Added loss over bits per weight: a panel for every model, a line for every family of methods."""
    compared = list(models(results))
    if not compared:
        return
    columns = min(3, len(compared))
    rows = -(-len(compared) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(5.2 * columns, 4.2 * rows), squeeze=False)
    steps = {entry.family for some in ABLATIONS.values() for _, entry in some} - {SHARED_RTN, SHARED_GPTQ}
    families = [name for name in dict.fromkeys(entry.family for entry in ENTRIES) if name not in steps]
    colours = matplotlib.colormaps["tab20"]
    for panel in panels.flat[len(compared) :]:
        panel.set_axis_off()
    for panel, (scale, label) in zip(panels.flat, compared, strict=False):
        before, by_family = whole_loss(results, scale, label), {}
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
