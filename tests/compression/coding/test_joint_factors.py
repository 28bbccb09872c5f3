"""Factors of all matrices of an expert at once, against a plain search in float64 for the least change of outputs."""

from collections.abc import Mapping

import numpy as np
import pytest
import scipy.linalg

from moe_jax.compression.coding.calibrated_codes import DAMPING
from moe_jax.compression.coding.coder import LeastJointError
from moe_jax.compression.coding.factorization import descent, design_of, joint_factors, outputs_of
from moe_jax.core.errors import InputError
from tests.support.tiers import one_in

F, D, RANK = 48, 20, 9

Matrices = Mapping[str, np.ndarray]


def drawn(seed: int, *, gated: bool = True) -> dict[str, np.ndarray]:
    """An expert with a row for each neuron; singular values fall off, and sizes of matrices and neurons differ."""
    random, made = np.random.default_rng(seed), {}
    for size, name in enumerate(("gate", "up", "down") if gated else ("up", "down")):
        left, right = (np.linalg.qr(random.standard_normal((n, D)))[0] for n in (F, D))
        made[name] = ((2.0**size * left * (1 + np.arange(D)) ** -0.5) @ right.T).astype(np.float32)
    return made


def activations(size: int, seed: int, *, tokens: int = 500, spread: float = 0.5) -> np.ndarray:
    """The second moment of activations of which some are large, and all are about a mean; float32."""
    random = np.random.default_rng(seed)
    scales = np.exp(spread * random.standard_normal(size))
    x = random.standard_normal((tokens, size)) @ random.standard_normal((size, size)) + 3 * random.standard_normal(size)
    return ((x * scales).T @ (x * scales)).astype(np.float32)


MOMENTS = {
    "of activations": (activations(D, 0), activations(F, 1)),
    "of few large activations": (activations(D, 7, spread=1.0), activations(F, 8, spread=1.0)),
    "singular": (activations(D, 2, tokens=3), activations(F, 3, tokens=5)),
    "small": (activations(D, 4) * np.float32(1e-25), activations(F, 5) * np.float32(1e-30)),
    "of no hidden activations": (activations(D, 6), np.zeros((F, F), np.float32)),
    "of nothing": (np.zeros((D, D), np.float32), np.zeros((F, F), np.float32)),
}


def damped(moment: np.ndarray) -> np.ndarray:
    wide = moment.astype(np.float64)
    level = np.mean(np.diagonal(wide))
    return wide / level + DAMPING * np.eye(len(wide)) if level else np.eye(len(wide))


def output_error(rows: Matrices, made: Matrices, moments, kernels: Matrices | None = None) -> float:
    """Relative squared errors of the outputs, the mean over the matrices: each kernel with its inputs, float64."""
    errors = []
    for name, matrix in (rows if kernels is None else kernels).items():
        # As they are applied: [in, out], inputs being neurons for `down` alone.
        of_inputs = damped(moments[1] if name == "down" else moments[0])
        apart = rows[name].astype(np.float64) - made[name]
        error, kernel = (m if name == "down" else m.T for m in (apart, matrix.astype(np.float64)))
        errors.append(np.trace(error.T @ of_inputs @ error) / np.trace(kernel.T @ of_inputs @ kernel))
    return float(np.mean(errors))


def products(factors) -> dict[str, np.ndarray]:
    left, right = factors
    return {name: left.astype(np.float64) @ own.astype(np.float64).T for name, own in right.items()}


def least_error(rows: Matrices, moments, kernels: Matrices, seed: int, rounds: int = 400) -> float:
    """By alternating least squares from a random L, each step solved by decompositions of whole moments."""
    of_inputs, of_hidden = map(damped, moments)
    root = scipy.linalg.cholesky(of_inputs, lower=True)
    values, vectors = np.linalg.eigh(of_hidden)
    into, down = [], np.zeros(0)
    for name, matrix in rows.items():
        kernel, wide = kernels[name].astype(np.float64), matrix.astype(np.float64)
        if name == "down":
            down = vectors.T @ wide / np.sqrt(np.trace(kernel.T @ of_hidden @ kernel) * len(rows))
        else:
            into.append(vectors.T @ wide @ root / np.linalg.norm(kernel @ root) / np.sqrt(len(rows)))
    seen, weights, error = np.concatenate(into, axis=1), np.sqrt(values)[:, None], np.inf
    left = np.random.default_rng(seed).standard_normal((F, RANK))
    for _ in range(rounds):
        right = np.linalg.lstsq(left, seen, rcond=None)[0]
        right_down = np.linalg.lstsq(weights * left, weights * down, rcond=None)[0]
        error = np.sum((seen - left @ right) ** 2) + np.sum((weights * (down - left @ right_down)) ** 2)
        target = seen @ right.T + values[:, None] * (down @ right_down.T)
        # In the eigenvectors of S, each row of L has a system of its own.
        systems = right @ right.T + values[:, None, None] * (right_down @ right_down.T)
        left = np.linalg.solve(systems, target[:, :, None])[:, :, 0]
    return float(error)


# Of what can be saved, and not of the least error: that is next to nothing where moments are singular, and ends of
# searches apart by a tenth of it are apart by a thousandth of what either saves. Which end a search comes to depends on
# how a processor rounds; the ends of the long searches differ by up to 0.6 % of what they save, and a search that stops
# after some rounds loses up to 0.7 %, 1.1 % and 0.15 % of it here. Some twice that is allowed.
@one_in(5)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("centre", [False, True], ids=["expert", "residual"])
@pytest.mark.parametrize(
    ("known", "lost"), [("of activations", 0.02), ("of few large activations", 0.02), ("singular", 0.003)]
)
def test_saves_of_the_error_what_a_long_search_saves(gated, centre, known, lost):
    kernels, moments = drawn(0, gated=gated), MOMENTS[known]
    rows = {name: kernel - 0.7 * drawn(1, gated=gated)[name] for name, kernel in kernels.items()} if centre else kernels
    plain = output_error(rows, products(LeastJointError({}).factors(rows, RANK)), moments, kernels)
    made = products(joint_factors(rows, kernels if centre else None, *moments, RANK))
    least = min(least_error(rows, moments, kernels, seed) for seed in range(3))
    assert plain - output_error(rows, made, moments, kernels) > (1 - lost) * (plain - least)


@pytest.mark.parametrize("known", MOMENTS)
@pytest.mark.parametrize("rank", [1, RANK, F])
def test_never_worse_than_the_decomposition_of_the_weights(known, rank):
    for seed in range(3):
        rows, moments = drawn(seed), MOMENTS[known]
        plain = output_error(rows, products(LeastJointError({}).factors(rows, rank)), moments)
        ours = output_error(rows, products(joint_factors(rows, None, *moments, rank)), moments)
        assert ours < 1e-9 if rank == F else ours <= plain


def test_far_better_where_inputs_are_not_alike():
    rows, moments = drawn(0), MOMENTS["of activations"]
    plain = output_error(rows, products(LeastJointError({}).factors(rows, RANK)), moments)
    assert output_error(rows, products(joint_factors(rows, None, *moments, RANK)), moments) < 0.5 * plain


@pytest.mark.parametrize("known", MOMENTS)
def test_every_round_lowers_the_error_that_is_measured(known):
    rows, moments = drawn(2), MOMENTS[known]
    problem = outputs_of(rows, None, *moments)
    fits = list(descent(problem, [design_of(rows)], RANK))
    errors = np.array([fit.error for fit in fits])
    assert len(errors) > 1 and (np.diff(errors) < 0).all()
    for fit in fits:
        left, down = np.asarray(fit.left, np.float64), fit.down * problem.down_unit
        made = {name: left @ (down if name == "down" else left.T @ matrix) for name, matrix in rows.items()}
        assert output_error(rows, made, moments) == pytest.approx(fit.error, rel=1e-3)


def test_the_same_again_and_for_multiples_of_moments():
    rows, moments = drawn(3), MOMENTS["of activations"]
    left, right = joint_factors(rows, None, *moments, RANK)
    again, right_again = joint_factors(rows, None, *moments, RANK)
    np.testing.assert_array_equal(left, again)
    np.testing.assert_array_equal(right["down"], right_again["down"])
    scaled = products(joint_factors(rows, None, moments[0] * np.float32(2**40), moments[1] / np.float32(2**20), RANK))
    for name, product in products((left, right)).items():
        np.testing.assert_allclose(scaled[name], product, atol=1e-4)


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**50])
def test_weights_may_be_small_and_large(scale):
    rows, moments = drawn(4), MOMENTS["of activations"]
    expected = products(joint_factors(rows, None, *moments, RANK))
    scaled = {name: matrix * np.float32(scale) for name, matrix in rows.items()}
    for name, product in products(joint_factors(scaled, None, *moments, RANK)).items():
        np.testing.assert_allclose(product / scale, expected[name], atol=1e-4)


@pytest.mark.parametrize("zero", [("gate",), ("down",), ("gate", "up"), ("gate", "up", "down")])
def test_matrices_may_be_zero(zero):
    rows = {name: np.zeros_like(matrix) if name in zero else matrix for name, matrix in drawn(5).items()}
    left, right = joint_factors(rows, None, *MOMENTS["of activations"], RANK)
    assert np.isfinite(left).all() and all(np.isfinite(own).all() for own in right.values())
    for name in zero:
        np.testing.assert_allclose(left @ right[name].T, 0, atol=1e-5)


def test_experts_may_be_alike():
    """Then nothing is left of them beside a centre."""
    kernels = drawn(6)
    nothing = {name: np.zeros_like(matrix) for name, matrix in kernels.items()}
    left, right = joint_factors(nothing, kernels, *MOMENTS["of activations"], RANK)
    assert all((left @ own.T == 0).all() for own in right.values())


def test_a_damaged_moment_is_refused():
    moments = MOMENTS["of activations"]
    with pytest.raises(InputError, match="not positive semi-definite"):
        joint_factors(drawn(0), None, -moments[0] + 2 * np.diag(np.diagonal(moments[0])), moments[1], RANK)
