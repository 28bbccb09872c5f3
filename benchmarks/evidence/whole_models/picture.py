"""The comparison as a picture."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from evidence.whole_models.entries import OURS

if TYPE_CHECKING:
    from evidence.whole_models.report import Point

_MARKERS = {"allocate": "o", "calibrated": "s", "rounded": "x", "imatrix": "^"}
_LINEAR_UP_TO = 0.01
"""Nats; a logarithmic axis shows little of a model that loses no more."""


def draw(by_model: "Mapping[str, tuple[Sequence[Point], float]]", file: Path) -> None:
    """Added loss over bits per weight: a panel for every model, with the loss that it had."""
    if not by_model:
        return
    figure, panels = plt.subplots(1, len(by_model), figsize=(5.2 * len(by_model), 4.5), squeeze=False)
    for panel, (model, (points, before)) in zip(panels.flat, by_model.items(), strict=True):
        found: dict[str, list[tuple[float, float]]] = {}
        for point in points:
            found.setdefault(_family(point), []).append(
                (point.bits, statistics.fmean(point.by_draw("losses").values()))
            )
        for family, places in found.items():
            bits, losses = zip(*sorted(places), strict=True)
            added = [loss - before for loss in losses]
            marker = next((mark for word, mark in _MARKERS.items() if word in family), "v")
            panel.plot(bits, added, marker=marker, linewidth=1 if family.startswith(OURS) else 0, label=family)
        panel.set_title(model, fontsize=10)
        if panel.dataLim.ymax > _LINEAR_UP_TO:  # otherwise it would have no ticks but its ends
            panel.set_yscale("symlog", linthresh=_LINEAR_UP_TO)
        panel.set_xlabel("bits per weight of the whole model")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    panels[0, 0].set_ylabel("added loss, nats per token")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _family(point: "Point") -> str:
    label = point.entry.label
    if point.entry.whose != OURS:
        return f"{point.entry.whose}, imatrix" if "imatrix" in label else point.entry.whose
    kind = "allocate" if label.startswith("allocate") else label.split(", ")[1]
    return f"{OURS}: {kind}{', tries' if 'tries' in label else ''}"
