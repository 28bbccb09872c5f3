"""What a sweep tries, and the picture of it: what its lines, axes and legend say."""

import io
import json
import math
import types

import pytest
from matplotlib.figure import Figure

from moe_jax.compression import make_method, method_sweep
from moe_jax.compression.method_sweep import WORST_NLL, plot_sweep, sweep
from moe_jax.compression.report import DENSE, LayerReport, Point, Report, Sweep
from moe_jax.compression.spec import METHODS
from moe_jax.core.errors import InputError

GB = 10**9


@pytest.mark.parametrize("name", METHODS)
def test_what_a_sweep_tries_can_be_and_is_tried_once(name):
    option, values = METHODS[name].swept
    assert values and list(values) in (sorted({*values}), sorted({*values}, reverse=True))
    assert [getattr(make_method(name, {option: value}), option) for value in values] == [*values]


def test_every_model_is_scored_and_a_ruined_one_is_a_point_that_fits_a_picture(tmp_path, monkeypatch):
    scores, told = {"source": 2.0, 0.25: 3.0, 0.5: math.inf, 0.75: math.nan, 1.0: 1e9}, []
    tried = [("up", make_method("up", {"keep": keep})) for keep in (0.25, 0.5, 0.75, 1.0)]

    def compressed(source, out, method, *, described, **options):
        out.mkdir()
        (out / "keep").write_text(str(method.keep))
        layers = [
            LayerReport(
                layer=i, base=DENSE, bytes_before=400, bytes_after=int(400 * method.keep), error_per_neuron=0.0,
                relative_error=error, uniform_usage=True,
            )
            for i, error in enumerate((0.1, 0.3))
        ]  # fmt: skip
        return Report(layers=tuple(layers), bytes_before=1, bytes_after=1)

    def score(model):
        return scores["source" if model is source else float((model / "keep").read_text())]

    source = types.SimpleNamespace(path="where it is")
    for name, stand_in in (("compress", compressed), ("ModelDirectory", lambda path: path)):
        monkeypatch.setattr(method_sweep, name, stand_in)
    monkeypatch.setattr(method_sweep, "plot_sweep", lambda result, file, title: file.write_text(title))
    how = {"described": {"a": 1}, "sources": [], "progress": lambda what, done, total: told.append((done, total))}
    found = sweep(source, tmp_path / "out", tried, score, **how)
    assert (found.nll, found.perplexity, found.expert_bytes) == (2.0, math.exp(2), 800)
    assert [one.value for one in found.points] == [0.25, 0.5, 0.75, 1.0]
    assert [one.nll for one in found.points] == [3.0, WORST_NLL, WORST_NLL, WORST_NLL]
    assert found.points[0] == Point(
        method="up", option="keep", value=0.25, expert_bytes=200, kept=0.25, relative_error=pytest.approx(0.2), nll=3.0,
        perplexity=math.exp(3),
    )  # fmt: skip
    assert told == [(done, 4) for done in range(5)]
    assert len(found.warnings) == 1 and "--calibrate" in found.warnings[0]  # said once
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"sweep.json", "sweep.png"}
    written = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert written["measured"]["nll"] == 2.0 and written["options"] == {"a": 1}
    scores["source"] = math.nan
    with pytest.raises(InputError, match="nll nan"):
        sweep(source, tmp_path / "other", tried, score, **how)
    assert not (tmp_path / "other").exists()


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
    _, original, svd, mobe = (line for line in left.get_lines() if len(line.get_xdata()))
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


def test_a_ruined_model_does_not_press_the_others_together(monkeypatch):
    points = [point("svd", 0.5, 4, 12.0, 0.3), point("svd", 0.1, 1, 1e9, 0.9), point("mobe", 0.5, 4, 11.0, 0.3)]
    left, _ = drawn(points, monkeypatch).axes[:2]
    assert left.get_ylim()[1] == 100 and left.get_ylim()[0] > 9
    labels = [line.get_label() for line in left.get_lines() if line.get_label()[0] != "_"]
    assert labels[1:] == ["svd: keep 0.1, 0.5 (1 above the picture)", "mobe: keep 0.5"]


def test_bytes_are_counted_in_the_largest_unit_that_they_fill():
    found = [method_sweep._unit(count) for count in (999, 1000, 10**6 - 1, 10**6, 10**9 - 1, 10**9)]
    assert found == [(1.0, "bytes"), (1e3, "kB"), (1e3, "kB"), (1e6, "MB"), (1e6, "MB"), (1e9, "GB")]
