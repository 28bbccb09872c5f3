"""Codes of one bit: each of the three steps against float64 NumPy, and the error that all of them leave."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.compression.coding import binary_codes
from moe_jax.compression.coding.binary_codes import Binary, refined, row_scales, with_group_scales, with_signs
from moe_jax.compression.coding.calibrated_codes import DAMPING, triangular_factor
from moe_jax.compression.coding.coder import LeastOutputError
from tests.support.tiers import long, one_in

GROUP = 8


def drawn(rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, Binary]:
    """A kernel, a second moment of few directions, and codes that are not good."""
    random = np.random.default_rng(seed)
    inputs = random.standard_normal((5 * rows, max(1, rows // 2))) @ random.standard_normal((max(1, rows // 2), rows))
    moment = ((inputs + random.standard_normal(inputs.shape)).T @ inputs).astype(np.float32)
    moment = (moment @ moment.T / np.trace(moment @ moment.T)).astype(np.float32)
    kernel = random.standard_normal((rows, columns)).astype(np.float32)
    signs = random.choice(np.array([-1, 1], np.float32), kernel.shape)
    scales = random.uniform(0.5, 1, (-(-rows // GROUP), columns)).astype(np.float32)
    return kernel, moment, Binary(jnp.asarray(signs), jnp.asarray(random.uniform(0.5, 2, rows), jnp.float32), scales)


def wide(one: Binary) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signs, row scales, and the group scale of every entry, float64."""
    signs, rows, scales = (np.asarray(array, np.float64) for array in one)
    return signs, rows, np.repeat(scales, GROUP, axis=0)[: len(rows)]


def whitened(moment: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """`H^1/2 T`: its squared norm is the change of outputs."""
    values, vectors = np.linalg.eigh(moment.astype(np.float64))
    return (np.sqrt(np.maximum(values, 0))[:, None] * vectors.T) @ terms


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 99))
def test_scales_are_the_least_squares(seed):
    """One system of all unknowns, solved by NumPy."""
    rows, columns = 21, 6
    kernel, moment, now = drawn(rows, columns, seed)
    moment = moment + np.float32(0.05 / rows) * np.eye(rows, dtype=np.float32)
    signs, of_rows, every = wide(now)
    root = whitened(moment, np.eye(rows))
    squares = np.sum((root @ kernel) ** 2)
    of_group = [np.arange(rows) // GROUP == g for g in range(len(now.scales))]
    found = with_group_scales(kernel, moment, now, GROUP, 32)
    assert (np.asarray(found.scales) >= 0).all()
    least = 0.0
    for column in range(columns):
        design = root @ np.stack([np.where(own, of_rows * signs[:, column], 0) for own in of_group], axis=1)
        best = np.linalg.lstsq(design, root @ kernel[:, column], rcond=None)[0]
        least += np.sum((design @ best - root @ kernel[:, column]) ** 2)
    after = np.sum((root @ (kernel - np.asarray(found.numbers(GROUP), np.float64))) ** 2)
    assert abs(after - least) < 1e-4 * squares
    made = every * signs
    design = np.concatenate([root @ np.diag(made[:, column]) for column in range(columns)])
    targets = np.concatenate([root @ kernel[:, column] for column in range(columns)])
    best = np.linalg.lstsq(design, targets, rcond=None)[0]
    found = np.asarray(row_scales(kernel, moment, now, GROUP), np.float64)
    assert abs(np.sum((design @ found - targets) ** 2) - np.sum((design @ best - targets) ** 2)) < 1e-4 * squares


@one_in(2)
@pytest.mark.parametrize("rows", [20, 150])
def test_signs_make_up_for_the_errors_before_them(rows):
    kernel, moment, now = drawn(rows, 5)
    factor = triangular_factor(moment)
    found = np.asarray(with_signs(kernel, factor, now, GROUP).signs)
    _, of_rows, every = wide(now)
    errors, wrong = np.zeros(kernel.shape), 0
    for q in range(rows):
        target = kernel[q] + factor[:q, q].astype(np.float64) / factor[q, q] @ errors[:q]
        expected = np.where(target >= 0, 1, -1)
        sure = np.abs(target) > 1e-4
        np.testing.assert_array_equal(found[q][sure], expected[sure])
        errors[q] = kernel[q] - of_rows[q] * every[q] * found[q]
        wrong += (~sure).sum()
    assert wrong < 5 and (found != np.sign(kernel)).any()


@long
@pytest.mark.parametrize("scale_bits", [16, 8])
def test_refined_codes_change_outputs_less(scale_bits):
    kernel, moment, _ = drawn(40, 24)
    start = LeastOutputError(moment).quantize(kernel, bits=1, group_size=GROUP, row_scales=True, scale_bits=scale_bits)
    made = refined(kernel, start, moment, group_size=GROUP, scale_bits=scale_bits)
    assert {name: leaf.shape for name, leaf in made.leaves.items()} == {
        name: leaf.shape for name, leaf in start.leaves.items()
    }
    damped = moment.astype(np.float64) + DAMPING * np.diagonal(moment).mean() * np.eye(len(moment))

    def error(approximation: np.ndarray) -> float:
        return float(np.sum(whitened(damped, kernel - approximation.astype(np.float64)) ** 2))

    assert error(made.approximation) < 0.9 * error(start.approximation)


@long
def test_what_only_harms_is_left_out(monkeypatch):
    kernel, moment, _ = drawn(16, 6)
    start = LeastOutputError(moment).quantize(kernel, bits=1, group_size=GROUP, row_scales=True)
    harmed = lambda kernel, moment, now, *rest: now._replace(signs=-now.signs)  # noqa: E731
    for name in ("_with_row_scales", "with_group_scales", "with_signs"):
        monkeypatch.setattr(binary_codes, name, harmed)
    made = refined(kernel, start, moment, group_size=GROUP, scale_bits=16)
    np.testing.assert_array_equal(made.leaves["codes"], start.leaves["codes"])
    np.testing.assert_allclose(made.approximation, start.approximation, rtol=1e-5)
