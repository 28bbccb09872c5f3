"""Two pictures: error and perplexity by kept share, and perplexity by real bytes."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from quality.spread import spread
from resmoe.results import Results
from resmoe.summary import USEFUL, errors, frontier, perplexities, points, uncompressed_perplexity
from resmoe.variants import BASELINE, MAIN_KEEP, PLAIN, RESMOE, VARIANTS

# Solid with filled markers: ResMoE and its parts. Dashed: baselines.
_MARKERS = "osD^vP*Xph<>"
# A model whose perplexity is so many times that of the uncompressed one is drawn at the upper edge.
_WORST = 30
_FAMILY_STYLES = {RESMOE: ("C0", "o"), BASELINE: ("C1", "s"), PLAIN: ("C2", "D")}


def plot_curves(results: Results, origins: Sequence[str], file: Path) -> None:
    """eps / f (above) and perplexity (below) over the kept share, a column for every origin."""
    figure, panels = _figure(2, len(origins), (6.2 * len(origins), 9.6))
    curves = [name for name, variant in VARIANTS.items() if variant.curve]
    for column, origin in enumerate(origins):
        for row, measure in enumerate((errors, perplexities)):
            axes = panels[row][column]
            worst = float("inf") if measure is errors else _WORST * uncompressed_perplexity(results, origin)
            for index, name in enumerate(curves):
                keeps = [value for value in VARIANTS[name].values if measure(results, origin, name, value)]
                y = [[*measure(results, origin, name, keep).values()] for keep in keeps]
                if not keeps:
                    continue
                ours = VARIANTS[name].family == RESMOE
                axes.errorbar(
                    keeps,
                    [min(statistics.mean(values), worst) for values in y],
                    [spread(values) if statistics.mean(values) < worst else 0 for values in y],
                    color=f"C{index % 10}",
                    marker=_MARKERS[index % len(_MARKERS)],
                    linestyle="-" if ours else "--",
                    markersize=5,
                    capsize=3,
                    linewidth=1.6 if ours else 1.0,
                    label=name,
                )
            axes.set_yscale("log")
            _plain_numbers(axes)
            axes.axvline(MAIN_KEEP, color="grey", linestyle=":", linewidth=1)
        panels[1][column].axhline(
            uncompressed_perplexity(results, origin), color="black", linewidth=1, label="uncompressed"
        )
        panels[0][column].set_title(origin, fontsize=11)
        panels[1][column].set_xlabel("kept share (the centre not counted)")
    panels[0][0].set_ylabel("eps / f")
    panels[1][0].set_ylabel("held-out perplexity")
    figure.legend(*panels[1][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
    figure.suptitle("Compressed MoEs at equal kept share", fontsize=12)
    figure.savefig(file, dpi=100)


def plot_bytes(results: Results, origins: Sequence[str], file: Path) -> None:
    """Perplexity over the bytes of the experts on the disk, a panel for every origin."""
    figure, panels = _figure(1, len(origins), (6.6 * len(origins), 5.8))
    for axes, origin in zip(panels[0], origins, strict=True):
        uncompressed = uncompressed_perplexity(results, origin)
        found = list(points(results, origin))
        for family, (color, marker) in _FAMILY_STYLES.items():
            own = sorted((point for point in found if VARIANTS[point.name].family == family), key=lambda p: p.bits)
            if not own:
                continue
            y = [min(point.mean, USEFUL * uncompressed) for point in own]
            axes.scatter([point.bits for point in own], y, color=color, marker=marker, s=22, alpha=0.45)
            best = frontier(own)
            axes.plot(
                [point.bits for point in best],
                [min(point.mean, USEFUL * uncompressed) for point in best],
                color=color,
                marker=marker,
                markersize=5,
                label=f"{family}: every model; line: least error at its bytes",
            )
        axes.axhline(uncompressed, color="black", linewidth=1, label="uncompressed, 16 bits")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _plain_numbers(axes)
        axes.set_xticks((1, 2, 3, 4, 6, 8, 12, 16))
        axes.set_xlim(0.9, 16)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("bytes of the experts on the disk, bits per weight")
        axes.set_title(origin, fontsize=11)
    panels[0][0].set_ylabel("held-out perplexity")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    figure.suptitle("Compressed MoEs at equal bytes", fontsize=12)
    figure.savefig(file, dpi=100)


def _plain_numbers(axes: Axes) -> None:
    """13 and not 1.3 x 10^1; few enough not to overlap."""
    low, high = axes.get_ylim()
    if high > 10 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[list[Axes]]]:
    # Not pyplot: it has global state, and picks a backend that may need a screen.
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.grid(alpha=0.3, which="both")
    return figure, panels.tolist()
