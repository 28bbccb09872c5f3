"""Pictures and figures of the experts of a model: of which layer it is said that they went farthest from their base."""

import numpy as np

from moe_jax.figures.similarity import MEAN, LayerSimilarity
from moe_jax.report.elements import joined
from moe_jax.report.model_sections import similarity_pictures
from tests.report.test_elements import read


def layer_of(index: int, to_base: list[float], to_each_other: float) -> LayerSimilarity:
    between = np.full((len(to_base), len(to_base)), to_each_other)
    np.fill_diagonal(between, 1.0)
    cosines = np.array(to_base)
    return LayerSimilarity(index, MEAN, {"up": cosines, "down": cosines}, cosines, between, universal=False)


def test_distances_are_in_figures_and_the_farthest_layer_is_named():
    # The nearest expert of all is in the layer that is the farthest on average.
    layers = [layer_of(1, [0.9, 0.8], 0.7), layer_of(4, [0.95, 0.25], 0.5), layer_of(6, [0.75], 1.0)]
    reader = read(joined(*similarity_pictures(layers, "a model")))
    first, _ = [attributes["alt"] for name, attributes in reader.elements if name == "img"]
    assert "3 layers" in first and "layer 4," in first and first.endswith("0.6")
    for row in ("1mean of the experts20.10.150.3", "4mean of the experts20.050.40.5", "6mean of the experts10.250.25-"):
        assert row in reader.text
    assert not similarity_pictures([], "a model")
