"""Draws the plots. Matplotlib is imported only then, so that `--help` does not wait for it."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float

from moe_jax.figures.similarity import MEAN, LayerSimilarity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

DrawnTo = Path | IO[bytes]
"""The file of a picture: a PNG at a path, or a file in the format of matplotlib's settings (`savefig.format`)."""


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of a size in inches."""
    # pyplot is not used: it has global state, and may choose a backend that needs a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def ink() -> str:
    """The colour of text, for lines that stand out from the coloured ones."""
    import matplotlib

    return matplotlib.rcParams["text.color"]


_DPI = 130
# The largest number of heat maps side by side, and of experts for which a heat map shows numbers.
_MOST_MAPS = 12
_MOST_NUMBERED = 8
# If no cosine is farther from 1, distances from 1 are drawn; nearer than float64 can tell, they are zero.
_NEAR = 0.05
_LEAST = 1e-15


def plot_to_base(layers: Sequence[LayerSimilarity], file: DrawnTo, *, title: str) -> None:
    """Draws the cosine to the base over the layers, or its distance from 1: per matrix, mean and range over experts.

    Args:
      layers: the measurements.
      file: where to write it.
      title: names the model.
    """
    figure = new_figure(7.5, 4.5)
    axes = figure.add_subplot()
    index = [layer.layer for layer in layers]
    matrices = list(dict.fromkeys(name for layer in layers for name in layer.to_base))
    scale = scale_of(np.concatenate([layer.all_to_base() for layer in layers]))
    for number, name in enumerate(matrices):
        cosines = [scale.shown(layer.to_base[name]) for layer in layers]
        color = f"C{number}"
        axes.plot(index, [values.mean() for values in cosines], marker="osD"[number], color=color, label=name)
        axes.fill_between(
            index, [values.min() for values in cosines], [values.max() for values in cosines], color=color, alpha=0.15
        )
    whole = [scale.shown(layer.whole_to_base).mean() for layer in layers]
    axes.plot(index, whole, color=ink(), linestyle="--", linewidth=1, label="whole expert")
    _limits(axes, scale.low, scale.high)
    _layer_ticks(axes, index)
    bases = list(dict.fromkeys(layer.base for layer in layers))
    axes.set_ylabel(f"{scale.label} to the base")
    axes.set_title(f"{title}: experts and their base ({', '.join(bases)})", fontsize=10)
    axes.legend(title="mean, least and greatest of the experts", title_fontsize=8, fontsize=8, ncols=2)
    if MEAN in bases:
        counts = {len(layer.whole_to_base) for layer in layers if layer.base == MEAN}
        unrelated = ", ".join(f"{1 / math.sqrt(count):.2f} for E = {count}" for count in sorted(counts))
        note = f"To their own mean even unrelated experts have a cosine of 1/√E: {unrelated}."
        figure.text(0.01, 0.005, note, fontsize=7)
        figure.set_layout_engine("constrained", rect=(0, 0.03, 1, 0.97))
    figure.savefig(file, dpi=_DPI)


def plot_between(layers: Sequence[LayerSimilarity], file: DrawnTo, *, title: str) -> None:
    """Draws the cosine between whole experts, one heat map per layer; if there are many, of evenly spaced layers.

    U is the universal FFN.

    Args:
      layers: the measurements.
      file: where to write it.
      title: names the model.
    """
    shown = [layers[i] for i in np.unique(np.linspace(0, len(layers) - 1, min(len(layers), _MOST_MAPS)).round())
             .astype(int)]  # fmt: skip
    columns = math.ceil(math.sqrt(len(shown)))
    rows = -(-len(shown) // columns)
    figure = new_figure(2.4 * columns + 1.2, 2.4 * rows + 0.7)
    grid = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    scale = scale_of(np.concatenate([_off_diagonal(layer.between) for layer in layers]))
    for axes, layer in zip(grid, shown, strict=False):
        masked = np.ma.masked_where(np.eye(len(layer.between), dtype=bool), scale.shown(layer.between))
        image = axes.imshow(masked, vmin=scale.low, vmax=scale.high, cmap=scale.colours)
        axes.set_title(f"layer {layer.layer}", fontsize=9)
        names = [*map(str, range(len(layer.between) - layer.universal)), *["U"] * layer.universal]
        _expert_ticks(axes.xaxis, names, most=8)
        _expert_ticks(axes.yaxis, names, most=8)
        if len(layer.between) <= _MOST_NUMBERED:
            _numbers(axes, masked, lambda value: f"{value:.2f}", image.norm, scale.colours)
    figure.colorbar(image, ax=grid.tolist(), label=f"{scale.label}, between experts", shrink=0.8, format="%.6g")
    some = "" if len(shown) == len(layers) else f" ({len(shown)} of {len(layers)} layers)"
    figure.suptitle(f"{title}: experts and each other{some}", fontsize=10)
    figure.savefig(file, dpi=_DPI)


class Scale(NamedTuple):
    """How cosines between experts are drawn, so that two digits tell them apart.

    Attributes:
      unit: None: cosines as they are. Otherwise `1 - cosine` is drawn as a multiple of this power of ten, for experts
        of a common origin differ in the fourth digit or later.
      low, high: what the colours range over.
      label: what is drawn; between what is left to say.
    """

    unit: float | None
    low: float
    high: float
    label: str

    @property
    def colours(self) -> str:
        """The colour map: what is alike is bright."""
        return "viridis" if self.unit is None else "viridis_r"

    def shown(self, cosines: np.ndarray) -> np.ndarray:
        """Returns the values that are drawn for cosines."""
        return cosines if self.unit is None else (1 - cosines) / self.unit


def scale_of(cosines: Float[np.ndarray, " n"]) -> Scale:
    """The scale that shows the differences between these cosines; there may be none."""
    if len(cosines) and float(cosines.min()) < 1 - _NEAR:
        low, high = float(cosines.min()), float(cosines.max())
        return Scale(None, min(low, high - 0.01), high, "cosine")
    farthest = max(float((1 - cosines).max()) if len(cosines) else 0.0, _LEAST)
    exponent = math.floor(math.log10(farthest))
    unit = 10.0**exponent
    nearest = float((1 - cosines).min()) / unit if len(cosines) else 0.0
    return Scale(unit, min(nearest, farthest / unit - 0.01), farthest / unit, f"1e{-exponent} × (1 − cosine)")


def plot_load(shares: Mapping[int, Float[np.ndarray, " E"]], file: DrawnTo, *, title: str) -> None:
    """Draws how often experts were chosen, relative to an even share: a heat map over layers and experts.

    Args:
      shares: by layer index, the share of the assignments per expert.
      file: where to write it.
      title: names the model and the text.
    """
    from matplotlib.colors import TwoSlopeNorm

    most = max(map(len, shares.values()))
    relative = np.ma.masked_all((len(shares), most))
    percent = np.ma.masked_all((len(shares), most))
    for row, share in enumerate(shares.values()):
        relative[row, : len(share)] = share * len(share)
        percent[row, : len(share)] = 100 * share
    numbered = most <= 2 * _MOST_NUMBERED
    figure = new_figure(min(12, 2.5 + (0.55 if numbered else 0.16) * most), min(12, 1.6 + 0.32 * len(shares)))
    axes = figure.add_subplot()
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=max(2.0, float(relative.max())))
    image = axes.imshow(relative, norm=norm, cmap="RdBu_r", aspect="auto")
    if len(shares) <= 40:
        axes.set_yticks(range(len(shares)), [str(layer) for layer in shares])
    axes.set_ylabel("layer")
    axes.set_xlabel("expert")
    _expert_ticks(axes.xaxis, list(map(str, range(most))), most=16)
    if numbered:
        for (row, expert), value in np.ndenumerate(percent):
            if not percent.mask[row, expert]:
                dark = norm(relative[row, expert]) < 0.15 or norm(relative[row, expert]) > 0.85
                axes.text(expert, row, f"{value:.0f}%", ha="center", va="center", fontsize=8,
                          color="white" if dark else "black")  # fmt: skip
    figure.colorbar(image, label="× an even share")
    figure.suptitle(title, fontsize=9)
    figure.savefig(file, dpi=_DPI)


def _limits(axes: "Axes", low: float, high: float) -> None:
    """Axis limits around the values, with some room."""
    margin = 0.06 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    axes.ticklabel_format(axis="y", useOffset=False, style="plain")
    axes.grid(alpha=0.3)


def _layer_ticks(axes: "Axes", index: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("layer")
    if len(index) <= 16:
        axes.set_xticks(index)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _expert_ticks(axis: "Axis", names: Sequence[str], most: int) -> None:
    """Labels the experts; if there are more than `most`, only some of them."""
    step = -(-len(names) // most)
    axis.set_ticks(range(0, len(names), step), names[::step], fontsize=7)


def _numbers(
    axes: "Axes", values: np.ma.MaskedArray, text: Callable[[float], str], norm: "Normalize", colours: str
) -> None:
    """Writes the values into their cells, in white on what is dark."""
    for (row, column), value in np.ndenumerate(values):
        if row != column:
            is_dark = (norm(value) < 0.5) != colours.endswith("_r")
            color = "white" if is_dark else "black"
            axes.text(column, row, text(value), ha="center", va="center", fontsize=6, color=color)


def _off_diagonal(matrix: Float[np.ndarray, "E E"]) -> Float[np.ndarray, " n"]:
    return matrix[~np.eye(len(matrix), dtype=bool)]
