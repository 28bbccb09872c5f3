"""The picture of what dropping entries of deltas costs, from results alone."""

import statistics
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from evidence.results import ResultsFile
from evidence.studies.variants import NOISE

_MARKERS = "osD^vP"


def draw_noise(results: ResultsFile, file: Path) -> None:
    """Added loss against the energy of the noise, as a share of the kernels': a colour for every scale, whose models
    have a width of their own, a marker for every size of deltas, and a point, a mean over seeds, for every rate."""
    # Not pyplot: it has global state, and picks a backend that may need a screen.
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lines = (
        (color, scale, size, list(by_seed.values()))
        for color, (scale, models) in enumerate((results.get(NOISE) or {}).items())
        for sizes in models.values()
        for size, by_seed in sizes.items()
    )
    markers: dict[str, str] = {}
    heights: list[float] = []
    for color, scale, size, runs in lines:
        marker = markers.setdefault(size, _MARKERS[len(markers)])
        rates = list(runs[0]["noise"])
        noise, added = (
            [statistics.fmean(run[what][rate] for run in runs) for rate in rates] for what in ("noise", "added")
        )
        heights += added
        label = f"{scale}, {size}"
        axes.plot(noise, added, color=f"C{color}", marker=marker, linewidth=1, markersize=5, label=label)
        axes.set_title(f"Entries of deltas dropped at rates {', '.join(rates)}, the others rescaled", fontsize=10)
    axes.set_xscale("log")
    # Noise may also help by chance: losses fall by a little.
    axes.set_yscale("symlog", linthresh=1e-3, linscale=0.3)
    axes.axhline(0, color="black", linewidth=1)
    axes.grid(alpha=0.3)
    axes.set_xlabel("energy of the noise that dropping adds, of that of the kernels")
    axes.set_ylabel("added loss, nats per token, mean of the domains")
    axes.set_ylim(min(-1e-3, 1.5 * min(heights)), 1.5 * max(1e-3, *heights))
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=110)
