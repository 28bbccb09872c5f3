"""Curves over the steps of a run, however many steps there are."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moe_jax.figures.canvas import DrawnTo, new_figure

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
