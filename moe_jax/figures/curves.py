"""Curves over the steps of a run: losses, and the use of experts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from moe_jax.figures.plots import DrawnTo, new_figure

# More points than a picture has dots are drawn as means of neighbours, and how far these range.
_MOST_POINTS = 300
# So few are seen better with a mark at each.
_FEW_POINTS = 40


class Curve(NamedTuple):
    """One curve; values that are not finite leave a gap.

    Attributes:
      name: stands in the legend.
      steps, values: as many of each.
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float]


def plot_curves(curves: Sequence[Curve], file: DrawnTo, *, label: str, across: str = "step") -> None:
    """Draws curves in one picture, with a legend if there are several.

    Args:
      curves: at least one.
      file: where to write it.
      label: what the values are.
      across: what the steps are.
    """
    figure = new_figure(6.4, 3.3)
    axes = figure.add_subplot()
    for index, curve in enumerate(curves):
        color = f"C{index}"
        steps, means, least, greatest = condensed(curve)
        marker = "o" if len(steps) <= _FEW_POINTS else None
        axes.plot(steps, means, color=color, linewidth=1.6, marker=marker, markersize=3, label=curve.name)
        if len(steps) < len(curve.steps):
            axes.fill_between(steps, least, greatest, color=color, alpha=0.2, linewidth=0)
    axes.set(xlabel=across, ylabel=label)
    axes.grid(alpha=0.6, linewidth=0.6)
    axes.tick_params(length=0)
    axes.margins(x=0.01)
    if len(curves) > 1:
        axes.legend(fontsize=8, framealpha=0.8)
    figure.savefig(file, dpi=130)


def condensed(curve: Curve) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The curve in at most so many points as can be seen: steps, and of every point the mean, least and greatest."""
    steps, values = np.asarray(curve.steps, np.float64), np.asarray(curve.values, np.float64)
    values = np.where(np.isfinite(values), values, np.nan)
    if len(steps) <= _MOST_POINTS:
        return steps, values, values, values
    groups = np.array_split(np.arange(len(steps)), _MOST_POINTS)
    found = [_summed_up(values[group]) for group in groups]
    means, least, greatest = (np.array(one) for one in zip(*found, strict=True))
    return np.array([steps[group].mean() for group in groups]), means, least, greatest


def _summed_up(values: np.ndarray) -> tuple[float, float, float]:
    """Mean, least and greatest of a group; NaN if one of them is, so that a gap is not drawn over."""
    return float(values.mean()), float(values.min()), float(values.max())


# The largest number of layers that are drawn, evenly spaced, and of columns of each: more steps are averaged.
_MOST_LAYERS = 6
_MOST_COLUMNS = 120


def plot_use_over_time(steps: Sequence[float], shares: Mapping[int, Float[np.ndarray, "n E"]], file: DrawnTo) -> None:
    """Draws one heat map per layer: experts over steps, relative to an even share; if there are many, of some layers.

    Args:
      steps: n of them.
      shares: by layer index, the share of the assignments per expert at every step; at least one layer.
      file: where to write it.
    """
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.ticker import MaxNLocator

    layers = [list(shares)[i] for i in _spread(len(shares), _MOST_LAYERS)]
    groups = np.array_split(np.arange(len(steps)), min(len(steps), _MOST_COLUMNS))
    columns = min(len(layers), 2)
    rows = -(-len(layers) // columns)
    figure = new_figure(5.2 * columns + 0.8, 1.7 * rows + 0.7)
    grid = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for axes in grid[len(layers) :]:
        axes.set_axis_off()
    relative = {layer: np.array([shares[layer][group].mean(axis=0) for group in groups]).T for layer in layers}
    relative = {layer: found * len(found) for layer, found in relative.items()}
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=max(2.0, *(float(found.max()) for found in relative.values())))
    for number, (axes, layer) in enumerate(zip(grid, layers, strict=False)):
        found = relative[layer]
        ends = (steps[0] - 0.5, steps[-1] + 0.5, len(found) - 0.5, -0.5)
        image = axes.imshow(found, norm=norm, cmap="RdBu_r", aspect="auto", extent=ends, interpolation="nearest")
        axes.set_title(f"layer {layer}", fontsize=9)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.tick_params(labelbottom=number + columns >= len(layers))
        axes.set_ylabel("expert")
    figure.supxlabel("step", fontsize=10)
    figure.colorbar(image, ax=grid.tolist(), label="× an even share")
    figure.savefig(file, dpi=130)


def _spread(count: int, most: int) -> list[int]:
    """At most so many of the numbers below `count`, evenly spaced."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))
