"""The picture of a sweep."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_jax.compress.sweeping import Sweep

_MARKERS = "osD^vP"


def plot_sweep(sweep: "Sweep", file: Path, *, title: str) -> None:
    """Draws perplexity over the bytes of the experts, one line per method, and that of the model as it was.

    Args:
      sweep: what was measured.
      file: the PNG to write.
      title: says which model it is.
    """
    # Not pyplot: it has global state, and picks a backend that may need a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    unit, name = _unit(sweep.expert_bytes)
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    baseline = sweep.perplexity
    axes.axhline(baseline, color="black", linestyle="--", linewidth=1, label=f"not compressed: {baseline:.4g}")
    axes.axvline(sweep.expert_bytes / unit, color="black", linestyle=":", linewidth=1)
    methods = list(dict.fromkeys(point.method for point in sweep.points))
    for index, method in enumerate(methods):
        points = sorted((p for p in sweep.points if p.method == method), key=lambda point: point.expert_bytes)
        x, y = [point.expert_bytes / unit for point in points], [point.perplexity for point in points]
        marker = _MARKERS[index % len(_MARKERS)]
        axes.plot(x, y, marker=marker, color=f"C{index}", label=f"{method}, by {points[0].option}")
        for point, at_x, at_y in zip(points, x, y, strict=True):
            # Lines fall to the right: above and beside a point there is room for its label.
            place = {"xytext": (5, 5), "textcoords": "offset points", "fontsize": 8, "color": f"C{index}"}
            axes.annotate(f"{point.value:g}", (at_x, at_y), **place)
    highest = max(point.perplexity for point in sweep.points)
    if highest > 3 * baseline:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(left=0)
    axes.set_xlabel(f"experts on the disk, {name}")
    axes.set_ylabel("perplexity" + (" (log scale)" if highest > 3 * baseline else ""))
    share = sweep.expert_bytes / unit / 100
    axes.secondary_xaxis("top", functions=(lambda x: x / share, lambda x: x * share)).set_xlabel(
        "% of what they take without compression"
    )
    axes.grid(alpha=0.3)
    axes.set_title(title)
    axes.legend()
    figure.savefig(file, dpi=150)


def _unit(count: int) -> tuple[float, str]:
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return size, name
    return 1.0, "bytes"
