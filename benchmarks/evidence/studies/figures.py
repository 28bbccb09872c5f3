"""Pictures of the studies, from the results alone."""

import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from evidence.results import ResultsFile
from evidence.studies.claims import CLAIMS, LEAST
from evidence.studies.rates import rates_of
from evidence.studies.summary import mean_losses, spread
from evidence.studies.verdicts import AGREES, OPPOSITE, SMALL, UNDECIDED

_D = re.compile(r"PERFT-(?:D (\d+)|S) r=(\d+)")
_COLOURS = {AGREES: "C2", OPPOSITE: "C3", SMALL: "C0", UNDECIDED: "0.5"}
_MARKERS = "osD^vPX*hp"


def draw_claims(results: ResultsFile, file: Path) -> None:
    """A row for every claim, and in it the effect of every setting with its interval, in the colour of the verdict;
    effects of fewer than three seeds are left out."""
    rows = [(claim, [(name, found) for name, found in claim.effects(results) if found.count > 2]) for claim in CLAIMS]
    rows = [(claim, effects) for claim, effects in rows if effects]
    settings = list(dict.fromkeys(name for _, effects in rows for name, _ in effects))
    marker_of = {name: _MARKERS[place % len(_MARKERS)] for place, name in enumerate(settings)}
    figure, axes = plt.subplots(figsize=(11, 1.6 + 0.2 * len(rows)), layout="constrained")
    for place, (claim, effects) in enumerate(rows):
        for index, (name, found) in enumerate(effects):
            # Those of a row stand below each other.
            height = place + 0.5 * ((index + 0.5) / len(effects) - 0.5)
            colour = _COLOURS[claim.verdict(found, claim.least)]
            axes.plot([found.low, found.high], [height, height], color=colour, linewidth=1.5)
            axes.plot(found.mean, height, marker=marker_of[name], markersize=4, color=colour)
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.axvspan(-LEAST, LEAST, color="0.9", zorder=0)
    axes.set(yticks=range(len(rows)), ylim=(len(rows) - 0.4, -0.6), xlabel="nats per token (grey: does not matter)")
    axes.set_yticklabels([f"{claim.paper}: {claim.says}" for claim, _ in rows], fontsize=7)
    axes.set_xscale("symlog", linthresh=2 * LEAST)
    axes.grid(axis="y", alpha=0.2)
    keys = [Line2D([], [], color=colour, label=name) for name, colour in _COLOURS.items()]
    keys += [
        Line2D([], [], color="0.3", marker=marker, linestyle="", markersize=4, label=name)
        for name, marker in marker_of.items()
    ]
    figure.legend(handles=keys, fontsize=7, loc="outside upper center", ncols=4)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def draw_dense_adapters(results: ResultsFile, scale: str, file: Path) -> None:
    """PERFT-D's loss over M r: at fixed rates (one seed, selection text), and at the best rate (all seeds, test).

    Nothing is drawn before a rate was tried.
    """
    by_rate: dict[float, dict[int, list[float]]] = {}
    for shape, tried in _tried(results, scale):
        if match := _D.fullmatch(shape):
            for text, found in tried.items():
                if "losses" in found:
                    ((_, rate),) = rates_of(text)
                    mean = statistics.fmean(found["losses"].values())
                    by_rate.setdefault(rate, {}).setdefault(_width(match), []).append(mean)
    if not by_rate:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True, layout="constrained")
    for rate, losses in sorted(by_rate.items()):
        widths = sorted(losses)
        left.plot(widths, [statistics.fmean(losses[width]) for width in widths], marker="o", label=f"{rate:g}")
    left.set(title="at fixed learning rates", ylabel="loss of the selection text, nats per token")
    left.legend(title="learning rate")
    best: dict[int, list[dict[str, float]]] = {}
    for shapes in (results.get("perft", scale) or {}).values():
        for shape, found in shapes.items():
            if match := _D.fullmatch(shape):
                best.setdefault(_width(match), []).append(mean_losses(found))
    for width, found in sorted(best.items()):
        for losses in found:
            right.errorbar(width, statistics.fmean(losses.values()), spread(losses), marker="o", color="C0", capsize=3)
    right.set(title="at the best rate of each", ylabel="loss of the test text, nats per token")
    for axes in (left, right):
        axes.set(xlabel="M · r", xscale="log")
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _tried(results: ResultsFile, scale: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Shapes with the rates that were tried for them."""
    for lengths in (results.get("rates", scale) or {}).values():
        for shapes in lengths.values():
            yield from shapes.items()


def _width(match: re.Match) -> int:
    return int(match[1] or 1) * int(match[2])
