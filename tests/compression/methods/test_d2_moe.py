"""`d2-moe`: the weighted base, and deltas that are the best of their rank for the inputs."""

import numpy as np
import pytest

from moe_jax.compression import compress, make_method
from moe_jax.compression.calibration.expert_statistics import BACKGROUND, moments
from moe_jax.compression.coding.calibrated_codes import DAMPING
from moe_jax.compression.methods.deltas import weighted_mean
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig
from tests.compression.methods.recorded_layers import calibration_of, recorded
from tests.compression.methods.test_baselines import D, F, experts_of
from tests.support.moe_models import memory_moe, run
from tests.support.tiers import long

E, TOKENS, KEEP = 4, 400, 0.4
SHAPES = {"gated": {"d_model": D, "dim": F}, "plain": {"d_model": D, "dim": F, "gated": False, "bias": True}}


def silu(z: np.ndarray) -> np.ndarray:
    return z / (1 + np.exp(-z))


def inputs_of(expert: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """What a matrix of an expert is given for inputs x, float64."""
    if name != "down":
        return x
    up = x @ expert["up"] + expert.get("up/bias", 0)
    return silu(x @ expert["gate"] + expert.get("gate/bias", 0)) * up if "gate" in expert else silu(up)


def second_moments(layer: SourceLayer, name: str) -> list[np.ndarray]:
    """Sums of `w^2 x x^T`, and some of all tokens, float64 (methods.md 4)."""
    rows, found = layer.rows, []
    assert rows is not None
    x = rows.inputs.astype(np.float64)
    for k, expert in enumerate(experts_of(layer)):
        a = inputs_of(expert, name, x)
        squares = (np.where(rows.experts == k, rows.weights.astype(np.float64), 0) ** 2).sum(axis=1)
        usual = squares[squares > 0].mean() if squares.any() else 1.0
        weights = squares + usual * BACKGROUND / len(x)
        found.append((a * weights[:, None]).T @ a)
    return found


@pytest.fixture(params=SHAPES)
def layer(request):
    source = memory_moe(BankConfig(), noise=0.5, shape=SHAPES[request.param], num_experts=E)
    return SourceLayer(source, 0, calibration=recorded(source, tokens=TOKENS, unused=1))


def test_rows_of_the_base_are_means_weighted_by_their_inputs(layer):
    experts = experts_of(layer)
    for name in layer.shapes:
        weights = np.stack([np.diagonal(moment) for moment in second_moments(layer, name)])
        kernels = np.stack([expert[name] for expert in experts])
        expected = np.einsum("kr,krc->rc", weights, kernels) / weights.sum(axis=0)[:, None]
        np.testing.assert_allclose(weighted_mean(layer, name), expected, rtol=1e-4, atol=1e-5)
        assert np.abs(expected - kernels.mean(axis=0)).max() > 0.01


def test_no_input_at_all_leaves_the_plain_mean(layer):
    rows = layer.rows
    nothing = layer.calibration._replace(rows=rows._replace(inputs=np.zeros_like(rows.inputs)))
    still = SourceLayer(layer._source, 0, calibration=nothing)
    expected = np.mean(list(still.kernels("up")), axis=0)
    np.testing.assert_allclose(weighted_mean(still, "up"), expected, rtol=1e-5, atol=1e-6)


def test_deltas_are_the_best_of_their_rank_for_the_inputs(layer, tmp_path):
    """SVD of the whitened delta by NumPy: no other matrix of the rank changes the outputs less."""
    method = make_method("d2-moe", {"keep": KEEP})
    report = compress(
        layer._source, tmp_path / "out", method, calibration=calibration_of(layer.calibration, tmp_path), described={}
    ).layers[0]
    small, rank = SourceLayer(ModelDirectory(tmp_path / "out"), 0), int(KEEP * D * F / (D + F))
    assert small.moe.bank == BankConfig(kind="low-rank", rank=rank) and small.moe.num_experts == E
    assert report.base == "mean of the experts, weighted by their inputs" and report.choice == f"low-rank, rank {rank}"
    before, after, outputs = experts_of(layer), experts_of(small), np.zeros(2)
    for name, shape in layer.shapes.items():
        base = small.base(name).astype(np.float64)
        for one, other, moment in zip(before, after, second_moments(layer, name), strict=True):
            damped = moment + DAMPING * np.mean(np.diagonal(moment)) * np.eye(shape[0])
            root = np.linalg.cholesky(damped)
            left = np.linalg.svd(root.T @ (one[name] - base), compute_uv=False)[rank:]
            error = root.T @ (one[name] - other[name])
            assert (error**2).sum() == pytest.approx((left**2).sum(), rel=1e-3)
        for one, other, moment in zip(before, after, moments(layer, name), strict=True):
            for i, change in enumerate((one[name] - other[name], one[name])):
                outputs[i] += np.trace(change.T @ moment @ change)
    assert report.output_error == pytest.approx(np.sqrt(outputs[0] / outputs[1]), rel=1e-3)
    for path in ("router/kernel", *(f"experts/{name}/bias" for name in layer.shapes if layer.moe.expert.bias)):
        np.testing.assert_array_equal(small.leaf(path), layer.leaf(path))


def test_a_universal_ffn_in_the_bank_is_one_of_the_experts(tmp_path):
    moe = {"universal": "med", "extended": True, "num_experts": E}
    source = memory_moe(BankConfig(kind="low-rank", rank=2), shape=SHAPES["gated"], **moe)
    known, method = recorded(source, tokens=TOKENS), make_method("d2-moe", {"keep": KEEP})
    compress(source, tmp_path / "out", method, calibration=calibration_of(known, tmp_path), described={})
    after = SourceLayer(ModelDirectory(tmp_path / "out"), 0)
    assert len(list(after.kernels("up"))) == E + 1 and after.moe.extended


def test_what_does_not_go_with_it():
    method = make_method("d2-moe", {"keep": 0.5})
    beside = memory_moe(BankConfig(), shape=SHAPES["gated"], universal="med")
    with pytest.raises(InputError, match="give one with --calibrate TEXT"):
        method.check([SourceLayer(beside, 0)])
    with pytest.raises(InputError, match="--extended does not go"):
        method.check([SourceLayer(beside, 0, with_universal=True)])
    with pytest.raises(InputError, match=r"keep=1.5 must lie in \(0, 1\]"):
        make_method("d2-moe", {"keep": 1.5})


@long
def test_on_the_command_line(models, tmp_path, out_of, text, failing, capsys):
    options = ("--method", "d2-moe", "--keep", 0.5)
    assert "give one with --calibrate TEXT" in failing(models["one"], tmp_path / "out", *options)
    calibrated = ("--calibrate", text, "--seq-len", 16, "--samples", 4, "--calibration-dir", tmp_path / "recorded")
    assert run(models["one"], tmp_path / "out", *options, *calibrated) == 0
    said = capsys.readouterr().err
    assert f"are kept in {tmp_path / 'recorded'} (" in said and "remove that folder" in said
    out_of("export", tmp_path / "out", tmp_path / "hf")
    assert "nll" in out_of("eval", tmp_path / "out", "--text", text, "--seq-len", 48)
