"""The picture of a sweep."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_jax.compress.sweeping import Sweep

_MARKERS = "osD^vP"
# From this ratio of perplexities on, a linear axis shows nothing but the worst point.
_LOG_FROM = 3.0


def plot_sweep(sweep: "Sweep", file: Path, *, title: str) -> None:
    """Draws perplexity over the bytes of the experts: a line per method, and the model as it was.

    Args:
      sweep: what was measured.
      file: the PNG to write.
      title: says which model it is.
    """
    # Not pyplot: it has global state, and picks a backend that may need a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    unit, name = _unit(sweep.expert_bytes)
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axhline(sweep.perplexity, color="black", linestyle="--", linewidth=1)
    axes.plot(
        [sweep.expert_bytes / unit], [sweep.perplexity], "k*", markersize=11, linestyle="--", linewidth=1,
        label=f"not compressed, perplexity {sweep.perplexity:.4g}",
    )  # fmt: skip
    for index, method in enumerate(dict.fromkeys(point.method for point in sweep.points)):
        points = sorted((p for p in sweep.points if p.method == method), key=lambda point: point.expert_bytes)
        x, y = [point.expert_bytes / unit for point in points], [point.perplexity for point in points]
        marker, color = _MARKERS[index % len(_MARKERS)], f"C{index}"
        axes.plot(x, y, marker=marker, color=color, label=f"{method}, {points[0].option} at each point")
        # Above the points of one method and below those of the next, so that labels of close lines do not meet.
        above = index % 2 == 0
        for point, at in zip(points, zip(x, y, strict=True), strict=True):
            axes.annotate(
                f"{point.value:g}", at, xytext=(4, 5) if above else (0, -6), textcoords="offset points", fontsize=8,
                color=color, ha="left" if above else "center", va="bottom" if above else "top",
            )  # fmt: skip
    logarithmic = max(point.perplexity for point in sweep.points) > _LOG_FROM * sweep.perplexity
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"experts on the disk, {name}")
    axes.set_ylabel("perplexity" + (", logarithmic" if logarithmic else ""))
    percent = sweep.expert_bytes / unit / 100
    top = axes.secondary_xaxis("top", functions=(lambda x: x / percent, lambda x: x * percent))
    top.set_xlabel("% of the experts as they were")
    axes.grid(alpha=0.3)
    axes.set_title(f"Quality against kept bytes: {title}", fontsize=11)
    axes.legend(fontsize=9)
    figure.savefig(file, dpi=150)


def _unit(count: int) -> tuple[float, str]:
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return size, name
    return 1.0, "bytes"
