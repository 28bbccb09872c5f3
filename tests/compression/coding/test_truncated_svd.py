"""The truncated SVD against NumPy's, on both of its paths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.compression.coding import factorization as module
from moe_jax.compression.coding.factorization import largest_singular_values, truncated_svd
from tests.support.tiers import one_in


def error(matrix: np.ndarray, found: module.TruncatedSVD) -> float:
    return float(np.linalg.norm(matrix.astype(np.float64) - (found.u * found.s).astype(np.float64) @ found.v.T))


def least_error(matrix: np.ndarray, rank: int) -> float:
    values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    return float(np.sqrt((values[rank:] ** 2).sum()))


def check_orthonormal(found: module.TruncatedSVD) -> None:
    rank = len(found.s)
    np.testing.assert_allclose(found.u.T @ found.u, np.eye(rank), atol=1e-5)
    np.testing.assert_allclose(found.v.T @ found.v, np.eye(rank), atol=1e-5)
    assert (np.diff(found.s) <= 0).all()


def check_same_values(matrix: np.ndarray, found: module.TruncatedSVD) -> None:
    values = largest_singular_values(matrix, len(found.s))
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, found.s, rtol=1e-5, atol=1e-6 * found.s[0])


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), shape=st.tuples(st.integers(1, 30), st.integers(1, 30)), share=st.floats(0.01, 1))
def test_small_matrices_are_decomposed_as_numpy_does(seed, shape, share):
    matrix = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    rank = max(1, round(share * min(shape)))
    found = truncated_svd(matrix, rank)
    assert (found.u.shape, found.v.shape) == ((shape[0], rank), (shape[1], rank))
    assert {part.dtype for part in found} == {np.dtype(np.float32)}
    np.testing.assert_allclose(found.s, np.linalg.svd(matrix, compute_uv=False)[:rank], rtol=1e-4, atol=1e-5)
    assert error(matrix, found) == pytest.approx(least_error(matrix, rank), rel=1e-4, abs=2e-5)
    check_same_values(matrix, found)


SPECTRA = {
    "gaussian": None,
    "slow decay": lambda k: k**-0.7,
    "fast decay": lambda k: np.exp(-k / 9.0) + 1e-4,
    "flat": np.ones_like,
    "steps": lambda k: np.where(k <= 12, 1.0, 1e-3),
}


@one_in(5)
@pytest.mark.parametrize("shape", [(180, 220), (220, 180)])
@pytest.mark.parametrize("name", SPECTRA)
def test_large_matrices_are_within_a_thousandth_of_the_least_error(name, shape, monkeypatch):
    monkeypatch.setattr(module, "EXACT_UP_TO", 32)
    matrix = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    if SPECTRA[name] is not None:
        u, s, vt = np.linalg.svd(matrix, full_matrices=False)
        matrix = ((u * SPECTRA[name](np.arange(1, len(s) + 1.0))) @ vt).astype(np.float32)
    for rank in (1, 12, 30):
        found = truncated_svd(matrix, rank)
        check_orthonormal(found)
        assert error(matrix, found) <= 1.001 * least_error(matrix, rank)
        check_same_values(matrix, found)
    again = truncated_svd(matrix, rank)
    assert all(np.array_equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("shape", [(20, 30), (150, 200)])
def test_what_has_the_rank_already_is_found_exactly(shape, monkeypatch):
    monkeypatch.setattr(module, "EXACT_UP_TO", 32)
    random = np.random.default_rng(0)
    matrix = (random.standard_normal((shape[0], 3)) @ random.standard_normal((3, shape[1]))).astype(np.float32)
    found = truncated_svd(matrix, 5)
    assert error(matrix, found) <= 1e-5 * np.linalg.norm(matrix)
    assert not largest_singular_values(np.zeros(shape, np.float32), 2).any()
    zeros = truncated_svd(np.zeros(shape, np.float32), 2)
    assert not zeros.s.any() and np.isfinite(zeros.u).all() and np.isfinite(zeros.v).all()
