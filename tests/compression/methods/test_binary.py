"""`binary`: what its residuals are taken from, and what is gained on plain codes of one bit."""

import numpy as np
import pytest

from moe_jax.compression import compress, make_method
from moe_jax.compression.methods import binary
from moe_jax.compression.methods.deltas import weighted_mean
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.experts.forms.coding import Encoded
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig
from tests.compression.methods.recorded_layers import calibration_of, recorded
from tests.compression.methods.test_baselines import D, F, compressed, experts_of
from tests.compression.methods.test_learnt_rounding import output_error
from tests.support.moe_models import memory_moe, run
from tests.support.tiers import long

E, TOKENS, GROUP = 4, 300, 8
SHAPES = {"gated": {"d_model": D, "dim": F}, "plain": {"d_model": D, "dim": F, "gated": False, "bias": True}}
OPTIONS = {"group_size": GROUP, "centre_group_size": GROUP}


def source_of(shape: str = "gated"):
    return memory_moe(BankConfig(), noise=0.5, shape=SHAPES[shape], num_experts=E)


@long
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_nearer_than_with_plain_codes(shape):
    source = source_of(shape)
    known = recorded(source, tokens=TOKENS, unused=1)
    layer = SourceLayer(source, 0, calibration=known)
    plain, _, _ = compressed(
        source, make_method("ders-quantize", {"bits": 1, "row_scales": True, "centre_bits": "4", **OPTIONS}),
        calibration=known,
    )  # fmt: skip
    refined, figures, _ = compressed(source, make_method("binary", OPTIONS), calibration=known)
    assert refined.moe == plain.moe and figures.choice is not None and "1 bits" in figures.choice
    assert output_error(layer, refined) < 0.9 * output_error(layer, plain)


@long
def test_residuals_are_taken_from_the_codes_of_the_weighted_mean(monkeypatch, tmp_path):
    """What is refined are kernels minus the centre as it is stored, which is near the mean by the formula."""
    given = []

    def noted(values: np.ndarray, start: Encoded, moment: np.ndarray, **options) -> Encoded:
        given.append(values)
        return start

    monkeypatch.setattr(binary, "refined", noted)
    source = source_of()
    known = recorded(source, tokens=TOKENS)
    layer = SourceLayer(source, 0, calibration=known)
    options = {**OPTIONS, "centre_bits": "8"}
    calibration = calibration_of(known, tmp_path)
    report = compress(
        source, tmp_path / "out", make_method("binary", options), calibration=calibration, described={}
    ).layers[0]
    out = SourceLayer(ModelDirectory(tmp_path / "out"), 0)
    assert report.base == "mean of the experts, weighted by their inputs"
    each = iter(given)
    for name in layer.shapes:
        centre = out.base(name)
        mean = weighted_mean(layer, name)
        assert np.abs(centre - mean).max() < 0.02 * np.abs(mean).max()
        for expert in experts_of(layer):
            np.testing.assert_allclose(next(each), expert[name] - centre, atol=1e-5)
    assert next(each, None) is None


def test_needs_a_text_and_no_universal_expert():
    method = make_method("binary", {})
    with pytest.raises(InputError, match="give one with --calibrate TEXT"):
        method.check([SourceLayer(source_of(), 0)])
    beside = memory_moe(BankConfig(), shape=SHAPES["gated"], universal="med")
    with pytest.raises(InputError, match="--extended does not go"):
        method.check([SourceLayer(beside, 0, with_universal=True)])
    for options in ({"group_size": 7}, {"scale_bits": 4}, {"centre_bits": "5"}):
        with pytest.raises(InputError):
            make_method("binary", options)


@long
def test_on_the_command_line(models, tmp_path, out_of, text):
    calibrated = ("--calibrate", text, "--seq-len", 16, "--samples", 4, "--calibration-dir", tmp_path / "recorded")
    options = ("--method", "binary", "--centre-bits", 3, "--scale-bits", 8)
    assert run(models["one"], tmp_path / "out", *options, *calibrated) == 0
    assert "nll" in out_of("eval", tmp_path / "out", "--text", text, "--seq-len", 48)
