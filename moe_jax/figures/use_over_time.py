"""How the use of experts changes over the steps of a run."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from moe_jax.figures.canvas import DrawnTo, new_figure

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
