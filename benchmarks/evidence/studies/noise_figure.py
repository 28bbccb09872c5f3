"""The picture of what dropping entries of deltas costs, from results alone."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from evidence.results import ResultsFile
from evidence.studies.compressions import DeltaSizes

_MARKERS = "osD^vP"


def plot_noise(results: ResultsFile, studies: Sequence[DeltaSizes], file: Path) -> bool:
    """Draws added loss against the energy of the noise, as a share of the kernels': a colour for every study, whose
    models have a width of their own, a marker for every size of deltas, and a point, a mean over seeds, for every rate.

    Returns:
      Whether there was anything to draw.
    """
    # Not pyplot: it has global state, and picks a backend that may need a screen.
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    drawn = False
    for color, study in enumerate(studies):
        for marker, factor in enumerate(sorted(study.factors)):
            found = [result for seed in study.seeds if (result := results.get(*study.path(factor, seed)))]
            if not found:
                continue
            drawn = True
            noise, added = (
                [statistics.mean(one[what][f"{rate:g}"] for one in found) for rate in study.rates]
                for what in ("noise", "added")
            )
            axes.plot(noise, added, color=f"C{color}", marker=_MARKERS[marker], linewidth=1, markersize=5,
                      label=f"{study.scale.name}, deltas × {factor:g}")  # fmt: skip
    if not drawn:
        return False
    axes.set_xscale("log")
    # Noise may also help by chance: losses fall by a little.
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.axhline(0, color="black", linewidth=1)
    axes.grid(alpha=0.3)
    axes.set_xlabel("energy of the noise that dropping adds, of that of the kernels")
    axes.set_ylabel("added loss, nats per token, mean of the domains")
    rates = ", ".join(f"{rate:g}" for rate in studies[0].rates)
    axes.set_title(f"Entries of deltas dropped at random at rates {rates}, the others rescaled", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=110)
    return True
