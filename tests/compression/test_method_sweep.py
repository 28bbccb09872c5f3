"""What a sweep tries, and the picture of it: what its lines, axes and legend say."""

import io

import pytest
from matplotlib.figure import Figure

from moe_jax.compression import make_method, method_sweep
from moe_jax.compression.method_sweep import plot_sweep
from moe_jax.compression.report import Point, Sweep
from moe_jax.compression.spec import METHODS

GB = 10**9


@pytest.mark.parametrize("name", METHODS)
def test_what_a_sweep_tries_can_be_and_is_tried_once(name):
    option, values = METHODS[name].swept
    assert values and list(values) in (sorted({*values}), sorted({*values}, reverse=True))
    assert [getattr(make_method(name, {option: value}), option) for value in values] == [*values]


def point(method, value, gigabytes, perplexity, error) -> Point:
    return Point(
        method=method, option="keep", value=value, expert_bytes=gigabytes * GB, kept=gigabytes / 8,
        relative_error=error, nll=1.0, perplexity=perplexity,
    )  # fmt: skip


def drawn(points, monkeypatch) -> Figure:
    figures = []
    monkeypatch.setattr(method_sweep, "new_figure", lambda *size: figures.append(Figure(size)) or figures[0])
    monkeypatch.setattr(Figure, "savefig", lambda *arguments, **options: None)
    whole = Sweep(nll=1.0, perplexity=10.0, expert_bytes=8 * GB, points=tuple(points), warnings=())
    plot_sweep(whole, io.BytesIO(), title="a model")
    return figures[0]


def test_a_line_for_each_method_by_the_room_that_it_takes(monkeypatch):
    points = [point("svd", 0.5, 4, 12.0, 0.3), point("mobe", 0.1, 1, 30.0, 0.9), point("svd", 0.25, 2, 20.0, 0.6)]
    left, right = drawn(points, monkeypatch).axes[:2]
    _, original, svd, mobe = left.get_lines()
    assert [list(original.get_xdata()), list(original.get_ydata())] == [[8.0], [10.0]]
    assert [list(svd.get_xdata()), list(svd.get_ydata())] == [[2.0, 4.0], [20.0, 12.0]]
    assert svd.get_label() == "svd: keep 0.25, 0.5" and mobe.get_label() == "mobe: keep 0.1"
    assert [list(line.get_ydata()) for line in right.get_lines()] == [[0.0], [0.6, 0.3], [0.9]]
    assert svd.get_color() != mobe.get_color() and svd.get_marker() != mobe.get_marker()
    assert svd.get_color() == right.get_lines()[1].get_color()
    assert left.get_xlim()[0] == right.get_xlim()[0] == right.get_ylim()[0] == 0
    assert left.get_xlabel().endswith("GB") and "%" in left.child_axes[0].get_xlabel()
    forward, back = left.child_axes[0]._functions
    assert (forward(8.0), back(25.0)) == pytest.approx((100, 2.0))


@pytest.mark.parametrize(("worst", "scale"), [(30.0, "linear"), (30.1, "log")])
def test_perplexities_far_apart_are_on_a_logarithmic_axis(worst, scale, monkeypatch):
    points = [point("svd", 0.5, 4, worst, 0.3), point("mobe", 0.5, 4, 11.0, 0.3)]
    left, right = drawn(points, monkeypatch).axes[:2]
    assert (left.get_yscale(), right.get_yscale()) == (scale, "linear")
    assert ("logarithmic" in left.get_ylabel()) == (scale == "log")


def test_bytes_are_counted_in_the_largest_unit_that_they_fill():
    found = [method_sweep._unit(count) for count in (999, 1000, 10**6 - 1, 10**6, 10**9 - 1, 10**9)]
    assert found == [(1.0, "bytes"), (1e3, "kB"), (1e3, "kB"), (1e6, "MB"), (1e6, "MB"), (1e9, "GB")]
