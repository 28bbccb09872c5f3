"""Exact transport between two point clouds of equal size: one matrix product, one linear assignment.

Both clouds have uniform weights, so an optimal plan is a permutation (Birkhoff). Merging methods use `align` to bring
the neurons of one expert into the order of another; `barycenter.py` is built on the same steps.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.optimize import linear_sum_assignment

from moe_jax.core.errors import InputError

# Clouds are small up to this many multiplications. Their products are computed in float64, so that near-ties are
# decided as by any exact solver; products of larger ones in float32 on the device, as they take seconds and more.
_FLOAT64_PRODUCT = 2**36
# Values that are converted, gathered or moved to the device at a time.
_BLOCK_VALUES = 2**22


def align(points: Float[np.ndarray, "n D"], target: Float[np.ndarray, "n D"]) -> Int[np.ndarray, " n"]:
    """Finds the order of points that is nearest to the target: one exact assignment.

    Args:
      points: the cloud to be ordered, float32, float64 or bfloat16.
      target: the cloud that it is compared with.

    Returns:
      int32; `points[permutation]` has the least ||points[permutation] - target||_F. Among equal ones the order in which
      the points are is preferred.

    Raises:
      InputError: for clouds of different shapes or with values that are not finite.
    """
    if points.ndim != 2 or points.shape != target.shape:
        raise InputError(f"clouds of shapes {points.shape} and {target.shape}; expected two equal ones, [n, D]")
    for name, cloud in (("points", points), ("target", target)):
        if not all(np.isfinite(block).all() for block in _row_blocks(cloud, working_dtype(*cloud.shape))):
            raise InputError(f"the {name} hold values that are not finite")
    dtype = working_dtype(*points.shape)
    return assign(transport_costs(target.astype(dtype, copy=False), points.astype(dtype, copy=False)))


def assign(costs: Float[np.ndarray, "n n"]) -> Int[np.ndarray, " n"]:
    """Returns a column for every row, all different, with the least sum of costs (SciPy: shortest augmenting paths)."""
    return linear_sum_assignment(costs)[1].astype(np.int32)


def reduce_costs(costs: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """Returns the same assignment problem with minima of 0 in every row, then in every column; overwrites `costs`.

    SciPy's search starts from dual prices of zero. If points lie far from their targets, better prices save a third of
    its time; if nearly all are in place already, computing them takes longer than the search.
    """
    costs -= costs.min(axis=1, keepdims=True)
    costs -= costs.min(axis=0, keepdims=True)
    return costs


def distinct_nearest(
    costs: Float[np.ndarray, "n n"], target: Float[np.ndarray, "n D"], points: Float[np.ndarray, "n D"]
) -> Int[np.ndarray, " n"] | None:
    """Returns the optimal assignment if it can be read off: every target has a nearest point, each another one.

    No assignment costs less than the sum of the least distances. Clouds of a common origin are nearly always of this
    kind, and need no search.

    Args:
      costs: float32, from `transport_costs`.
      target, points: float32.

    Returns:
      int32; None if two targets have the same nearest point, or one has two that float32 cannot tell apart.
    """
    halves = 0.5 * np.einsum("jd,jd->j", points, points)
    largest = np.sqrt(np.einsum("id,id->i", target, target).max() * 2 * halves.max()) + halves.max()
    rounding = 2 * points.shape[1] * np.finfo(np.float32).eps * largest  # a bound for sums of D products
    order = np.empty(len(target), np.int32)
    for rows in row_blocks(*costs.shape):
        distances = costs[rows] + halves
        nearest = np.argmin(distances, axis=1)
        every = np.arange(len(nearest))
        least = distances[every, nearest]
        distances[every, nearest] = np.inf
        if np.any(distances.min(axis=1) - least <= rounding):
            return None
        order[rows] = nearest
    return order if len(np.unique(order)) == len(order) else None


def working_dtype(n: int, dim: int) -> np.dtype:
    """Returns float64 for clouds that are small enough, else float32."""
    return np.dtype(np.float64 if n * n * dim <= _FLOAT64_PRODUCT else np.float32)


def transport_costs(target: Float[np.ndarray, "n D"], points: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n n"]:
    """Returns -<target_i, points_j>: the part of |target_i - points_j|^2 / 2 on which the assignment depends.

    Args:
      target, points: both float64, or both float32. Large ones are multiplied on the default device.
    """
    if working_dtype(*target.shape) == np.float64:
        return -target @ points.T
    costs = np.empty((len(target), len(points)), np.float32)
    on_device = jnp.asarray(points)
    for rows in row_blocks(*target.shape):
        costs[rows] = _negative_product(jnp.asarray(target[rows]), on_device)
    return costs


@jax.jit
def _negative_product(target: Float[Array, "b D"], points: Float[Array, "n D"]) -> Float[Array, "b n"]:
    # In full float32: TPUs would round to bfloat16 and GPUs to TF32, coarser than the differences that decide.
    return -jnp.einsum("id,jd->ij", target, points, precision="highest")


def row_blocks(n: int, dim: int) -> Iterator[slice]:
    """Yields slices of rows that are small enough to be copied."""
    size = max(1, _BLOCK_VALUES // max(dim, 1))
    for begin in range(0, n, size):
        yield slice(begin, min(begin + size, n))


def _row_blocks(cloud: Float[np.ndarray, "n D"], dtype: np.dtype) -> Iterator[np.ndarray]:
    for rows in row_blocks(*cloud.shape):
        yield cloud[rows].astype(dtype, copy=False)
