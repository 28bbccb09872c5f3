"""Scales of rows beside those of groups: what is stored, and that it is worth it where rows differ."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.compression.coding.calibrated_codes import best_row_scales, candidates, scales_of_magnitudes
from moe_jax.compression.coding.coder import LeastError, LeastOutputError
from moe_jax.compression.coding.quantizer import quantize
from moe_jax.experts.forms import Quantized
from tests.experts.code_reference import decoded
from tests.support.tiers import examples, one_in


def second_moment(size: int, seed: int) -> np.ndarray:
    """Of inputs some of which are much larger than others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4 * size, size)) * np.exp(1.5 * rng.standard_normal(size))
    return (x.T @ x / len(x)).astype(np.float32)


def output_error(error: np.ndarray, moment: np.ndarray) -> float:
    return float(np.sum(error * (moment @ error), dtype=np.float64))


@settings(max_examples=examples(10), deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.sampled_from((1, 13, 40)),
    bits=st.sampled_from((4, 2, 1)),
    more=st.sampled_from(({}, {"scale_bits": 8}, {"zero_points": True}, {"table": True})),
    calibrated=st.sampled_from((None, False, True)),
)
def test_what_is_stored_is_what_is_reported(seed, rows, bits, more, calibrated):
    if bits == 1 and "table" in more:
        more = {}
    kernel = np.random.default_rng(seed).standard_normal((rows, 5)).astype(np.float32)
    coder = LeastError() if calibrated is None else LeastOutputError(second_moment(rows, seed), feedback=calibrated)
    options = {"bits": bits, "group_size": 16, "row_scales": True, **more}
    made, form = coder.quantize(kernel, **options), Quantized(**options)
    assert made.leaves["row_scales"].shape == (rows, 1) and made.leaves["row_scales"].dtype == "bfloat16"
    np.testing.assert_allclose(made.approximation, decoded(made.leaves, form, rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("group_size", [16, None])
def test_signs_times_rows_times_columns_are_found_again(group_size):
    rng = np.random.default_rng(0)
    columns = 1 if group_size is None else np.exp(rng.standard_normal(24))
    rows = np.exp(rng.standard_normal((32, 1)))
    kernel = (rng.choice([-1, 1], (32, 24)) * rows * columns).astype(np.float32)
    plain, ours = (
        LeastError().quantize(kernel, bits=1, group_size=group_size, row_scales=row_scales).approximation
        for row_scales in (False, True)
    )
    # Both scales are rounded to eight bits of mantissa.
    np.testing.assert_allclose(ours, kernel, rtol=0.012)
    assert np.sum((plain - kernel) ** 2) > 0.1 * np.sum(kernel**2)


def test_scales_of_magnitudes_are_those_of_the_best_matrix_of_rank_one():
    kernel = np.random.default_rng(0).standard_normal((40, 30)).astype(np.float32)
    made = LeastError().quantize(kernel, bits=1, group_size=40, row_scales=True)
    best = np.sum(np.linalg.svd(np.abs(kernel), compute_uv=False)[1:] ** 2)
    assert best <= np.sum((made.approximation - kernel) ** 2) <= 1.001 * best


@one_in(3)
@pytest.mark.parametrize("bits", [4, 3, 2, 1])
@pytest.mark.parametrize("feedback", [False, True])
def test_large_inputs_and_rows_of_different_sizes_are_coded_better(bits, feedback):
    rng, moment = np.random.default_rng(0), second_moment(64, 1)
    kernel = (rng.standard_normal((64, 48)) * np.exp(0.5 * rng.standard_normal((64, 1)))).astype(np.float32)
    coder = LeastOutputError(moment, feedback=feedback)
    plain, ours = (
        output_error(coder.quantize(kernel, bits=bits, group_size=32, row_scales=each).approximation - kernel, moment)
        for each in (False, True)
    )
    # The choice is made by this very error.
    assert ours < 0.98 * plain


def test_inputs_and_rows_that_are_never_there_do_no_harm():
    kernel = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
    kernel[3] = 0
    moment = second_moment(16, 0)
    moment[5] = moment[:, 5] = 0
    for scales in candidates(kernel, 8, moment):
        assert np.isfinite(scales).all() and (scales > 0).all()
    np.testing.assert_array_equal(scales_of_magnitudes(np.zeros((4, 3), np.float32), 2), 1)
    made = LeastOutputError(np.zeros((16, 16), np.float32)).quantize(kernel, bits=1, group_size=8, row_scales=True)
    assert np.isfinite(made.approximation).all()
    rounded = LeastError().quantize(kernel, bits=1, group_size=8, row_scales=True).approximation
    assert np.abs(rounded[3]).max() < 1e-5


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_error_of_a_row_counts_as_large_as_its_scale_makes_it(calibrated):
    """Scales that rows share are those of the least error of the kernel, and not of what row scales leave of it."""
    rng = np.random.default_rng(0)
    rows = np.array([100, 1, 1, 1, 1, 1, 1, 1], np.float32)
    left = rng.standard_t(2, (8, 64)).astype(np.float32)
    diagonal = np.linspace(1, 2, 8, dtype=np.float32) if calibrated else np.ones(8, np.float32)
    coder = LeastOutputError(np.diag(diagonal), feedback=False) if calibrated else LeastError()
    options = {"bits": 2, "group_size": 8}

    def error(approximation: np.ndarray) -> float:
        difference = rows[:, None] * (np.asarray(approximation) - left)
        return float(np.sum(diagonal[:, None] * difference**2, dtype=np.float64))

    others = [error(quantize(left, weights=diagonal * rows**power, **options).approximation) for power in (0, 1)]
    assert error(coder._quantized(left, rows, options).approximation) < 0.99 * min(others)


def test_row_scales_are_those_of_the_candidates_that_change_outputs_least():
    rng, moment = np.random.default_rng(2), second_moment(24, 3)
    kernel = (rng.standard_normal((24, 12)) * np.exp(rng.standard_normal((24, 1)))).astype(np.float32)

    def coded(values: np.ndarray, _: np.ndarray) -> np.ndarray:
        step = np.abs(values).max(axis=0) / 4
        return np.round(values / step) * step

    def cost(scales: np.ndarray, moment: np.ndarray) -> float:
        return output_error(coded(kernel / scales[:, None], scales) * scales[:, None] - kernel, moment)

    every = list(candidates(kernel, None, moment))
    # None, those of the entries, and ten powers of the inputs' sizes, of which the last is the first.
    assert len(every) == 12 and (every[0] == 1).all()
    sizes = 1 / np.sqrt(np.diagonal(moment))
    np.testing.assert_allclose(every[-1], sizes / np.exp(np.log(sizes).mean()), rtol=0.01)
    found = best_row_scales(kernel, None, moment, coded)
    assert cost(found, moment) == min(cost(scales, moment) for scales in every)
    assert cost(found, np.eye(24)) > min(cost(scales, np.eye(24)) for scales in every)
