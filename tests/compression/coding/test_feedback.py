"""Codes chosen one row after another: GPTQ's update, and what it is for."""

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.compression.coding.calibrated_codes import (
    DAMPING,
    order_of_inputs,
    quantize_in_order,
    quantize_with_feedback,
    triangular_factor,
)
from moe_jax.compression.coding.coder import LeastError, LeastOutputError
from moe_jax.compression.coding.quantizer import quantize
from moe_jax.core.code_options import TABLE_BITS
from moe_jax.core.errors import InputError
from moe_jax.experts.forms.quantized import Quantized
from tests.experts.code_reference import decoded
from tests.support.tiers import examples, one_in


def moment_of(rows: int, seed: int, samples: int | None = None) -> np.ndarray:
    """Of inputs that are correlated and of different sizes."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((samples or 4 * rows, rows)) @ random.standard_normal((rows, rows))
    inputs = mixed * random.uniform(0.1, 3, rows)
    return (inputs.T @ inputs / len(inputs)).astype(np.float32)


def damped(moment: np.ndarray) -> np.ndarray:
    wide = moment.astype(np.float64)
    return wide + DAMPING * np.mean(np.diagonal(wide)) * np.eye(len(wide))


def output_error(error: np.ndarray, moment: np.ndarray) -> float:
    wide = error.astype(np.float64)
    return float(np.trace(wide.T @ moment.astype(np.float64) @ wide))


def gptq(kernel: np.ndarray, moment: np.ndarray, rounded) -> np.ndarray:
    """GPTQ as published, by the inverse of H itself: after each row the others are moved, and H loses the row.

    Args:
      kernel: [i, o].
      moment: H, without damping.
      rounded: `rounded(row, index)`: a row as codes can say it.
    """
    left, inverse = kernel.astype(np.float64).copy(), np.linalg.inv(damped(moment))
    out = np.empty_like(left)
    for q in range(len(left)):
        out[q] = rounded(left[q], q)
        error = (left[q] - out[q]) / inverse[q, q]
        left -= np.outer(inverse[:, q], error)
        inverse -= np.outer(inverse[:, q], inverse[q]) / inverse[q, q]
    return out


@settings(max_examples=examples(10))
@given(
    seed=st.integers(0, 1000),
    rows=st.sampled_from((1, 13, 40)),
    bits=st.sampled_from((4, 3, 2, 1)),
    group_size=st.sampled_from((None, 8, 16)),
    table=st.booleans(),
)
def test_is_gptq_with_the_same_scales(seed: int, rows: int, bits: int, group_size: int | None, table: bool) -> None:
    """Given the scales that we choose, every code is that of the published update; but for ties of rounding."""
    kernel = np.random.default_rng(seed).standard_normal((rows, 3)).astype(np.float32)
    moment = moment_of(rows, seed)
    table = table and bits in TABLE_BITS
    made = quantize_with_feedback(kernel, triangular_factor(moment), bits=bits, group_size=group_size, table=table)
    scales = np.asarray(made.scales, np.float64)

    def rounded(row: np.ndarray, index: int) -> np.ndarray:
        scale = np.broadcast_to(scales[0 if group_size is None else index // group_size], row.shape)
        unit = np.where(scale == 0, 1, scale)
        levels = 2 * np.arange(2**bits)[:, None] - (2**bits - 1) - (scale < 0)
        if table:
            levels = np.repeat(np.asarray(made.leaves["table"], np.float64)[:, None], len(scale), 1)
        nearest = np.argmin(np.abs(row - levels * unit), axis=0)
        return np.take_along_axis(levels, nearest[None], 0)[0] * scale

    expected = gptq(kernel, moment, rounded)
    differ = np.abs(np.asarray(made.approximation) - expected).max(axis=0) > 1e-3
    # A tie that float32 breaks the other way changes the rest of its column; hardly any column has one.
    assert differ.sum() <= 1
    best, ours = (output_error(kernel - q, damped(moment)) for q in (expected, np.asarray(made.approximation)))
    assert ours == pytest.approx(best, rel=1e-3 if not differ.any() else 0.2)


@settings(max_examples=examples(6))
@given(seed=st.integers(0, 1000), rows=st.sampled_from((13, 40)), bits=st.sampled_from((8, 4, 3)), zeros=st.booleans())
def test_in_order_is_gptq_of_the_rows_in_that_order(seed: int, rows: int, bits: int, zeros: bool) -> None:
    """Given the scales and zero points that were chosen before, every code is that of the published update."""
    kernel, moment = np.random.default_rng(seed).standard_normal((rows, 3)).astype(np.float32), moment_of(rows, seed)
    order = order_of_inputs(moment)
    assert (np.diff(np.diagonal(moment)[order]) <= 0).all()
    factor = triangular_factor(moment[np.ix_(order, order)])
    made = quantize_in_order(
        kernel, factor, order, bits=bits, group_size=8, even=not zeros, zero_points=zeros, whole_zeros=zeros
    )
    scales = np.repeat(np.asarray(made.scales, np.float64), 8, axis=0)[:rows]
    offset = (2**bits - 1 + (scales < 0)) / 2
    if zeros:
        stored = np.asarray(made.leaves["zeros"])
        assert not (stored % (1 << (8 - bits))).any() and stored.min() >= 1 << (8 - bits)
        offset = np.repeat(stored / (1 << (8 - bits)), 8, axis=0)[:rows].astype(np.float64)

    def rounded(row: np.ndarray, index: int) -> np.ndarray:
        scale, middle = scales[order[index]], offset[order[index]]
        levels = 2 * (np.arange(2**bits)[:, None] - middle) * scale
        return np.take_along_axis(levels, np.argmin(np.abs(row - levels), axis=0)[None], 0)[0]

    expected = np.empty_like(kernel, np.float64)
    expected[order] = gptq(kernel[order], moment[np.ix_(order, order)], rounded)
    differ = np.abs(np.asarray(made.approximation) - expected).max(axis=0) > 1e-3
    assert differ.sum() <= 1  # ties, as above


def test_in_order_changes_outputs_less() -> None:
    """Where inputs are of very different sizes, and scales have to be those of whole groups all the same."""
    kernel, moment = np.random.default_rng(0).standard_normal((128, 48)).astype(np.float32), moment_of(128, 2)
    sizes = np.exp(np.random.default_rng(1).standard_normal(128)).astype(np.float32)
    moment *= np.outer(sizes, sizes)
    errors = [
        output_error(kernel - coder.quantize(kernel, bits=4, group_size=32).approximation, moment)
        for coder in (LeastOutputError(moment, even=True), LeastOutputError(moment, even=True, in_order=True))
    ]
    assert errors[1] < 0.8 * errors[0]


def test_factor_is_upper_triangular_and_of_the_damped_moment() -> None:
    moment = moment_of(24, 0)
    factor = triangular_factor(moment).astype(np.float64)
    assert not np.tril(factor, -1).any()
    np.testing.assert_allclose(factor @ factor.T, damped(moment), rtol=1e-4, atol=1e-4 * np.abs(moment).max())


def test_singular_moments_have_a_factor_and_others_are_refused() -> None:
    few = moment_of(40, 1, samples=3)
    assert np.isfinite(triangular_factor(few)).all()
    np.testing.assert_array_equal(triangular_factor(np.zeros((3, 3), np.float32)), np.eye(3))
    with pytest.raises(InputError, match="not positive semi-definite"):
        triangular_factor(np.array([[1, 5], [5, 1]], np.float32))


@one_in(3)
@pytest.mark.parametrize(("bits", "zero_points"), [(4, False), (4, True), (3, False), (2, True), (1, False)])
def test_feedback_knows_the_scales_and_zero_points_that_are_read(bits: int, zero_points: bool) -> None:
    """Columns of very different sizes, and what is read is what the next rows made up for."""
    columns = np.exp(np.random.default_rng(1).standard_normal(8))
    kernel = (np.random.default_rng(0).standard_normal((40, 8)) * columns).astype(np.float32)
    moment = moment_of(40, 2)
    eight, plain = (
        LeastOutputError(moment).quantize(kernel, bits=bits, group_size=8, **more)
        for more in ({"scale_bits": 8, "zero_points": zero_points}, {})
    )
    form = Quantized(bits=bits, group_size=8, scale_bits=8, zero_points=zero_points)
    np.testing.assert_allclose(eight.approximation, decoded(eight.leaves, form, 40), rtol=1e-6, atol=1e-7)
    ours, others = (output_error(kernel - made.approximation, moment) for made in (eight, plain))
    assert ours < 1.1 * others


@one_in(3)
@pytest.mark.parametrize("bits", [4, 3, 2, 1])
def test_changes_outputs_less_than_rounding(bits: int) -> None:
    kernel = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    moment = moment_of(64, 2)
    plain, ours = (
        output_error(kernel - coder.quantize(kernel, bits=bits, group_size=32).approximation, moment)
        for coder in (LeastError(), LeastOutputError(moment))
    )
    assert ours < 0.8 * plain


@one_in(2, first=1)
@pytest.mark.parametrize("table", [False, True])
def test_white_inputs_make_it_plain_rounding(table: bool) -> None:
    """Nothing can be made up for: inputs that are not correlated leave every row alone."""
    kernel = np.random.default_rng(3).standard_normal((32, 8)).astype(np.float32)
    plain = LeastError().quantize(kernel, bits=3, group_size=16, table=table)
    ours = LeastOutputError(np.eye(32, dtype=np.float32)).quantize(kernel, bits=3, group_size=16, table=table)
    assert plain.leaves.keys() == ours.leaves.keys() and ("table" in plain.leaves) == table
    for name, leaf in plain.leaves.items():
        np.testing.assert_array_equal(leaf, ours.leaves[name])
    np.testing.assert_allclose(plain.approximation, ours.approximation, atol=1e-6)


def test_factors_change_outputs_least() -> None:
    """Against the best factors for the damped moment, from its square root in float64 (Eckart and Young)."""
    kernel = np.random.default_rng(4).standard_normal((40, 24)).astype(np.float32)
    moment = moment_of(40, 5)
    left, right = LeastOutputError(moment).factors(kernel, 6)
    values, vectors = np.linalg.eigh(damped(moment))
    root = vectors * np.sqrt(values) @ vectors.T
    least = np.linalg.svd(root @ kernel.astype(np.float64), compute_uv=False)[6:]
    assert output_error(kernel - left @ right.T, damped(moment)) == pytest.approx(np.sum(least**2), rel=1e-3)
    plain_left, plain_right = LeastError().factors(kernel, 6)
    assert output_error(kernel - plain_left @ plain_right.T, moment) > 1.1 * np.sum(least**2)


@pytest.mark.parametrize("feedback", [True, False])
def test_where_no_input_was_seen_all_count_alike(feedback) -> None:
    kernel = np.random.default_rng(5).standard_normal((32, 8)).astype(np.float32)
    ours = LeastOutputError(np.zeros((32, 32), np.float32), feedback=feedback)
    plain = LeastError().quantize(kernel, bits=4, group_size=16)
    np.testing.assert_array_equal(ours.quantize(kernel, bits=4, group_size=16).codes, plain.codes)
    assert (ours.importances == 1).all()


@pytest.mark.parametrize("group_size", [16, None])
def test_rows_count_by_the_size_of_their_inputs_when_scales_are_chosen(group_size) -> None:
    """Inputs that are not correlated: the error of a row counts H_ii times, and no row makes up for another."""
    kernel = np.random.default_rng(6).standard_t(2, (32, 8)).astype(np.float32)
    sizes = np.exp(np.random.default_rng(7).standard_normal(32)).astype(np.float32)
    ours = quantize_with_feedback(kernel, np.diag(sizes), bits=2, group_size=group_size)
    same, other = (quantize(kernel, bits=2, group_size=group_size, weights=sizes**power) for power in (2, 1))
    np.testing.assert_array_equal(ours.leaves["scales"], same.leaves["scales"])
    assert (np.asarray(ours.leaves["scales"]) != np.asarray(other.leaves["scales"])).any()


def test_what_rounding_makes_indefinite_is_tried_in_more_precision(monkeypatch) -> None:
    moment = moment_of(8, 0)
    exact = triangular_factor(moment)
    cholesky, tried = scipy.linalg.cholesky, []

    def refuses_float32(matrix, **options):
        tried.append(matrix.dtype)
        if matrix.dtype == np.float32:
            raise scipy.linalg.LinAlgError
        return cholesky(matrix, **options)

    monkeypatch.setattr(scipy.linalg, "cholesky", refuses_float32)
    np.testing.assert_allclose(triangular_factor(moment), exact, rtol=1e-3, atol=1e-4)
    assert tried == [np.float32, np.float64]
