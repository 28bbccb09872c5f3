"""Figures of compression against their definitions in float64, and the words and columns that are made of them."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.compression.options.in_words import compressions_of
from moe_jax.compression.part_report import Losses, MapErrors, PartReport, TriedPlan
from moe_jax.compression.recovery_figures import Recovery
from moe_jax.compression.report import (
    DENSE,
    LOW_COSINE,
    NO_BASE,
    LayerFigures,
    LayerReport,
    Measure,
    Report,
    layer_columns,
)

EXPERTS, NEURONS, SHAPES = 3, 7, {"up": (5, 7), "down": (7, 5)}


def drawn(seed=0, size=1.0):
    """Kernels, a base of all experts, what stands for the differences, and second moments; expert 1 is zero."""
    random = np.random.default_rng(seed)
    kernels = {name: size * random.standard_normal((EXPERTS, *shape)) for name, shape in SHAPES.items()}
    bases = {name: size * random.standard_normal(shape) for name, shape in SHAPES.items()}
    made = {name: size * random.standard_normal((EXPERTS, *shape)) for name, shape in SHAPES.items()}
    factors = {name: random.standard_normal((9, shape[0])) for name, shape in SHAPES.items()}
    for own in kernels.values():
        own[1] = 0
    return kernels, bases, made, {name: factor.T @ factor for name, factor in factors.items()}


def measured(kernels, bases, made, moments, experts=range(EXPERTS)) -> Measure:
    measure = Measure(EXPERTS, NEURONS)
    for name in SHAPES:
        for expert in experts:
            base = None if bases is None else bases[name].astype(np.float32)
            moment = None if moments is None else moments[name].astype(np.float32)
            own = kernels[name][expert].astype(np.float32)
            measure.add(expert, own, base, jnp.asarray(made[name][expert], jnp.float32), moment)
    return measure


@pytest.mark.parametrize("size", [1.0, 2.0**-70, 2.0**40])  # whose squares are no numbers of float32
def test_figures_are_what_they_are_defined_as(size):
    kernels, bases, made, moments = drawn(size=size)
    found = measured(kernels, bases, made, moments if size == 1 else None).figures(analysed=100.0, choice="some")
    each = range(EXPERTS)
    flat = [np.concatenate([kernels[name][e].ravel() for name in SHAPES]) for e in each]
    base = np.concatenate([bases[name].ravel() for name in SHAPES])
    errors = [
        np.concatenate([(bases[name] + made[name][e] - kernels[name][e]).ravel() for name in SHAPES]) for e in each
    ]
    squared = sum(np.sum(error**2) for error in errors)
    assert found.relative_error == pytest.approx(np.sqrt(squared / sum(np.sum(one**2) for one in flat)), rel=1e-5)
    assert found.error_per_neuron == pytest.approx(squared / EXPERTS / NEURONS, rel=1e-5)
    assert found.delta_error == pytest.approx(
        np.sqrt(squared / sum(np.sum((one - base) ** 2) for one in flat)), rel=1e-5
    )
    # An expert of zeros points nowhere, which is no sign of another origin.
    cosines = [one @ base / np.linalg.norm(one) / np.linalg.norm(base) if one.any() else 1.0 for one in flat]
    assert found.cosine_mean == pytest.approx(np.mean(cosines), rel=1e-4, abs=1e-6)
    assert found.cosine_min == pytest.approx(np.min(cosines), rel=1e-4, abs=1e-6)
    assert found.zero_experts == (1,) and found.choice == "some" and 100 <= found.seconds < 160
    if size == 1:
        lost = changed = 0.0
        for name in SHAPES:
            for e in each:
                error = bases[name] + made[name][e] - kernels[name][e]
                lost += np.trace(error.T @ moments[name] @ error)
                changed += np.trace(kernels[name][e].T @ moments[name] @ kernels[name][e])
        assert found.output_error == pytest.approx(np.sqrt(lost / changed), rel=1e-4)
    else:
        assert found.output_error is None


def test_figures_that_have_no_meaning_are_none():
    kernels, _, made, moments = drawn()
    without = measured(kernels, None, made, moments).figures(analysed=None)
    assert (without.delta_error, without.cosine_mean, without.cosine_min, without.seconds) == (None,) * 4
    lost = sum(np.sum((made[name] - kernels[name]) ** 2) for name in SHAPES)
    assert without.relative_error == pytest.approx(np.sqrt(lost / sum(np.sum(own**2) for own in kernels.values())))
    zeros = {name: 0 * own for name, own in kernels.items()}
    nothing = measured(zeros, {name: own[0] for name, own in zeros.items()}, zeros, None).figures()
    assert (nothing.relative_error, nothing.delta_error, nothing.cosine_mean) == (0.0, None, 1.0)
    assert nothing.zero_experts == (0, 1, 2)


def test_what_two_have_measured_is_added_up():
    kernels, bases, made, moments = drawn(1)
    whole = measured(kernels, bases, made, moments)
    one, other = (measured(kernels, bases, made, moments, experts) for experts in ((0, 2), (1,)))
    one.include(other)
    assert one.squared_error == pytest.approx(whole.squared_error)
    parts, expected = (dataclasses.asdict(measure.figures(analysed=None)) for measure in (one, whole))
    assert parts.pop("zero_experts") == expected.pop("zero_experts") == (1,)
    assert parts == pytest.approx(expected)
    one.include(measured(kernels, None, made, None))
    assert one.figures().cosine_mean is None


def test_a_note_is_read_as_it_was():
    counts = {"expert_tokens": (3, 4), "expert_tokens_by_source": {"a.txt": (1, 4), "self": (2, 0)}}
    figures = measured(*drawn()).figures(rounds=3, converged=True, **counts)
    assert LayerFigures.from_note(json.loads(json.dumps(dataclasses.asdict(figures)))) == figures


def layer(index, **figures) -> LayerReport:
    given = {"base": DENSE, "bytes_before": 1000, "bytes_after": 250, "relative_error": 0.1, "error_per_neuron": 0.2}
    return LayerReport(layer=index, **(given | figures))


def test_warnings_are_of_what_is_wrong():
    fine = layer(0, cosine_mean=LOW_COSINE, uniform_usage=False)
    assert Report(layers=(fine,), bytes_before=9, bytes_after=8).warnings == ()
    low = [layer(i, cosine_mean=0.7 - i / 100) for i in range(1, 6)]
    for count, said in ((1, "to the base 0.69 in layers 1, where"), (4, "1, 2, 3, 4, where"), (5, "3, 4, ..., where")):
        [line] = Report(layers=(fine, *low[:count]), bytes_before=9, bytes_after=8).warnings
        assert "no common origin" in line and said in line
    assert "0.65" in line
    # Experts without a base have no origin to be far from.
    assert Report(layers=(layer(0, base=NO_BASE, cosine_mean=0.1),), bytes_before=9, bytes_after=8).warnings == ()
    report = Report(
        layers=(layer(0, uniform_usage=True, zero_experts=(2,), bytes_after=3000), layer(4)),
        bytes_before=9,
        bytes_after=8,
    )
    zero, usage, size = report.warnings
    assert "zero" in zero and "2" in zero and "--calibrate" in usage and "162%" in size
    assert (report.expert_bytes_before, report.expert_bytes_after) == (2000, 3250)
    used = (layer(0, expert_tokens=(64, 65)), layer(3, expert_tokens=(63, 500, 0)))
    [rare] = Report(layers=used, bytes_before=9, bytes_after=8).warnings
    assert "2 experts (layer 3: 0, 2) fewer than 64 tokens each (1 of them none at all)" in rare
    assert "--samples" in rare and "shrunk towards those of their layers" in rare
    [seen] = Report(layers=(layer(0, expert_tokens=(1, 64)),), bytes_before=9, bytes_after=8).warnings
    assert "none at all" not in seen
    written = report.to_json()
    assert (written["expert_bytes_after"], written["bytes_before"], written["bytes_after"]) == (3250, 9, 8)
    assert [one["layer"] for one in written["layers"]] == [0, 4] and written["warnings"] == [*report.warnings]
    assert not Report(layers=(layer(0, bytes_after=1000),), bytes_before=9, bytes_after=8).warnings


def test_a_report_is_read_as_it_was_written():
    tuned = {field.name: 3 for field in dataclasses.fields(Recovery)}
    given = {
        "layers": (layer(0, zero_experts=(1,), expert_tokens=(80, 90)),),
        "parts": (PartReport.of("head", MapErrors(maps=1, norm=4.0, error=1.0, bytes_before=9, bytes_after=3), "a"),),
        "losses": Losses(1.0, 2.0, 0.5),
        "tried": (TriedPlan(0.1, 0.2), TriedPlan(0.3, 0.4)),
        "bytes_before": 9,
        "bytes_after": 8,
        "earlier": ("resmoe --keep 0.25",),
        "calibration_tokens": {"a.txt": 7},
        "recovery": Recovery(**tuned),
    }
    assert given.keys() == {field.name for field in dataclasses.fields(Report)}
    report = Report(**given)
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report
    least = Report(layers=(), bytes_before=9, bytes_after=8)
    assert Report.from_json(json.loads(json.dumps(least.to_json()))) == least


def test_it_is_said_if_nothing_was_known_of_what_layers_are_worth():
    known, unknown = layer(0, predicted_divergence=1e-5), layer(1, predicted_divergence=3e-9)
    [line] = Report(layers=(unknown, unknown), bytes_before=9, bytes_after=8).warnings
    assert "too little to be measured" in line
    for some in ((known, unknown), (known,), ()):
        assert not Report(layers=some, bytes_before=9, bytes_after=8).warnings


def test_columns_have_a_text_for_every_layer_and_none_is_empty():
    columns = layer_columns([layer(3, rounds=2, converged=True, objective=12345.678), layer(4, rounds=5, seconds=1.26)])
    assert columns == {
        "layer": ["3", "4"],
        "base": [DENSE, DENSE],
        "objective": ["1.235e+04", "-"],
        "rounds": ["2", "5, not converged"],
        "error": ["0.1000", "0.1000"],
        "per\nneuron": ["0.2", "0.2"],
        "seconds": ["-", "1.3"],
        "bytes": ["250 B", "250 B"],
        "kept": ["25.0%", "25.0%"],
    }


def test_earlier_compressions_in_words():
    """A lineage comes from a file, which may lack anything, or hold anything."""
    of = {"path": "moe-dir", "fingerprint": "0"}
    options = {"method": "quantize", "bits": 3, "group_size": 128, "feedback": False, "zero_points": True, "of": "rest"}
    lineage = [
        {"command": "upcycle", "options": {"experts": 4}},
        {"command": "compress", "options": {"method": "resmoe", "keep": 0.25}, "sources": [of]},
        {"command": "compress", "options": options},
        {"command": "compress", "options": {"method": "of\x1bold", "keep": 1}, "sources": [3]},
        {"command": "compress"},
    ]
    assert compressions_of(lineage) == (
        "resmoe --keep 0.25, of moe-dir",
        "quantize --bits 3 --no-feedback --zero-points --of rest",
        "of\\x1bold",
        "an unknown method",
    )
