"""Plots of the use of experts by tokens of pictures and of texts."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from moe_jax.figures.expert_use import ExpertUse, SeenPatches
from moe_jax.figures.plots import DPI, DrawnTo, new_figure, spread

BY_KIND, PATCHES = "experts_of_pictures_and_texts.png", "experts_of_patches_{}.png"
_MOST_LAYERS = 8  # of a picture's panels
_MOST_BARS = 512  # of a panel
_COLOURS = 20  # experts of colours of their own; then they come again


def plots_of_use(use: ExpertUse, *, name: str) -> dict[str, Callable[[Path], object]]:
    """Returns what draws the plots of the use of experts by tokens of pictures, by the names of their files.

    `name` is that of the model, for the titles.
    """
    pictures, texts = (f"{count:,}" for count in use.tokens)
    title = f"{name}: experts of {pictures} tokens of pictures, and {texts} of texts"
    plots: dict[str, Callable[[Path], object]] = {BY_KIND: partial(plot_use_by_kind, use, title=title)}
    for number, seen in enumerate(use.seen, start=1):
        plots[PATCHES.format(number)] = partial(plot_patches, seen, title=f"{name}: the first expert of every token")
    return plots


def plot_use_by_kind(use: ExpertUse, file: DrawnTo, *, title: str) -> None:
    """Draws how tokens of pictures and of texts use the experts of every layer.

    A bar for every layer, cut into the experts' shares of the tokens of pictures, and of those of texts; and for every
    expert the share of its tokens that are of pictures (as in Lin et al., arXiv 2401.15947, Figures 3 and 4). For many
    experts, heat maps of the same.
    """
    layers = list(use.of_text)
    experts = max(map(len, use.of_text.values()))
    figure = new_figure(min(14, max(9, 4.5 + 3 * 0.35 * len(layers))), 3.6)
    panels = figure.subplots(1, 3)
    draw = _draw_bars if len(layers) * experts <= _MOST_BARS else _draw_heat
    draw(panels, use, layers, experts)
    titles = ("tokens of pictures, by expert", "tokens of texts, by expert", "pictures' share of an expert's tokens")
    for axes, name in zip(panels, titles, strict=True):
        axes.set_title(name, fontsize=8)
        step = -(-len(layers) // 16)
        axes.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]], fontsize=7)
        axes.set_xlabel("layer", fontsize=8)
        axes.tick_params(axis="y", labelsize=7)
    if draw is _draw_bars and experts <= _COLOURS:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, title="expert", loc="outside right upper", fontsize=7, title_fontsize=7)
    figure.suptitle(title, fontsize=9, parse_math=False)
    figure.savefig(file, dpi=DPI)


def _draw_bars(panels: Sequence[Any], use: ExpertUse, layers: Sequence[int], experts: int) -> None:
    left, middle, right = panels
    for axes, counts in ((left, use.of_pictures), (middle, use.of_text)):
        bottom = np.zeros(len(layers))
        for expert in range(experts):
            heights = np.array([_share(counts[layer], expert) for layer in layers])
            axes.bar(range(len(layers)), heights, bottom=bottom, color=_colour(expert), width=0.85, label=str(expert))
            bottom += heights
    width = 0.85 / experts
    for expert in range(experts):
        both = [(use.of_pictures[layer], use.of_text[layer]) for layer in layers]
        heights = [_of_pictures(seen, read, expert) for seen, read in both]
        places = np.arange(len(layers)) + width * (expert - (experts - 1) / 2)
        right.bar(places, heights, color=_colour(expert), width=width)
    right.axhline(use.tokens[0] / max(sum(use.tokens), 1), color="0.4", linestyle="--", linewidth=0.8)
    for axes in panels:
        axes.set_ylim(0, 1)


def _draw_heat(panels: Sequence[Any], use: ExpertUse, layers: Sequence[int], experts: int) -> None:
    """Draws a row for every expert and a column for every layer; shares of tokens are multiples of even ones."""

    def drawn(axes: Any, of: Callable[[int, int], float], most: float) -> None:
        values = np.array([[of(layer, expert) for layer in layers] for expert in range(experts)])
        image = axes.imshow(values, aspect="auto", origin="lower", vmin=0, vmax=most, interpolation="nearest")
        axes.figure.colorbar(image, ax=axes).ax.tick_params(labelsize=7)
        axes.set_ylabel("expert", fontsize=8)

    left, middle, right = panels
    for axes, counts in ((left, use.of_pictures), (middle, use.of_text)):
        drawn(axes, lambda layer, expert, counts=counts: experts * _share(counts[layer], expert), 2.0)
    drawn(right, lambda layer, expert: _of_pictures(use.of_pictures[layer], use.of_text[layer], expert), 1.0)


def plot_patches(seen: SeenPatches, file: DrawnTo, *, title: str) -> None:
    """Draws a picture, and for some layers, over it, the expert that each of its tokens was given to first."""
    layers = list(seen.experts)
    shown = [layers[index] for index in spread(len(layers), _MOST_LAYERS)]
    columns = min(3, len(shown) + 1)
    rows = -(-(len(shown) + 1) // columns)
    figure = new_figure(2.6 * columns + 0.8, 2.75 * rows + 0.4)
    panels = figure.subplots(rows, columns, squeeze=False).reshape(-1).tolist()
    height, width, _ = seen.pixels.shape
    used: set[int] = set()
    for axes, layer in zip(panels, [None, *shown], strict=False):
        # Grey below the experts' colours, which else would mix with those of the picture.
        grey = seen.pixels.mean(axis=2)
        axes.imshow(seen.pixels if layer is None else np.stack([grey] * 3, axis=2).astype(np.uint8))
        axes.set_title("the picture, as the model sees it" if layer is None else f"layer {layer}", fontsize=8)
        if layer is not None:
            experts = seen.experts[layer]
            used |= set(experts[experts >= 0].tolist())
            colours = np.array(
                [[(*_colour(one), 0.55) if one >= 0 else (0, 0, 0, 0) for one in row] for row in experts]
            )
            axes.imshow(colours, extent=(-0.5, width - 0.5, height - 0.5, -0.5), interpolation="nearest")
    for axes in panels:
        axes.set_axis_off()
    for expert in sorted(used)[:_COLOURS]:
        panels[0].bar([0], [0], color=(*_colour(expert), 0.55), label=str(expert))
    panels[0].set_xlim(-0.5, width - 0.5)
    panels[0].set_ylim(height - 0.5, -0.5)
    figure.legend(title="expert", loc="outside right upper", fontsize=7, title_fontsize=7)
    figure.suptitle(title, fontsize=9, parse_math=False)
    figure.savefig(file, dpi=DPI)


def use_numbers(use: ExpertUse) -> Mapping[str, Any]:
    """Returns the numbers of the plots as JSON has them."""
    return {
        "tokens": {"of_pictures": use.tokens[0], "of_text": use.tokens[1]},
        "layers": [
            {"layer": layer, "of_pictures": use.of_pictures[layer].tolist(), "of_text": use.of_text[layer].tolist()}
            for layer in use.of_text
        ],
    }


def _share(counts: Float[np.ndarray, " E"], expert: int) -> float:
    return float(counts[expert] / max(counts.sum(), 1)) if expert < len(counts) else 0.0


def _of_pictures(seen: Float[np.ndarray, " E"], read: Float[np.ndarray, " E"], expert: int) -> float:
    if expert >= len(seen):
        return 0.0
    return float(seen[expert] / max(seen[expert] + read[expert], 1))


def _colour(expert: int) -> tuple[float, float, float]:
    import matplotlib

    red, green, blue, _ = matplotlib.colormaps["tab20"](2 * expert % _COLOURS + 2 * expert // _COLOURS % 2)
    return red, green, blue
