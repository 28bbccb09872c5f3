"""Approximations of low rank: of one matrix, and of all matrices of an expert for the least change of their outputs.

`joint_factors` (methods.md 4) takes a design matrix [A_1 | ... | D], f rows, each of which holds the weights of a
neuron (methods.md 5): those of the matrices A_j that are given the inputs of the expert, whose second moment is
H [d, d], and those of `down`, which is given its hidden activations, of moment S [f, f]. Factors L [f, r] and
R_1, ..., R_D [r, d] leave the errors

    sum_j tr(E_j H E_j^T) / n_j + tr(E_D^T S E_D) / n_D,   E_j = A_j - L R_j,   E_D = D - L R_D,

n being the squared norm of the outputs of the kernel itself, which is more than A_j where a centre has a part of it.
What a relative error of any matrix does to the output of an FFN is about alike, whatever the units of its own outputs.

With H = C C^T the first terms are squared norms of E_j C, in which L has no weight; in the last one it has S. So no
singular value decomposition gives the best factors, and L and R are found in turns:

- R for L, exactly. With orthonormal L it is R_j = L^T A_j, whatever H is, and R_D = (L^T S L)^-1 L^T S D.
- L for R. It solves L P + S L Q = F, where P = sum_j R_j H R_j^T / n_j, Q = R_D R_D^T / n_D. In a basis in which both
  of these are diagonal, that is r systems in S with a multiple of the identity added. They are solved by conjugate
  gradients with the diagonal of S as the preconditioner, from the L that there is: so every step lowers the error. A
  few steps do nearly what a decomposition of S would do, which takes longer, and far more memory.

The turns begin at the singular vectors of [A_1 C | ... | s D], divided by the roots of n, s^2 being the mean of the
diagonal of S, or at those of the design matrix, whichever is better, and go beyond the solution for L by a half, which
saves rounds. How far they end from the least error that long searches find, a test says (`test_joint_factors.py`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import lax
from jaxtyping import Array, Float

from moe_jax.compression.coding.calibrated_codes import DAMPING, triangular_factor
from moe_jax.compression.threads import decomposing

# Up to this size of the smaller side, and where a subspace would be nearly as large, nothing is approximated.
EXACT_UP_TO = 1024

# Vectors of the subspace per vector that is wanted, and a few more; blocks in which they come per wanted rank. On a
# Gaussian matrix, whose singular values decay as little as any, an eighth of full rank is then found with 1.0007 of the
# least error (twice as many vectors as wanted: 1.011; plain subspace iteration with six products each way: 1.004).
_SUBSPACE, _MORE, _BLOCKS = 3, 64, 4

# Of a vector's length, what may be nothing but rounding.
_LOST = 1e-5


class TruncatedSVD(NamedTuple):
    """`u * s @ v.T`, float32."""

    u: Float[np.ndarray, "i r"]  # orthonormal columns
    s: Float[np.ndarray, " r"]  # singular values, descending
    v: Float[np.ndarray, "o r"]  # orthonormal columns; zero where `s` is, or on the other side in a tall matrix


def truncated_svd(matrix: Float[np.ndarray, "i o"], rank: int) -> TruncatedSVD:
    """The largest singular values and their vectors.

    Small matrices are decomposed exactly. For large ones the vectors are looked for in a block Krylov subspace of a
    random start (Musco and Musco, 2015, arXiv 1504.05477, algorithm 2), always the same: `||A - u s v^T||_F` is then
    within 0.1 % of the least. The memory is about four times the matrix, in float32, at most.
    """
    matrix = np.asarray(matrix, np.float32)
    assert 1 <= rank <= min(matrix.shape), (rank, matrix.shape)
    if matrix.shape[0] > matrix.shape[1]:
        u, s, v = truncated_svd(matrix.T, rank)
        return TruncatedSVD(v, s, u)
    basis, products = _within_subspace(matrix, rank)
    vectors, values = _largest_eigenvectors(products, rank)
    return _decomposition(vectors if basis is None else basis @ vectors, products.T @ vectors, values)


def largest_singular_values(matrix: Float[np.ndarray, "i o"], rank: int) -> Float[np.ndarray, " r"]:
    """The values of `truncated_svd`, descending: to find the vectors, too, takes much longer."""
    matrix = np.asarray(matrix, np.float32)
    _, products = _within_subspace(matrix.T if matrix.shape[0] > matrix.shape[1] else matrix, rank)
    # All of them: LAPACK looks for some by bisection, which takes longer.
    with decomposing(len(products)):
        squares = scipy.linalg.eigh(
            _gram(products), eigvals_only=True, overwrite_a=True, check_finite=False, driver="ev"
        )
    return _values(squares[len(squares) - rank :])


def _within_subspace(matrix: Float[np.ndarray, "i o"], rank: int) -> tuple[np.ndarray | None, np.ndarray]:
    """A basis Q [i, n] of columns that hold the largest singular vectors of a wide matrix A, and Q^T A [n, o].

    None for Q: the matrix is small enough to be decomposed as it is.
    """
    size = _SUBSPACE * rank + _MORE
    if len(matrix) <= max(EXACT_UP_TO, size):
        return None, matrix
    return _krylov_basis(matrix, size, math.ceil(rank / _BLOCKS))


def _decomposition(u: np.ndarray, weighted: np.ndarray, values: np.ndarray) -> TruncatedSVD:
    values = np.where(values < np.finfo(values.dtype).tiny, 0, values)  # what has no reciprocal
    inverse = np.divide(1, values, out=np.zeros_like(values), where=values > 0)
    weighted *= inverse
    return TruncatedSVD(u, values, weighted)


def _largest_eigenvectors(matrix: Float[np.ndarray, "n o"], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Left singular vectors [n, r] and values [r], float32."""
    n = len(matrix)
    with decomposing(n):
        squares, vectors = scipy.linalg.eigh(
            _gram(matrix), subset_by_index=(n - rank, n - 1), overwrite_a=True, check_finite=False, driver="evr"
        )
    return vectors[:, ::-1].astype(np.float32), _values(squares)


def _gram(matrix: Float[np.ndarray, "n o"]) -> Float[np.ndarray, "n n"]:
    """A A^T in float64: squares need twice the digits."""
    wide = matrix.astype(np.float64)
    return wide @ wide.T


def _values(squares: Float[np.ndarray, " r"]) -> Float[np.ndarray, " r"]:
    """Singular values, descending, given their squares, ascending; float32."""
    values = np.sqrt(np.maximum(squares[::-1], 0))
    # What is left of the squares of nothing after rounding.
    values[values < 1e-7 * values[0]] = 0
    return values.astype(np.float32)


def _krylov_basis(matrix: Float[np.ndarray, "i o"], size: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """An orthonormal basis Q [i, n] of span{A X, (A A^T) A X, ...} for a random X, and Q^T A [n, o]; n >= size."""
    blocks = math.ceil(size / block)
    rows, width = matrix.shape
    block = min(block, rows // blocks)
    basis = np.empty((rows, blocks * block), np.float32, order="F")
    products = np.empty((blocks * block, width), np.float32)
    random = np.random.default_rng(0)
    on_device = jnp.asarray(matrix)
    new = product(on_device, random.standard_normal((width, block), np.float32))
    for done in range(0, basis.shape[1], block):
        _orthonormalise(new, basis[:, :done], random)
        basis[:, done : done + block] = new
        products[done : done + block] = product(new.T, on_device)
        new = product(on_device, products[done : done + block].T)
    return basis, products


def product(left: Float[np.ndarray | Array, "a b"], right: Float[np.ndarray | Array, "b c"]) -> np.ndarray:
    """On the default device. May be written to."""
    return np.array(_dot(jnp.asarray(left), jnp.asarray(right)))


@jax.jit
def _dot(left: Float[Array, "a b"], right: Float[Array, "b c"]) -> Float[Array, "a c"]:
    return jnp.dot(left, right, precision="highest")


def _orthonormalise(
    new: Float[np.ndarray, "i b"], basis: Float[np.ndarray, "i n"], random: np.random.Generator
) -> None:
    """Makes columns orthonormal and orthogonal to a basis, in place; random ones take the place of those within it."""
    norms = np.linalg.norm(new, axis=0)
    new -= basis @ (basis.T @ new)
    # SciPy says a tuple of any length: of this mode it has two.
    columns, triangle = cast(tuple[np.ndarray, np.ndarray], scipy.linalg.qr(new, mode="economic", check_finite=False))
    new[...] = columns
    lost = np.abs(np.diagonal(triangle)) <= _LOST * norms
    if lost.any():
        new[:, lost] = random.standard_normal((len(new), lost.sum()), np.float32) / np.sqrt(len(new))
        new -= basis @ (basis.T @ new)
    # Again, because what rounding left of the basis is as large as what is new, if that is little.
    new -= basis @ (basis.T @ new)
    new[...] = scipy.linalg.qr(new, mode="economic", check_finite=False)[0]


ROUNDS = 12
LEAST_GAIN = 1e-3
"""The share of the error that a round has to gain for another to follow."""
_STEPS = 5  # of conjugate gradients in a round
_BEYOND = 1.5  # times the way to the solution for L
# Of all that there is, what may be nothing but rounding.
_NOTHING = 1e-7


class Fit(NamedTuple):
    """Factors, R being the best for L, in the units of a problem."""

    left: Float[Array, "f r"]  # L, orthonormal columns
    weighed_left: Float[Array, "f r"]  # S L
    into: Float[Array, "r w"]  # R_1 C, ... side by side, C being the root of H
    down: Float[np.ndarray, "r d"]  # R_D, float64
    error: float  # of the outputs, as a share of those of the kernels, the mean over the matrices


class Problem(NamedTuple):
    """The problem whose factors are sought; outputs of each kernel have a squared norm of 1 / number of matrices."""

    into: Float[Array, "f w"]  # A_1 C, ... side by side, in these units
    down: Float[Array, "f d"]  # D, in these units
    moment: Float[Array, "f f"]  # S, of which the mean of the diagonal is 1
    weighed_down: Float[Array, "f d"]  # S D
    down_norm: float  # tr(D^T S D)
    down_unit: float  # by which D was divided


def joint_factors(
    rows: Mapping[str, Float[np.ndarray, "f d"]],
    kernels: Mapping[str, Float[np.ndarray, "f d"]] | None,
    input_moment: Float[np.ndarray, "d d"],
    hidden_moment: Float[np.ndarray, "f f"],
    rank: int,
) -> tuple[Float[np.ndarray, "f r"], dict[str, Float[np.ndarray, "d r"]]]:
    """The factors `left` and `right` of every matrix, with `rows[name]` near `left @ right[name].T`; float32.

    Never worse than the truncated singular value decomposition of the design matrix, for moments with `DAMPING` times
    the mean of their diagonals on these; a moment of zeros counts as the identity.

    A round makes some 6 products of S with an [f, r] matrix and 4 of the size of L R: of an expert of Mixtral
    (f = 14336, d = 4096, r = 1654), all rounds are 9e13 multiplications and additions, in float32 on the default
    device, which holds S (0.8 GB) and about twice the design matrix.

    Args:
      rows: the matrices of an expert with a row for each neuron, `down` and the others; finite, float32.
      kernels: of which these are what a centre leaves; None: there is no centre.
      input_moment, hidden_moment: H and S, float32; any multiple of a moment does the same. `InputError` if H is not
        positive semi-definite.
      rank: r, at most f and at most the width of all matrices.
    """
    unit = max(float(np.max(np.abs(matrix))) for of in (rows, kernels or {}) for matrix in of.values()) or 1.0
    rows, kernels = _divided(rows, unit), None if kernels is None else _divided(kernels, unit)
    problem = outputs_of(rows, kernels, input_moment, hidden_moment)
    starts = (design() for design in (partial(design_of, rows), partial(design_of_outputs, problem)))
    *_, best = descent(problem, starts, rank)

    left = np.asarray(best.left)
    right = {name: product(left.T, matrix) for name, matrix in rows.items() if name != "down"}
    right["down"] = (best.down * problem.down_unit).astype(np.float32)
    # The same product again, with as much of it in either factor.
    u, s, v = truncated_svd(np.concatenate([right[name] for name in rows], axis=1), rank)
    root = np.sqrt(s * np.float32(unit))
    ends = np.cumsum([matrix.shape[1] for matrix in rows.values()])[:-1]
    return product(left, u * root), dict(zip(rows, np.split(v * root, ends), strict=True))


def outputs_of(
    rows: Mapping[str, Float[np.ndarray, "f d"]],
    kernels: Mapping[str, Float[np.ndarray, "f d"]] | None,
    input_moment: Float[np.ndarray, "d d"],
    hidden_moment: Float[np.ndarray, "f f"],
) -> Problem:
    """The problem of `joint_factors`."""
    root = triangular_factor(_of_level_one(input_moment))
    moment = jnp.asarray(_damped(_of_level_one(hidden_moment)))  # large: once on the device, and not on the host
    into = []
    for name in filter("down".__ne__, rows):
        outputs = product(rows[name], root)
        of_kernel = outputs if kernels is None else product(kernels[name], root)
        into.append(outputs / _unit(of_kernel, of_kernel, len(rows)))
    down = rows["down"]
    weighed = product(moment, down)
    of_kernel = (down, weighed) if kernels is None else (kernels["down"], product(moment, kernels["down"]))
    unit = _unit(*of_kernel, len(rows))
    down, weighed = down / unit, weighed / unit
    ready = map(jnp.asarray, (np.concatenate(into, axis=1), down, moment, weighed))
    return Problem(*ready, down_norm=_sum(down * weighed), down_unit=float(unit))


def descent(problem: Problem, starts: Iterable[Float[np.ndarray, "f _"]], rank: int) -> Iterator[Fit]:
    """The better of the fits to which singular vectors of `starts` lead, and ever better ones after it."""
    best = min(
        (best_for(problem, jnp.asarray(truncated_svd(start, rank).u)) for start in starts), key=lambda fit: fit.error
    )
    yield best
    for _ in range(ROUNDS):
        if best.error < _NOTHING:
            return
        step = _towards_best(problem, best)
        before = best.error
        for share in (_BEYOND, 1.0):  # the whole way is never worse, but for rounding
            tried = best_for(problem, best.left + jnp.float32(share) * step)
            if tried.error < before:
                best = tried
                yield best
                break
        if best.error > (1 - LEAST_GAIN) * before:
            return


def best_for(problem: Problem, left: Float[Array, "f r"]) -> Fit:
    """The fit with the columns of `left`, made orthonormal."""
    left, weighed_left, into, inner, outer, lost = _products(problem, left)
    inner, outer = np.asarray(inner, np.float64), np.asarray(outer, np.float64)
    with decomposing(len(inner)):
        values, vectors = scipy.linalg.eigh(inner, check_finite=False)
    values = np.maximum(values, DAMPING / (1 + DAMPING))  # what the damping leaves at least, but for rounding
    down = vectors @ (vectors.T @ outer / values[:, None])
    of_down = problem.down_norm - 2 * np.sum(down * outer) + np.sum(down * (inner @ down))
    return Fit(left, weighed_left, into, down, _sum(lost) + max(float(of_down), 0.0))


def _towards_best(problem: Problem, fit: Fit) -> Float[Array, "f r"]:
    """Returns the step from L to the best L for the same R."""
    into = np.asarray(fit.into, np.float64)
    shared = fit.down @ fit.down.T
    both = into @ into.T + shared  # for S like the identity
    both[np.diag_indices_from(both)] += 1e-6 * np.trace(both) / len(both)  # so that what R lacks stays as it is
    with decomposing(len(both)):
        shares, basis = scipy.linalg.eigh(shared, both, check_finite=False)
    basis, shares, down = (jnp.asarray(array, jnp.float32) for array in (basis, np.clip(shares, 0, 1), fit.down))
    return _conjugate_gradients(problem, fit._replace(down=down), basis, shares)


@jax.jit
def _products(problem: Problem, left: Float[Array, "f r"]) -> tuple[Array, ...]:
    """L orthonormal, S L, R C, L^T S L, L^T S D and the squared errors of the columns of A C."""
    with jax.default_matmul_precision("highest"):
        left, _ = jnp.linalg.qr(left)
        weighed_left = problem.moment @ left
        into = left.T @ problem.into
        lost = jnp.sum((problem.into - left @ into) ** 2, axis=0)
        return left, weighed_left, into, left.T @ weighed_left, left.T @ problem.weighed_down, lost


@jax.jit
def _conjugate_gradients(
    problem: Problem, fit: Fit, basis: Float[Array, "r r"], shares: Float[Array, " r"]
) -> Float[Array, "f r"]:
    """Some steps towards X T^T with X (1 - q) + S X q = (F - L P - S L Q) T, q being the shares and T the basis."""
    with jax.default_matmul_precision("highest"):
        left = fit.left @ (fit.into @ fit.into.T)
        weighed_left = fit.weighed_left @ (fit.down @ fit.down.T)
        gradient = problem.into @ fit.into.T - left + problem.weighed_down @ fit.down.T - weighed_left
        scale = 1 / (1 - shares + jnp.diagonal(problem.moment)[:, None] * shares)

        def step(_: Array, state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            found, left_over, direction, size = state
            changed = direction * (1 - shares) + (problem.moment @ direction) * shares
            length = _ratio(size, jnp.sum(direction * changed, axis=0))
            left_over = left_over - length * changed
            next_size = jnp.sum(left_over * scale * left_over, axis=0)
            next_direction = scale * left_over + _ratio(next_size, size) * direction
            return found + length * direction, left_over, next_direction, next_size

        left_over = gradient @ basis
        size = jnp.sum(left_over * scale * left_over, axis=0)
        start = (jnp.zeros_like(left_over), left_over, scale * left_over, size)
        return lax.fori_loop(0, _STEPS, step, start)[0] @ basis.T


def design_of(rows: Mapping[str, Float[np.ndarray, "f d"]]) -> Float[np.ndarray, "f w"]:
    """The design matrix of an expert."""
    return np.concatenate(list(rows.values()), axis=1)


def design_of_outputs(problem: Problem) -> Float[np.ndarray, "f w"]:
    """The matrix whose errors are those of a problem, if all hidden activations counted alike."""
    return np.concatenate([problem.into, problem.down], axis=1)


def _divided(matrices: Mapping[str, Float[np.ndarray, "f d"]], unit: float) -> dict[str, Float[np.ndarray, "f d"]]:
    return {name: matrix / np.float32(unit) for name, matrix in matrices.items()}


def _unit(kernel: np.ndarray, weighed: np.ndarray, matrices: int) -> np.float32:
    """By which a matrix is divided for outputs of the right norm; 1 where there are no outputs."""
    return np.float32(np.sqrt(matrices * max(_sum(kernel * weighed), 0.0)) or 1)


def _of_level_one(moment: Float[np.ndarray, "i i"]) -> Float[np.ndarray, "i i"]:
    """A multiple of a moment, 1 being the mean of the diagonal; zeros stay zeros."""
    return moment / np.float32(np.mean(np.diagonal(moment), dtype=np.float64) or 1)


def _damped(moment: Float[np.ndarray, "f f"]) -> Float[np.ndarray, "f f"]:
    """As `triangular_factor` does it, with a mean of 1 on the diagonal; the identity for zeros."""
    if not np.diagonal(moment).any():
        return np.eye(len(moment), dtype=np.float32)
    moment = moment / np.float32(1 + DAMPING)
    moment[np.diag_indices_from(moment)] += np.float32(DAMPING / (1 + DAMPING))
    return moment


def _sum(array: Float[np.ndarray, "..."] | Array) -> float:
    return float(np.sum(np.asarray(array), dtype=np.float64))


def _ratio(above: Float[Array, " r"], below: Float[Array, " r"]) -> Float[Array, " r"]:
    """0 where there is nothing below."""
    return jnp.where(below > 0, above / jnp.where(below > 0, below, 1), 0)
