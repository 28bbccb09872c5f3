"""Curves and heat maps of runs of any length."""

import io
import pathlib

import matplotlib.image
import numpy as np
import pytest

from moe_jax.figures.plots import Curve, condensed, plot_curves, plot_use_over_time


def test_short_curves_stay_as_they_are_with_gaps():
    steps, means, least, greatest = condensed(Curve("loss", [1, 5, 9], [3.0, float("inf"), 1.0]))
    assert steps.tolist() == [1, 5, 9]
    for values in (means, least, greatest):
        np.testing.assert_array_equal(values, [3.0, np.nan, 1.0])


def test_long_curves_keep_their_extremes_and_their_mean():
    values = np.random.default_rng(0).normal(size=3000)
    values[1234], values[77] = 100.0, -100.0
    steps, means, least, greatest = condensed(Curve("loss", np.arange(3000), values))
    assert len(steps) == 300 and (np.diff(steps) > 0).all()
    assert (greatest.max(), least.min()) == (100.0, -100.0)
    assert steps[greatest.argmax()] == pytest.approx(1234, abs=5) and means.mean() == pytest.approx(values.mean())
    assert (least <= means).all() and (means <= greatest).all()


def test_a_gap_of_a_long_curve_is_not_drawn_over():
    values = np.ones(3000)
    values[500] = np.nan
    _, means, least, greatest = condensed(Curve("loss", np.arange(3000), values))
    assert [int(np.isnan(found).sum()) for found in (means, least, greatest)] == [1, 1, 1]


@pytest.mark.parametrize("steps", [1, 1000])
def test_runs_of_any_length_are_drawn(steps: int, tmp_path: pathlib.Path):
    along = np.arange(1, steps + 1)
    curves = [Curve(name, along, scale / along) for name, scale in (("one", 3.0), ("other", 5.0))]
    plot_curves(curves, tmp_path / "curves.png", label="loss")
    shares = {layer: np.random.default_rng(layer).dirichlet(np.ones(8), steps) for layer in range(9)}
    plot_use_over_time(along, shares, tmp_path / "use.png")
    for name in ("curves", "use"):
        height, width = matplotlib.image.imread(tmp_path / f"{name}.png").shape[:2]
        assert 200 < height < 2000 and 500 < width < 2000


def test_use_that_changes_changes_the_picture():
    even, uneven = np.full((4, 2), 0.5), np.array([[0.5, 0.5], [0.5, 0.5], [0.9, 0.1], [0.9, 0.1]])
    drawn = []
    for shares in (even, uneven):
        file = io.BytesIO()
        plot_use_over_time([1, 2, 3, 4], {0: shares}, file)
        drawn.append(matplotlib.image.imread(io.BytesIO(file.getvalue()), format="png"))
    changed = np.abs(drawn[0] - drawn[1]).sum(axis=(0, 2)) > 0
    # The second half of the steps, and not the first.
    assert changed[len(changed) // 2 :].any() and not changed[: len(changed) // 3].any()
