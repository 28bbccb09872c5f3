"""Free-support 2-Wasserstein barycenter of point clouds of equal size (METHODS 5; ResMoE, arXiv 2503.06881, eq. 3).

    min over W and permutations T_k of (1/E) sum_k ||T_k W_k - W||_F^2

With equal sizes and uniform weights optimal plans are permutations, so the search is over orders of the clouds, and the
barycenter is the mean of the clouds in these orders. Beside `free_support_barycenter` there are, for methods that need
only a part of it:

- `align(points, target)`: the order of one cloud that is nearest to another one, exactly;
- `weight_matching(clouds)`: orders of several clouds, each aligned to the sum of the others in turn until none changes
  (Git Re-Basin, arXiv 2209.04836, algorithm 1 and its many-model form).
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from moe_jax.compress.matching import Matching, Progress
from moe_jax.compress.transport import align as align
from moe_jax.compress.transport import row_blocks, working_dtype
from moe_jax.errors import InputError, check_member

SOLVERS = ("auto", "assignment")


class Barycenter(NamedTuple):
    """A barycenter, and the orders in which the clouds are nearest to it.

    Attributes:
      points: float32[n, D].
      permutations: int32[E, n]; `clouds[k][permutations[k]]` is aligned with the points.
      objective: (1/E) sum_k ||clouds[k][permutations[k]] - points||_F^2 after every round, in float64.
      rounds: how many there were.
      converged: False if `max_rounds` came first.
      optimality: "exact": every plan is an optimal one, not a rounded or a blurred one.
      duality_gap: of the last entropic plans, primal minus dual cost, in parts of the primal; None without such.
    """

    points: Float[np.ndarray, "n D"]
    permutations: Int[np.ndarray, "E n"]
    objective: tuple[float, ...]
    rounds: int
    converged: bool
    optimality: str = "exact"
    duality_gap: float | None = None


def free_support_barycenter(
    clouds: Sequence[Float[np.ndarray, "n D"]],
    *,
    solver: str = "auto",
    start: Float[np.ndarray, "n D"] | None = None,
    starts: int = 1,
    max_rounds: int = 100,
    seed: int = 0,
    progress: Progress | None = None,
) -> Barycenter:
    """Computes the barycenter.

    Neither the order of the clouds nor that of their points changes anything in the result but the permutations.

    Args:
      clouds: E of them, float32, float64 or bfloat16, [n, D] each. They are read in blocks and never copied as a whole.
      solver: one of `SOLVERS`.
      start: [n, D], what the clouds are aligned to first, and whose order of rows the result has; by default the points
        of the cloud with the greatest norm.
      starts: how many starts are tried; the best result is kept. After the first one come the points of other clouds,
        then points drawn from all clouds.
      max_rounds: of each start. A round aligns every cloud once.
      seed: of the drawn starts.
      progress: called after every alignment with the round, the clouds done in it, and the last objective.

    Raises:
      InputError: for an unknown solver, clouds of different shapes, or values that are not finite.
    """
    check_member("solver", solver, SOLVERS)
    _check(clouds, start, starts, max_rounds)
    orders, by_norm = _canonical(clouds)
    sorted_clouds = [clouds[k] for k in by_norm]
    sorted_orders = np.stack([orders[k] for k in by_norm])
    best = None
    for points in _starts(sorted_clouds, sorted_orders, start, starts, seed):
        matching = _solve(sorted_clouds, sorted_orders, points, max_rounds, progress)
        if best is None or matching.objective < best.objective:
            best = matching
    permutations = np.empty_like(best.permutations)
    permutations[by_norm] = best.permutations
    return Barycenter(
        points=best.mean.astype(np.float32, copy=False),
        permutations=permutations,
        objective=tuple(best.objectives),
        rounds=len(best.objectives),
        converged=best.converged,
    )


def weight_matching(
    clouds: Sequence[Float[np.ndarray, "n D"]],
    permutations: Int[np.ndarray, "E n"] | None = None,
    *,
    max_rounds: int = 100,
    progress: Progress | None = None,
) -> Int[np.ndarray, "E n"]:
    """Aligns each cloud to the sum of the others, in turn, until no order changes.

    Args:
      clouds: see `free_support_barycenter`.
      permutations: where to begin, by default the orders in which the clouds are.
      max_rounds: after so many rounds the search ends in any case.
      progress: see `free_support_barycenter`.

    Returns:
      int32[E, n]: `clouds[k][permutations[k]]` are in one order. The sum of squared distances between all pairs is not
      greater than it was.

    Raises:
      InputError: for clouds of different shapes, or values that are not finite.
    """
    _check(clouds, None, 1, max_rounds)
    for k, cloud in enumerate(clouds):
        _squared_row_norms(cloud, k)
    if permutations is None:
        permutations = np.tile(np.arange(len(clouds[0]), dtype=np.int32), (len(clouds), 1))
    matching = Matching(clouds, permutations)
    matching.descend(max_rounds, progress)
    return matching.permutations


def _solve(clouds, orders, start, max_rounds, progress) -> Matching:
    matching = Matching(clouds, orders)
    matching.align_all(start, progress)
    if working_dtype(*start.shape) == np.float64:
        # What plain alternation reaches from this start is never missed. Clouds for which a product takes a minute are
        # spared its rounds: coordinate descent alone ends lower than alternation, all but always.
        matching.alternate(max_rounds, progress)
    matching.descend(max_rounds, progress)
    return matching


def _check(clouds, start, starts: int, max_rounds: int) -> None:
    if not len(clouds):
        raise InputError("no clouds to take the barycenter of")
    shapes = dict.fromkeys(cloud.shape for cloud in clouds)
    if len(shapes) > 1:
        raise InputError(f"clouds of different shapes: {', '.join(map(str, shapes))}; expected equal ones")
    (shape,) = shapes
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"clouds of shape {shape}; expected [n, D] with at least one point and one dimension")
    for name, value in (("starts", starts), ("max_rounds", max_rounds)):
        if value < 1:
            raise InputError(f"{name}={value} must be positive")
    if start is not None:
        if start.shape != shape:
            raise InputError(f"start of shape {start.shape}; expected {shape}, that of the clouds")
        if not np.isfinite(start).all():
            raise InputError("the start holds values that are not finite")


def _canonical(clouds) -> tuple[list[Int[np.ndarray, " n"]], list[int]]:
    """Orders of the points of every cloud, and of the clouds, that do not depend on how they came.

    Points go by norm, and where norms are equal by their coordinates; clouds by norm, the greatest first.
    """
    orders, norms = [], []
    for k, cloud in enumerate(clouds):
        squares = _squared_row_norms(cloud, k)
        order = np.argsort(squares, kind="stable")
        ascending = squares[order]
        equal = np.flatnonzero(np.diff(ascending, prepend=np.nan, append=np.nan) == 0)
        tied = np.unique(np.concatenate([equal - 1, equal])) if len(equal) else equal
        tied = tied[tied < len(order)]
        if len(tied):
            rows = order[tied]
            coordinates = np.concatenate([cloud[rows].astype(np.float64), squares[rows][:, None]], axis=1)
            order[tied] = rows[np.lexsort(coordinates.T)]
        orders.append(order.astype(np.int32))
        norms.append(float(ascending.sum()))
    keys = [
        (-norm, _digest(clouds[k], orders[k]) if norms.count(norm) > 1 else b"") for k, norm in enumerate(norms)
    ]
    return orders, sorted(range(len(clouds)), key=keys.__getitem__)


def _squared_row_norms(cloud: Float[np.ndarray, "n D"], index: int) -> Float[np.ndarray, " n"]:
    squares = np.empty(len(cloud))
    for rows in row_blocks(*cloud.shape):
        block = cloud[rows].astype(np.float64, copy=False)
        squares[rows] = np.einsum("id,id->i", block, block)
    if not np.isfinite(squares).all():
        raise InputError(f"cloud {index} holds values that are not finite")
    return squares


def _digest(cloud: Float[np.ndarray, "n D"], order: Int[np.ndarray, " n"]) -> bytes:
    digest = hashlib.blake2b()
    for rows in row_blocks(*cloud.shape):
        digest.update(np.ascontiguousarray(cloud[order[rows]]).tobytes())
    return digest.digest()


def _starts(clouds, orders, start, count: int, seed: int):
    """Where to begin: the given start or the first cloud, then the other clouds, then points drawn from all."""
    n = len(clouds[0])
    dtype = working_dtype(*clouds[0].shape)
    if start is not None:
        yield start
        count -= 1
    for k in range(min(count, len(clouds))):
        yield clouds[k][orders[k]].astype(dtype, copy=False)
    random = np.random.default_rng(seed)
    for _ in range(count - len(clouds)):
        drawn = np.empty(clouds[0].shape, dtype)
        sources, rows = random.integers(len(clouds), size=n), random.integers(n, size=n)
        for k in range(len(clouds)):
            drawn[sources == k] = clouds[k][orders[k][rows[sources == k]]]
        yield drawn
