"""The plot of a sweep."""

from typing import TYPE_CHECKING

from moe_jax.figures.canvas import DrawnTo, ink, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moe_jax.compression.job.report import Point, Sweep

_MARKERS = "osD^vPX*<>"
_COLORS = 10
# From this ratio of perplexities on, a linear axis shows nothing but the worst point.
_LOG_FROM = 3.0


def plot_sweep(sweep: "Sweep", file: DrawnTo, *, title: str) -> None:
    """Draws perplexity and error over the bytes of the experts: a line per method, and the original model.

    The values of the varied option are in the legend, in the order of the points: labels at the points would cover each
    other.

    Args:
      sweep: the measurements.
      file: where to write it.
      title: names the model.
    """
    unit, name = _unit(sweep.expert_bytes)
    methods: dict[str, list[Point]] = {}
    for point in sorted(sweep.points, key=lambda point: point.expert_bytes):
        methods.setdefault(point.method, []).append(point)
    figure = new_figure(12, 5.2 + 0.2 * (len(methods) // 2))
    left, right = figure.subplots(1, 2)
    left.axhline(sweep.perplexity, color=ink(), linestyle=":", linewidth=1)
    label = f"not compressed: perplexity {sweep.perplexity:.4g}"
    whole = sweep.expert_bytes / unit
    star = {"marker": "*", "color": ink(), "markersize": 11}
    left.plot([whole], [sweep.perplexity], linestyle=":", linewidth=1, label=label, **star)
    right.plot([whole], [0.0], clip_on=False, **star)
    for index, method in enumerate(dict.fromkeys(point.method for point in sweep.points)):
        points = methods[method]
        x = [point.expert_bytes / unit for point in points]
        style = {
            "marker": _MARKERS[index % len(_MARKERS)],
            "color": f"C{index % _COLORS}",
            "linestyle": "-" if index < _COLORS else "--",
            "markersize": 6,
            "markerfacecolor": "none",  # so that points of several methods in one place are seen
            "markeredgewidth": 1.5,
        }
        values = ", ".join(f"{point.value:g}" for point in points)
        left.plot(x, [point.perplexity for point in points], label=f"{method}: {points[0].option} {values}", **style)
        right.plot(x, [point.relative_error for point in points], **style)
    if max(point.perplexity for point in sweep.points) > _LOG_FROM * sweep.perplexity:
        _logarithmic(left)
    left.set_ylabel("perplexity" + (", logarithmic" if left.get_yscale() == "log" else ""))
    right.set_ylabel("relative error of the experts, ||W^ - W|| / ||W||")
    right.set_ylim(bottom=0)
    percent = sweep.expert_bytes / unit / 100
    for axes in (left, right):
        axes.margins(y=0.08)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"experts on the disk, everything included, {name}")
        top = axes.secondary_xaxis("top", functions=(lambda x: x / percent, lambda x: x * percent))
        top.set_xlabel("% of the experts as they were")
        axes.grid(alpha=0.3)
    figure.suptitle(f"Quality against bytes: {title}", fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(file, dpi=130)


def _logarithmic(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _unit(count: int) -> tuple[float, str]:
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return size, name
    return 1.0, "bytes"
