"""Pictures of models that are not like the usual one: a single layer, many layers, many experts, layers that differ."""

import pathlib

import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest

from moe_jax.figures.plots import plot_between, plot_load, plot_to_base, plot_use_over_time, scale_of
from moe_jax.figures.similarity import MEAN, SHARED, LayerSimilarity
from tests.support.tiers import one_in


def layer_of(index: int, experts: int, *, base: str = MEAN, noise: float = 0.1) -> LayerSimilarity:
    random = np.random.default_rng(index)
    to_base = {name: 1 - noise * random.random(experts) for name in ("up", "down")}
    between = 1 - noise * random.random((experts, experts))
    np.fill_diagonal(between, 1.0)
    return LayerSimilarity(index, base, to_base, to_base["up"], between, universal=base == SHARED)


CASES = {
    "one layer of one expert": [layer_of(0, 1)],
    "equal experts": [layer_of(i, 4, noise=0.0) for i in range(3)],
    "many layers of many experts": [layer_of(i, 64) for i in range(48)],
    "layers that differ": [layer_of(1, 4), layer_of(3, 8, base=SHARED)],
}


@one_in(2)
@pytest.mark.parametrize("layers", CASES.values(), ids=CASES.keys())
def test_any_model_can_be_drawn(layers, tmp_path: pathlib.Path):
    plot_to_base(layers, tmp_path / "to_base.png", title="a model")
    plot_between(layers, tmp_path / "between.png", title="a model")
    shares = {layer.layer: np.full(len(layer.between), 1 / len(layer.between)) for layer in layers}
    plot_load(shares, tmp_path / "load.png", title="a model")
    for name in ("to_base", "between", "load"):
        height, width = matplotlib.image.imread(tmp_path / f"{name}.png").shape[:2]
        assert 150 < height < 2000 and 200 < width < 2000


def test_a_share_that_changes_changes_the_picture(tmp_path: pathlib.Path):
    plot_load({0: np.array([0.5, 0.5]), 1: np.array([0.5, 0.5])}, tmp_path / "even.png", title="load")
    plot_load({0: np.array([0.5, 0.5]), 1: np.array([0.9, 0.1])}, tmp_path / "uneven.png", title="load")
    even, uneven = (matplotlib.image.imread(tmp_path / f"{name}.png") for name in ("even", "uneven"))
    changed = np.abs(even - uneven).sum(axis=(1, 2)) > 0
    # Only the lower one of the two layers.
    assert changed.any() and not changed[: len(changed) // 3].any()


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would be saved."""
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


@pytest.mark.parametrize("noise", [1.0, 1e-3])
def test_cells_of_few_experts_hold_their_numbers(drawn, tmp_path, noise):
    layers = [layer_of(0, 8, base=SHARED, noise=noise), layer_of(1, 9, noise=noise)]
    plot_between(layers, tmp_path / "between.png", title="a model")
    [figure] = drawn
    few, many, *_ = figure.axes
    scale = scale_of(np.concatenate([layer.between_others() for layer in layers]))
    numbers = {text.get_position(): text.get_text() for text in few.texts}
    assert not many.texts and numbers == {
        (column, row): f"{scale.shown(layers[0].between)[row, column]:.2f}"
        for row in range(8)
        for column in range(8)
        if row != column
    }
    assert [label.get_text() for label in few.get_xticklabels()] == [*"0123456", "U"]
    assert few.get_xlabel() == few.get_ylabel() == "expert"
    # White on the darkest cell, and black on the brightest; what is nearly alike is bright.
    [image] = few.get_images()
    brightness = image.cmap(image.norm(image.get_array()))[..., :3].sum(axis=-1)
    cells = sorted(
        (brightness[row, column], text.get_color()) for text in few.texts for column, row in [text.get_position()]
    )
    colours = [color for _, color in cells]
    assert colours == sorted(colours, reverse=True) and ("white" in colours) == (noise == 1.0)


@pytest.mark.parametrize("count", [12, 13])
def test_of_many_layers_some_are_drawn(drawn, tmp_path, count):
    plot_between([layer_of(i, 2) for i in range(count)], tmp_path / "between.png", title="a model")
    [figure] = drawn
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(titles) == 12 and (titles[0], titles[-1]) == ("layer 0", f"layer {count - 1}")
    assert ("12 of 13 layers" in figure.get_suptitle()) == (count == 13)


def test_steps_and_experts_are_whole_numbers(drawn, tmp_path):
    shares = {layer: np.array([[0.5, 0.5], [1.0, 0.0]]) for layer in (1, 4, 6)}
    plot_use_over_time([10, 11], shares, tmp_path / "load.png")
    [figure] = drawn
    *maps, _ = figure.axes
    assert [axes.get_title() for axes in maps if axes.get_title()] == ["layer 1", "layer 4", "layer 6"]
    for axes in maps[:3]:
        assert all(float(tick).is_integer() for tick in (*axes.get_xticks(), *axes.get_yticks()))
        assert axes.get_images()[0].get_array().tolist() == [[1.0, 2.0], [1.0, 0.0]]


def test_pictures_of_a_kind_have_colours_in_common(drawn, tmp_path):
    """Of distances of a hundredth of a percent, and of uses that differ, on one page."""
    for noise, most in ((1e-3, 0.6), (1e-4, 0.9)):
        plot_between([layer_of(0, 4, noise=noise)], tmp_path / "between.png", title="a model")
        plot_load({0: np.array([most, 1 - most])}, tmp_path / "load.png", title="load")
    ends = []
    for figure, one in zip(drawn, ("cosine", "share") * 2, strict=True):
        [image] = figure.axes[0].get_images()
        unit = scale_of(layer_of(0, 4, noise=1e-3 if not ends else 1e-4).between_others()).unit
        ends.append([end * (unit if one == "cosine" else 1) for end in (image.norm.vmin, image.norm.vmax)])
    np.testing.assert_allclose(ends[0], ends[2])
    assert ends[1] == ends[3] == [0, 2] and ends[0] == pytest.approx([0, 0.05])


@pytest.mark.parametrize(
    ("cosines", "unit", "texts"),
    [
        ([0.2, 0.95], None, ["0.20", "0.95"]),
        ([1 - 3.2e-4, 1 - 1.1e-4], 1e-4, ["3.20", "1.10"]),
        ([1 - 2.5e-9, 1 - 2.6e-9], 1e-9, ["2.50", "2.60"]),
        ([1.0, 1.0], 1e-15, ["0.00", "0.00"]),
    ],
)
def test_two_digits_tell_cosines_apart(cosines, unit, texts):
    """Experts of a common origin all had 1.0000 written into their cells."""
    cosines = np.array(cosines)
    scale = scale_of(cosines)
    assert scale.unit == unit and scale.low < scale.high
    shown = scale.shown(cosines)
    assert [f"{value:.2f}" for value in shown] == texts
    assert (shown >= scale.low - 1e-9).all() and (shown <= scale.high + 1e-9).all()
    assert ("1 − cosine" in scale.label) == (unit is not None)
