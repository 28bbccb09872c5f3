"""Second moments of what the matrices of experts are given, and what methods make of them."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.compression import compress, make_method
from moe_jax.compression.calibration.expert_statistics import BACKGROUND, moments, tokens_per_expert
from moe_jax.compression.calibration.recording import Calibration, LayerCalibration, LayerRows
from moe_jax.compression.coding.coder import expert_coders, joint_moments
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.experts import BankConfig
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.nn.moe import RouterStatistics
from tests.compression.methods import recorded_layers
from tests.support.moe_models import memory_moe
from tests.support.tiers import one_in

TOKENS, E = 300, 4


@pytest.fixture(scope="module", params=[True, False], ids=["gated", "plain"])
def layer(request):
    """Of a layer whose last expert is never chosen; inputs are correlated."""
    shape = {"d_model": 16, "dim": 24, "gated": request.param, "bias": not request.param}
    source = memory_moe(BankConfig(), noise=0.3, shape=shape, num_experts=E)
    random = np.random.default_rng(0)
    inputs = (random.standard_normal((TOKENS, 4)) @ random.standard_normal((4, 16))).astype(np.float32)
    inputs += 0.1 * random.standard_normal(inputs.shape).astype(np.float32)
    experts = np.stack([random.permutation(E - 1)[:2] for _ in range(TOKENS)]).astype(np.int32)
    experts[::7, 1] = -1
    weights = random.uniform(0.1, 1, experts.shape).astype(np.float32)
    weights[experts < 0] = 0
    rows = LayerRows(inputs.astype(jnp.bfloat16), experts, weights)
    uniform = np.full(E, 1 / E)
    return SourceLayer(source, 0, calibration=LayerCalibration(RouterStatistics(uniform, uniform, np.eye(E)), rows))


def activations(layer: SourceLayer, expert: int, x: np.ndarray) -> np.ndarray:
    """Hidden activations of an expert, float64."""

    def into(name: str) -> np.ndarray:
        biases = layer.biases(name)
        kernel = list(layer.kernels(name))[expert].astype(np.float64)
        return x @ kernel + (0 if biases is None else biases[expert])

    def silu(y: np.ndarray) -> np.ndarray:
        return y / (1 + np.exp(-y))

    up = into("up")
    return silu(into("gate")) * up if "gate" in layer.shapes else silu(up)


@pytest.mark.parametrize("name", ["up", "down"])
def test_are_sums_over_the_tokens_of_an_expert_and_some_of_all(layer, name):
    rows = layer.calibration.rows
    x = rows.inputs.astype(np.float64)
    assert tokens_per_expert(layer).tolist() == [int((rows.experts == e).sum()) for e in range(E)]
    for expert, found in enumerate(moments(layer, name)):
        a = x if name == "up" else activations(layer, expert, x)
        weights = np.where(rows.experts == expert, rows.weights.astype(np.float64) ** 2, 0).sum(axis=1)
        chosen = weights[weights > 0]
        usual = chosen.mean() if len(chosen) else 1.0
        # There are fewer tokens than are taken of the layer otherwise.
        expected = np.einsum("t,ti,tj->ij", weights + usual * BACKGROUND / TOKENS, a, a)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_tokens_count_by_the_gradients_of_the_loss(layer):
    rows = layer.calibration.rows
    gradients = np.random.default_rng(1).uniform(0, 2, TOKENS).astype(np.float32)
    known = layer.calibration._replace(rows=rows._replace(gradients=gradients))
    x = rows.inputs.astype(np.float64)
    weights = np.where(rows.experts == 0, rows.weights.astype(np.float64) ** 2, 0).sum(axis=1)
    weights += weights[weights > 0].mean() * BACKGROUND / TOKENS
    expected = np.einsum("t,ti,tj->ij", weights * gradients, x, x)
    found = next(moments(SourceLayer(layer._source, 0, calibration=known), "up"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_an_expert_that_is_chosen_twice_counts_with_both_weights(layer):
    """Of merged experts: the token's output has (w + w') f(x), so that an error there counts by that sum's square."""
    rows = layer.calibration.rows
    twice = rows._replace(experts=np.where(rows.experts == 1, 0, rows.experts))
    known = SourceLayer(layer._source, 0, calibration=layer.calibration._replace(rows=twice))
    weights = np.where(twice.experts == 0, twice.weights.astype(np.float64), 0).sum(axis=1) ** 2
    assert (twice.experts == 0).all(axis=1).any()
    x = rows.inputs.astype(np.float64)
    expected = np.einsum("t,ti,tj->ij", weights + weights[weights > 0].mean() * BACKGROUND / TOKENS, x, x)
    np.testing.assert_allclose(next(moments(known, "up")), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_a_universal_ffn_is_given_all_tokens():
    """Also of a text with more tokens than are taken of the whole layer for every expert."""
    tokens = 3 * TOKENS
    source = memory_moe(BankConfig(), shape={"d_model": 16, "dim": 24}, num_experts=E, universal="med")
    known = recorded_layers.recorded(source, tokens=tokens)
    *_, found = moments(SourceLayer(source, 0, with_universal=True, calibration=known), "up")
    x = known.rows.inputs.astype(np.float64)
    some = x[np.linspace(0, tokens - 1, 512).astype(int)]
    expected = x.T @ x + BACKGROUND / 512 * some.T @ some
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_follow_the_neurons(layer):
    orders = np.stack([np.random.default_rng(e).permutation(24) for e in range(E)]).astype(np.int32)
    for order, plain, moved in zip(
        orders, expert_coders(layer, "down"), expert_coders(layer, "down", orders), strict=True
    ):
        np.testing.assert_array_equal(moved.moment, plain.moment[np.ix_(order, order)])
    for plain, moved in zip(expert_coders(layer, "up"), expert_coders(layer, "up", orders), strict=True):
        np.testing.assert_array_equal(moved.moment, plain.moment)
    for order, plain, moved in zip(orders, joint_moments(layer), joint_moments(layer, orders), strict=True):
        assert plain.keys() == moved.keys() == layer.shapes.keys()
        np.testing.assert_array_equal(moved["down"], plain["down"][np.ix_(order, order)])
        np.testing.assert_array_equal(moved["up"], plain["up"])


METHODS = {
    "rounding": ("quantize", {"bits": 3, "group_size": 8}),
    "deltas": ("ders-quantize", {"bits": 2, "group_size": 8}),
    "largest deltas": ("ders-sparsify", {"drop": 0.7, "keep": "magnitude"}),
    "pruning": ("up", {"keep": 0.4, "design": "separate"}),
    "factors": ("svd", {"keep": 0.4, "design": "separate"}),
    "joint factors": ("svd", {"keep": 0.4}),
    "joint factors around a centre": ("resmoe", {"keep": 0.3, "residual": "svd", "solver": "identity"}),
    "resmoe": ("resmoe", {"keep": 0.3, "design": "separate", "solver": "identity"}),
    "resmoe in codes": ("resmoe", {"residual": "quantized:2", "solver": "identity"}),
}


@one_in(5)
@pytest.mark.parametrize("name", METHODS)
def test_a_calibrated_layer_changes_its_outputs_less(layer, name, tmp_path):
    """The same form, chosen for the inputs: less changes in the outputs, although the kernels change more."""
    method = make_method(*METHODS[name])
    source, figures = layer._source, {}
    for way, recorded in {"plain": None, "calibrated": layer.calibration}.items():
        calibration = None
        if recorded is not None:
            text = tmp_path / "text.txt"
            text.write_text("of what the rows are")
            calibration = Calibration((text,), {0: recorded})
        report = compress(source, tmp_path / way, method, calibration=calibration, described={})
        figures[way] = report.layers[0]
    assert figures["plain"].output_error is None
    assert figures["calibrated"].relative_error >= figures["plain"].relative_error
    assert figures["calibrated"].output_error < 0.9 * _output_error(layer, tmp_path / "plain")


def _output_error(layer: SourceLayer, model) -> float:
    """What a model's experts change in the outputs of their matrices: as `output_error` is defined."""
    small, sums = SourceLayer(ModelDirectory(model), 0), np.zeros(2)
    for name in layer.shapes:
        for before, after, moment in zip(layer.kernels(name), small.kernels(name), moments(layer, name), strict=True):
            error = after.astype(np.float64) - before
            sums += np.trace(error.T @ moment @ error), np.trace(before.T @ moment @ before)
    return float(np.sqrt(sums[0] / sums[1]))


@one_in(3)
@pytest.mark.parametrize(
    "method", [("quantize", {"bits": 4, "group_size": 8}), ("svd", {"keep": 0.4})], ids=["codes", "joint factors"]
)
def test_the_error_said_of_a_calibrated_layer_is_that_of_its_outputs(method, layer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("of what the rows are")
    calibration = Calibration((text,), {0: layer.calibration})
    report = compress(layer._source, tmp_path / "out", make_method(*method), calibration=calibration, described={})
    assert report.layers[0].output_error == pytest.approx(_output_error(layer, tmp_path / "out"), rel=1e-3)
