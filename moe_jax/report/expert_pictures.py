"""How similar the experts of a model are: to their base, and to each other."""

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from moe_jax.core.terminal import Progress
from moe_jax.figures import LayerSimilarity, comparable_layers, measure_similarity
from moe_jax.figures.plots import DrawnTo, plot_between, plot_load, plot_to_base
from moe_jax.model_io.model_source import ModelSource
from moe_jax.report.elements import folded, picture, table
from moe_jax.report.pictures import drawn
from moe_jax.report.subjects import Measured


def measure_layers(source: ModelSource, progress: Progress) -> list[LayerSimilarity]:
    """Reads the experts of every layer whose experts can be compared, one matrix at a time; there may be none."""
    layers, found = comparable_layers(source.config), []
    for done, layer in enumerate(layers, start=1):
        found.append(measure_similarity(source, layer))
        progress("comparing experts", done, len(layers))
    return found


def similarity_pictures(layers: Sequence[LayerSimilarity], title: str) -> list[Markup]:
    """Cosines over the layers and between experts, drawn and as a table; nothing if there are no layers."""
    if not layers:
        return []

    def to_base(file: DrawnTo) -> None:
        plot_to_base(layers, file, title=title)

    def between(file: DrawnTo) -> None:
        plot_between(layers, file, title=title)

    rows = []
    for layer in layers:
        every, others = layer.all_to_base(), layer.between[~np.eye(len(layer.between), dtype=bool)]
        least, mean = (f"{1 - value:.3g}" for value in (every.max(), every.mean()))
        apart = f"{1 - others.mean():.3g}" if others.size else "-"
        rows.append((str(layer.layer), layer.base, f"{len(layer.between)}", least, mean, apart))
    farthest = max(layers, key=lambda layer: 1 - layer.all_to_base().mean())
    alt = (
        f"experts and their base over {len(layers)} layers; on average they are farthest from it in layer "
        f"{farthest.layer}, where the cosine is {farthest.all_to_base().mean():.6g}"
    )
    columns = ("layer", "base", "experts", "to the base, nearest", "to the base, mean", "to each other, mean")
    figures = table("Distances of experts by layer, as 1 − cosine", columns, rows, words=2)
    return [
        picture(drawn(to_base, alt), "How far the experts have gone from their base", wide=True),
        picture(
            drawn(between, f"heat maps of the similarity between the experts of {len(layers)} layers"),
            "How similar the experts of a layer are to each other",
            wide=True,
        ),
        folded("the distances in figures", figures),
    ]


def measured_pictures(measured: Measured) -> list[Markup]:
    """Returns pictures of the measurements of `inspect --plots`."""
    found = similarity_pictures(measured.layers, measured.model)
    if measured.shares:
        on = f", on {measured.text}" if measured.text else ""

        def load(file: DrawnTo) -> None:
            plot_load(measured.shares, file, title=f"{measured.model}: load of the experts")

        alt = f"heat map of how often each expert of {len(measured.shares)} layers is chosen"
        found.append(picture(drawn(load, alt), f"Use of the experts by layer{on}", wide=True))
    return found
