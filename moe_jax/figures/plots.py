"""Draws plots, and writes a folder of them. Matplotlib is imported only then, so that `--help` does not wait for it."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from moe_jax.figures.similarity import MEAN, LayerSimilarity
from moe_jax.files.staging import staged_directory
from moe_jax.files.storage_path import as_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

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


DPI = 130

# ---- experts ----------------------------------------------------------------------------------------------------

# The largest number of heat maps of layers, and of experts for which a heat map shows numbers.
_MOST_MAPS = 12
_MOST_NUMBERED = 8
# Even shares at the end of the colours of load, the same in all pictures of a page.
_MOST_SHARES = 2.0
# If no cosine is farther from 1, distances from 1 are drawn; nearer than float64 can tell, they are zero.
_NEAR = 0.05
_LEAST = 1e-15


def plot_to_base(layers: Sequence[LayerSimilarity], file: DrawnTo, *, title: str) -> None:
    """Draws the cosine to the base over the layers, or its distance from 1: per matrix, mean and range over experts."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(7.5, 4.5)
    axes = figure.add_subplot()
    index = [layer.layer for layer in layers]
    matrices = list(dict.fromkeys(name for layer in layers for name in layer.to_base))
    scale = scale_of(np.concatenate([layer.all_to_base() for layer in layers]))
    for number, name in enumerate(matrices):
        cosines = [scale.shown(layer.to_base[name]) for layer in layers]
        color = f"C{number}"
        axes.plot(index, [values.mean() for values in cosines], marker="osD"[number], color=color, label=name)
        least, greatest = [values.min() for values in cosines], [values.max() for values in cosines]
        axes.fill_between(index, least, greatest, color=color, alpha=0.15)
    whole = [scale.shown(layer.whole_to_base).mean() for layer in layers]
    axes.plot(index, whole, color=ink(), linestyle="--", linewidth=1, label="whole expert")
    margin = 0.06 * (scale.high - scale.low)
    axes.set_ylim(scale.low - margin, scale.high + margin)
    axes.ticklabel_format(axis="y", useOffset=False, style="plain")
    axes.grid(alpha=0.3)
    axes.set_xlabel("layer")
    if len(index) <= 16:
        axes.set_xticks(index)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    bases = list(dict.fromkeys(layer.base for layer in layers))
    axes.set_ylabel(f"{scale.label} to the base")
    axes.set_title(f"{title}: experts and their base ({', '.join(bases)})", fontsize=10, parse_math=False)
    axes.legend(title="mean, least and greatest of the experts", title_fontsize=8, fontsize=8, ncols=2)
    if MEAN in bases:
        counts = {len(layer.whole_to_base) for layer in layers if layer.base == MEAN}
        unrelated = ", ".join(f"{1 / math.sqrt(count):.2f} for E = {count}" for count in sorted(counts))
        note = f"To their own mean even unrelated experts have a cosine of 1/√E: {unrelated}."
        figure.text(0.01, 0.005, note, fontsize=7)
        figure.set_layout_engine("constrained", rect=(0, 0.03, 1, 0.97))
    figure.savefig(file, dpi=DPI)


def plot_between(layers: Sequence[LayerSimilarity], file: DrawnTo, *, title: str) -> None:
    """Draws the cosine between whole experts, one heat map per layer; if there are many, of evenly spaced layers.

    U is the universal FFN.
    """
    shown = [layers[i] for i in spread(len(layers), _MOST_MAPS)]
    figure, grid = _maps(len(shown), math.ceil(math.sqrt(len(shown))), (2.4, 2.4), (1.2, 0.7))
    scale = scale_of(np.concatenate([layer.between_others() for layer in layers]))
    for axes, layer in zip(grid, shown, strict=False):
        masked = np.ma.masked_where(np.eye(len(layer.between), dtype=bool), scale.shown(layer.between))
        dark, bright = scale.colour_range
        image = axes.imshow(masked, vmin=dark, vmax=bright, cmap=scale.colours)
        axes.set_title(f"layer {layer.layer}", fontsize=9)
        names = [*map(str, range(len(layer.between) - layer.universal)), *["U"] * layer.universal]
        _expert_ticks(axes.xaxis, names, most=8)
        _expert_ticks(axes.yaxis, names, most=8)
        axes.set_xlabel("expert", fontsize=7)
        axes.set_ylabel("expert", fontsize=7)
        if len(layer.between) <= _MOST_NUMBERED:
            for (row, column), value in np.ndenumerate(masked):
                if row != column:
                    is_dark = (np.asarray(image.norm(value)).item() < 0.5) != scale.colours.endswith("_r")
                    color = "white" if is_dark else "black"
                    axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=color)
    figure.colorbar(image, ax=grid, label=f"{scale.label}, between experts", shrink=0.8, format="%.6g")
    some = "" if len(shown) == len(layers) else f" ({len(shown)} of {len(layers)} layers)"
    figure.suptitle(f"{title}: experts and each other{some}", fontsize=10, parse_math=False)
    figure.savefig(file, dpi=DPI)


class Scale(NamedTuple):
    """How cosines between experts are drawn, so that two digits tell them apart.

    Attributes:
      unit: None: cosines as they are. Otherwise `1 - cosine` is drawn as a multiple of this power of ten, for experts
        of a common origin differ in the fourth digit or later.
      low, high: the least and greatest that is drawn.
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

    @property
    def colour_range(self) -> tuple[float, float]:
        """Values at the ends of the colours, the same in all pictures of a kind: what is nearly alike looks alike."""
        return (min(0.0, self.low), 1.0) if self.unit is None else (0.0, _NEAR / self.unit)

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

    `shares` are by layer index, of the assignments per expert.
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
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=_MOST_SHARES)
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
    _share_colours(figure, image, float(relative.max()))
    figure.suptitle(title, fontsize=9, parse_math=False)
    figure.savefig(file, dpi=DPI)


def _share_colours(figure: "Figure", image: "AxesImage", most: float, axes: "Sequence[Axes] | None" = None) -> None:
    """Draws the colours of shares; an arrow says that some are above the end, where the colour stays the same."""
    beyond = "max" if most > _MOST_SHARES else "neither"
    figure.colorbar(image, ax=axes, label="× an even share", extend=beyond)


def _expert_ticks(axis: "Axis", names: Sequence[str], most: int) -> None:
    """Labels the experts; if there are more than `most`, only some of them."""
    step = -(-len(names) // most)
    axis.set_ticks(range(0, len(names), step), names[::step], fontsize=7)


def _maps(
    count: int, columns: int, size: tuple[float, float], margins: tuple[float, float]
) -> tuple["Figure", Sequence["Axes"]]:
    """Returns a figure with axes for so many heat maps, each of a size in inches."""
    rows = -(-count // columns)
    figure = new_figure(size[0] * columns + margins[0], size[1] * rows + margins[1])
    grid = figure.subplots(rows, columns, squeeze=False).reshape(-1).tolist()
    for axes in grid[count:]:
        axes.set_axis_off()
    return figure, grid


def spread(count: int, most: int) -> list[int]:
    """At most so many of the numbers below `count`, evenly spaced."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))


# ---- curves over the steps of a run -----------------------------------------------------------------------------

# More points than a picture has dots are drawn as means of neighbours, and how far these range.
_MOST_POINTS = 300
# So few are seen better with a mark at each.
_FEW_POINTS = 40


class Curve(NamedTuple):
    """One curve with its name in the legend; values that are not finite leave a gap."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]


def plot_curves(curves: Sequence[Curve], file: DrawnTo, *, label: str) -> None:
    """Draws curves in one picture, with a legend if there are several; `label` says what the values are."""
    figure = new_figure(6.4, 3.3)
    axes = figure.add_subplot()
    for index, curve in enumerate(curves):
        color = f"C{index}"
        steps, means, least, greatest = condensed(curve)
        marker = "o" if len(steps) <= _FEW_POINTS else None
        axes.plot(steps, means, color=color, linewidth=1.6, marker=marker, markersize=3, label=curve.name)
        if len(steps) < len(curve.steps):
            axes.fill_between(steps, least, greatest, color=color, alpha=0.2, linewidth=0)
    axes.set(xlabel="step", ylabel=label)
    axes.grid(alpha=0.6, linewidth=0.6)
    axes.tick_params(length=0)
    axes.margins(x=0.01)
    if len(curves) > 1:
        axes.legend(fontsize=8, framealpha=0.8)
    figure.savefig(file, dpi=DPI)


def condensed(curve: Curve) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The curve in at most so many points as can be seen: steps, and of every point the mean, least and greatest."""
    steps, values = np.asarray(curve.steps, np.float64), np.asarray(curve.values, np.float64)
    values = np.where(np.isfinite(values), values, np.nan)
    if len(steps) <= _MOST_POINTS:
        return steps, values, values, values
    groups = np.array_split(np.arange(len(steps)), _MOST_POINTS)
    # NaN if one of a group is, so that a gap is not drawn over.
    means, least, greatest = (np.array([one(values[group]) for group in groups]) for one in (np.mean, np.min, np.max))
    return np.array([steps[group].mean() for group in groups]), means, least, greatest


# The largest number of layers that are drawn, evenly spaced, and of columns of each: more steps are averaged.
_MOST_LAYERS = 6
_MOST_COLUMNS = 120


def layers_over_time(layers: Sequence[int]) -> list[int]:
    """Returns the layers that `plot_use_over_time` draws."""
    return [layers[i] for i in spread(len(layers), _MOST_LAYERS)]


def plot_use_over_time(steps: Sequence[float], shares: Mapping[int, Float[np.ndarray, "n E"]], file: DrawnTo) -> None:
    """Draws one heat map per layer: experts over steps, relative to an even share; if there are many, of some layers.

    `shares` are by layer index, at least one, of the assignments per expert at every step.
    """
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.ticker import MaxNLocator

    layers = layers_over_time(list(shares))
    groups = np.array_split(np.arange(len(steps)), min(len(steps), _MOST_COLUMNS))
    columns = min(len(layers), 2)
    figure, grid = _maps(len(layers), columns, (5.2, 1.7), (0.8, 0.7))
    relative = {layer: np.array([shares[layer][group].mean(axis=0) for group in groups]).T for layer in layers}
    relative = {layer: found * len(found) for layer, found in relative.items()}
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=_MOST_SHARES)
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
    _share_colours(figure, image, max(float(found.max()) for found in relative.values()), grid)
    figure.savefig(file, dpi=DPI)


# ---- a folder of plots ------------------------------------------------------------------------------------------

TO_BASE, BETWEEN, LOAD, NUMBERS = "cosine_to_base.png", "cosine_between_experts.png", "expert_load.png", "figures.json"


def write_figures(
    dst: Path,
    layers: Sequence[LayerSimilarity],
    *,
    name: str,
    shares: Mapping[int, Float[np.ndarray, " E"]] | None = None,
    text: Mapping[str, Any] | None = None,
    more: Mapping[str, Callable[[Path], object]] | None = None,
    numbers: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Writes the plots and `figures.json` to a new folder, all or nothing, and returns the files.

    Args:
      dst: the folder.
      layers: similarities of experts; empty if they cannot be compared, and then there are no plots of them.
      name: of the model, for the titles.
      shares: by layer index, the share of the assignments per expert; None: no plot of it.
      text: the text on which they were measured: `path`, `tokens` and `seq_len`.
      more: further plots by the names of their files, each drawn to the path that it is given.
      numbers: further entries of `figures.json`.
    """
    dst = Path(dst)
    with staged_directory(dst) as folder:
        files = []
        if layers:
            plot_to_base(layers, folder / TO_BASE, title=name)
            plot_between(layers, folder / BETWEEN, title=name)
            files += [TO_BASE, BETWEEN]
        if shares is not None and text is not None:
            title = f"{name}: load of the experts, {text['tokens']:,} tokens of {Path(text['path']).name}"
            plot_load(shares, folder / LOAD, title=title)
            files.append(LOAD)
        for file, draw in (more or {}).items():
            draw(Path(folder / file))
            files.append(file)
        known = {
            "model": name,
            "text": None if text is None else dict(text),
            "layers": [_layer_numbers(layer, None if shares is None else shares[layer.layer]) for layer in layers]
            or [{"layer": layer, "load": share.tolist()} for layer, share in (shares or {}).items()],
            **(numbers or {}),
        }
        as_path(folder / NUMBERS).write_durably(json.dumps(known, indent=1).encode())
    return [dst / file for file in (*files, NUMBERS)]


def _layer_numbers(layer: LayerSimilarity, share: Float[np.ndarray, " E"] | None) -> dict[str, Any]:
    every = layer.all_to_base()
    return {
        "layer": layer.layer,
        "base": layer.base,
        "last_expert_is_universal": layer.universal,
        "cosine_to_base": {
            "mean": float(every.mean()),
            "least": float(every.min()),
            "greatest": float(every.max()),
            "whole_expert": layer.whole_to_base.tolist(),
            **{name: values.tolist() for name, values in layer.to_base.items()},
        },
        "cosine_between_experts": layer.between.tolist(),
        "load": None if share is None else share.tolist(),
    }
