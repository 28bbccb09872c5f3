"""The best approximation of a matrix by one of low rank."""

import math
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float

# Up to this size of the smaller side, and where a subspace would be nearly as large, nothing is approximated.
EXACT_UP_TO = 1024

# Vectors of the subspace per vector that is wanted, and a few more; blocks in which they come per wanted rank. On a
# Gaussian matrix, whose singular values decay as little as any, an eighth of full rank is then found with 1.0007 of the
# least error (twice as many vectors as wanted: 1.011; plain subspace iteration with six products each way: 1.004).
_SUBSPACE, _MORE, _BLOCKS = 3, 64, 4

# Of a vector's length, what may be nothing but rounding.
_LOST = 1e-5


class TruncatedSVD(NamedTuple):
    """`u * s @ v.T`, float32.

    Attributes:
      u: orthonormal columns.
      s: singular values, descending.
      v: orthonormal columns; zero where `s` is, or on the other side in a tall matrix.
    """

    u: Float[np.ndarray, "i r"]
    s: Float[np.ndarray, " r"]
    v: Float[np.ndarray, "o r"]


def truncated_svd(matrix: Float[np.ndarray, "i o"], rank: int) -> TruncatedSVD:
    """The largest singular values and their vectors.

    Small matrices are decomposed exactly. For large ones the vectors are looked for in a block Krylov subspace of a
    random start (Musco and Musco, 2015, arXiv 1504.05477, algorithm 2), always the same: `||A - u s v^T||_F` is then
    within 0.1 % of the least. The memory is about four times the matrix at most.

    Args:
      matrix: finite; computed in float32.
      rank: r, between 1 and min(i, o).
    """
    matrix = np.asarray(matrix, np.float32)
    assert 1 <= rank <= min(matrix.shape), (rank, matrix.shape)
    if matrix.shape[0] > matrix.shape[1]:
        u, s, v = truncated_svd(matrix.T, rank)
        return TruncatedSVD(v, s, u)
    size = _SUBSPACE * rank + _MORE
    if len(matrix) <= max(EXACT_UP_TO, size):
        vectors, values = _largest_eigenvectors(matrix, rank)
        return _decomposition(vectors, matrix.T @ vectors, values)
    basis, products = _krylov_basis(matrix, size, math.ceil(rank / _BLOCKS))
    vectors, values = _largest_eigenvectors(products, rank)
    return _decomposition(basis @ vectors, products.T @ vectors, values)


def _decomposition(u: np.ndarray, weighted: np.ndarray, values: np.ndarray) -> TruncatedSVD:
    values = np.where(values < np.finfo(values.dtype).tiny, 0, values)  # what has no reciprocal
    inverse = np.divide(1, values, out=np.zeros_like(values), where=values > 0)
    weighted *= inverse
    return TruncatedSVD(u, values, weighted)


def _largest_eigenvectors(matrix: Float[np.ndarray, "n o"], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Left singular vectors [n, r] and values [r], float32, from A A^T in float64: squares need twice the digits."""
    wide = matrix.astype(np.float64)
    gram = wide @ wide.T
    del wide
    n = len(gram)
    squares, vectors = scipy.linalg.eigh(
        gram, subset_by_index=(n - rank, n - 1), overwrite_a=True, check_finite=False, driver="evr"
    )
    values = np.sqrt(np.maximum(squares[::-1], 0))
    # What is left of the squares of nothing after rounding.
    values[values < 1e-7 * values[0]] = 0
    return vectors[:, ::-1].astype(np.float32), values.astype(np.float32)


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
