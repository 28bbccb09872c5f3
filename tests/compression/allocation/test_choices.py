"""Errors by which `allocate` chooses, against plain references in float64."""

import numpy as np
import pytest

from moe_jax.compression.coding.coder import LeastError, LeastOutputError, expert_coders, shared_base_coder
from moe_jax.compression.methods.choices import (
    CHOICES,
    FACTORED,
    TOKENS,
    Choice,
    Together,
    _errors_in_codes,
    _left,
    errors_of_choices,
    rank_of,
    together,
)
from moe_jax.compression.source_layer import SourceLayer, aligned_kernels, mean_kernel, unaligned
from moe_jax.model_io.model_dir import ModelDirectory
from tests.compression.methods.recorded_layers import recorded
from tests.support.moe_models import MemorySource
from tests.support.tiers import one_in

SEPARATELY = Together(centre=1.0, residuals=1.0)


def in_groups(bits, added=()):
    return {"group_size": 8, "table": False, "scale_bits": 16} | dict.fromkeys(added, True)


@pytest.fixture(scope="module")
def source(models):
    return ModelDirectory(models["moe"])


@pytest.fixture(scope="module")
def layer(source):
    return SourceLayer(source, 0, calibration=recorded(source, tokens=200))


@pytest.fixture(scope="module")
def orders(layer):
    """Some order of the neurons of every expert."""
    random = np.random.default_rng(3)
    return np.stack([random.permutation(order) for order in unaligned(layer)])


def squared(moment, error) -> float:
    wide = np.asarray(error, np.float64)
    return float(np.trace(wide.T @ moment.astype(np.float64) @ wide))


@pytest.mark.parametrize("scale_bits", [16, 8])
def test_residuals_in_codes_have_the_errors_that_each_has_alone(scale_bits):
    """Of very different sizes, which matters where columns share steps of scales."""
    random = np.random.default_rng(0)
    residuals = [(size * random.standard_normal((16, 3))).astype(np.float32) for size in (1, 100, 10_000)]
    coder = LeastOutputError(np.diag(random.uniform(1, 2, 16)).astype(np.float32))
    options = in_groups(2) | {"scale_bits": scale_bits}
    found = _errors_in_codes(coder, residuals, 2, options)
    for residual, error in zip(residuals, found, strict=True):
        made = coder.quantize(residual, bits=2, **options).approximation
        assert error == pytest.approx(squared(coder.moment, made - residual), rel=1e-4)


@one_in(2, first=1)
@pytest.mark.parametrize("name", ["up", "down"])
def test_errors_of_codes_and_of_factors(layer, orders, name):
    """All columns are tried in so small a layer: what is written is what was tried, but for the error of a centre,
    of which factors take up some."""
    choices = [Choice(None, 3), Choice(4, 2), Choice(8, None, keep=0.3), Choice(2, None, keep=0.3)]
    found = errors_of_choices(layer, name, orders, choices, in_groups, SEPARATELY)
    kernels = [kernel.astype(np.float32) for kernel in aligned_kernels(layer, name, orders)]
    mean, coders = mean_kernel(iter(kernels)), list(expert_coders(layer, name, orders))
    norm = sum(squared(coder.moment, kernel) for coder, kernel in zip(coders, kernels, strict=True))
    rounded = np.asarray(LeastError().quantize(mean, bits=4, **in_groups(4)).approximation)
    rank = rank_of(layer, 0.3)
    for expert, (kernel, coder) in enumerate(zip(kernels, coders, strict=True)):
        plain = coder.quantize(kernel, bits=3, **in_groups(3)).approximation
        around = coder.quantize(kernel - rounded, bits=2, **in_groups(2)).approximation
        assert found[expert, 0] == pytest.approx(squared(coder.moment, plain - kernel) / norm, rel=1e-3)
        assert found[expert, 1] == pytest.approx(squared(coder.moment, around + rounded - kernel) / norm, rel=1e-3)
        for number, bits, least in ((2, 8, 0.9), (3, 2, 0.6)):
            of_all = shared_base_coder(layer, name, orders)
            centre = np.asarray(of_all.quantize(mean, bits=bits, **in_groups(bits)).approximation)
            left, right = coder.factors(kernel - centre, rank)
            written = squared(coder.moment, left @ right.T + centre - kernel) / norm
            assert least * found[expert, number] < written < 1.02 * found[expert, number]


def test_the_centre_has_the_moments_of_all_experts(layer, orders):
    for name in layer.shapes:
        summed = sum(coder.moment.astype(np.float64) for coder in expert_coders(layer, name, orders))
        np.testing.assert_allclose(shared_base_coder(layer, name, orders).moment, summed, rtol=1e-5, atol=1e-4)


def test_the_spectrum_is_what_factors_take_from_the_error(layer):
    (coder, *_), kernel = expert_coders(layer, "up"), np.asarray(next(layer.kernels("up")), np.float32)
    damped = coder.moment + 0.01 * np.mean(np.diagonal(coder.moment)) * np.eye(len(coder.moment))
    values, norm = coder.spectrum(kernel, 3)
    assert norm == pytest.approx(squared(damped, kernel), rel=1e-4)
    left, right = coder.factors(kernel, 3)
    assert norm - np.sum(values.astype(np.float64) ** 2) == pytest.approx(
        squared(damped, kernel - left @ right.T), rel=1e-3
    )


def test_factors_of_more_ranks_leave_less():
    """From one decomposition for all of them."""

    class Decomposed:
        def __init__(self, norm):
            self.norm, self.ranks = norm, []

        def spectrum(self, residual, rank):
            self.ranks.append(rank)
            return np.float32([3, 2, 1, 0.5])[:rank], self.norm

    coder = Decomposed(20.0)
    assert _left(coder, None, {0.1: 1, 0.2: 3}) == {0.1: pytest.approx(11 / 20), 0.2: pytest.approx(6 / 20)}
    assert coder.ranks == [3]
    assert _left(Decomposed(13.999), None, {0.2: 3}) == {0.2: 0.0}  # rounding leaves nothing below zero
    assert _left(Decomposed(0.0), None, {0.1: 1}) == {0.1: 0.0}


def test_what_errors_are_together(layer, orders):
    """Against every expert on its own in float64."""
    found = together(layer, orders)
    rows, random = layer.rows, np.random.default_rng(0)
    picked = np.linspace(0, len(rows.experts) - 1, min(TOKENS, len(rows.experts))).astype(int)
    x = np.asarray(rows.inputs[picked], np.float64)
    weights = np.stack(
        [np.where(rows.experts[picked] == e, rows.weights[picked], 0).sum(axis=1) for e in range(layer.num_experts)], 1
    ).astype(np.float64)
    own = {name: np.stack(list(aligned_kernels(layer, name, orders))).astype(np.float64) for name in layer.shapes}
    means = {name: kernels.mean(axis=0) for name, kernels in own.items()}

    def outputs(expert, *merged):
        gate, up, down = (means[name] if name in merged else own[name][expert] for name in ("gate", "up", "down"))
        into = x @ gate
        return weights[:, expert, None] * ((into / (1 + np.exp(-into)) * (x @ up)) @ down)

    experts = range(layer.num_experts)
    lost = sum(outputs(expert, *own) - outputs(expert) for expert in experts)
    alone = sum(np.sum((outputs(expert, name) - outputs(expert)) ** 2) for expert in experts for name in own)
    assert found.residuals == pytest.approx(np.sum(lost**2) / alone, rel=1e-4)
    # An error of `down` in the centre, which is linear in it.
    error = random.standard_normal(own["down"].shape[1:])
    hidden = random.standard_normal((len(x), len(error)))
    every = [weights[:, expert, None] * (hidden @ error) for expert in experts]
    assert found.centre == pytest.approx(np.sum(sum(every) ** 2) / sum(np.sum(one**2) for one in every), rel=0.1)


def test_experts_that_are_alike_have_a_finite_share(source):
    """Where there is nothing but rounding to lose."""
    leaves = {path: source.read(path) for path in source.specs()}
    for path, leaf in leaves.items():
        if "/mlp/experts/" in path:
            leaves[path] = np.broadcast_to(leaf[:1], leaf.shape).copy()
    alike = MemorySource(source.config, leaves)
    layer = SourceLayer(alike, 0, calibration=recorded(alike, tokens=50))
    found = together(layer, unaligned(layer))
    assert 0 < found.residuals <= layer.moe.top_k * len(layer.shapes) and 1 < found.centre <= layer.moe.top_k


def test_one_expert_for_a_token_has_errors_of_its_own(source):
    calibration = recorded(source, tokens=50)
    one = calibration.rows._replace(experts=calibration.rows.experts[:, :1], weights=calibration.rows.weights[:, :1])
    layer = SourceLayer(source, 0, calibration=calibration._replace(rows=one))
    assert together(layer, unaligned(layer)).centre == pytest.approx(1.0)


def test_formats_are_what_matrices_of_an_expert_have_in_common():
    assert Choice(4, 2).format == Choice(None, 3).format != Choice(4, None, keep=0.1).format
    assert Choice(4, 2, ("zero_points",)).format != Choice(4, 2).format


def test_what_is_tried():
    """Everything once; and codes of what is left of a centre are no larger than its own, or it would be none."""
    assert len({*CHOICES}) == len(CHOICES) and len({*FACTORED}) == len(FACTORED)
    centres = {centre for centre, _ in CHOICES if centre is not None}
    for centre in centres:
        own = [bits for of, bits in CHOICES if of == centre]
        assert own == [*range(own[0], own[-1] + 1)] and 1 < len(own)
        assert own[-1] <= min(centre, 4)
    assert {centre for centre, _ in FACTORED} == centres == {bits for centre, bits in CHOICES if centre is None}
