"""Free-support 2-Wasserstein barycenter of point clouds of equal size (methods.md 5; ResMoE, arXiv 2503.06881, eq. 3).

    min over W and permutations T_k of (1/E) sum_k ||T_k W_k - W||_F^2

With equal sizes and uniform weights optimal plans are permutations, so the search is over orders of the clouds, and the
barycenter is the mean of the clouds in these orders.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from moe_jax.compression.alignment.matching import (
    AlignmentProgress,
    Matching,
    canonical_order,
    is_small,
)
from moe_jax.core.errors import InputError, check_member

SOLVERS = ("auto", "assignment", "alternation", "sinkhorn")

# `auto` does not anneal if less than this share of all places changes in a round: the clouds' order is then clear.
_SETTLED = 0.02
# It does not anneal clouds larger than these either, nor on CPUs clouds whose rounds are large: there Sinkhorn would
# take longer than it is worth, elsewhere it would run out of memory.
_ANNEALED_POINTS_CPU = 2048
_ANNEALED_POINTS = 16384

_MAX_ROUNDS_SMALL, _MAX_ROUNDS_LARGE = 100, 20
# Rounds of large clouds end when further ones would gain at most twice this part of the objective, see `descend`: the
# objective shall be right to 0.1 %.
_WORTH_LARGE = 3.5e-4


class Barycenter(NamedTuple):
    """A barycenter, and the orders in which the clouds are nearest to it.

        >>> import numpy as np
        >>> cloud = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 5.0]], np.float32)
        >>> found = moe_jax.free_support_barycenter([cloud, cloud[[2, 0, 1]]])
        >>> np.array_equal(cloud[found.permutations[0]], cloud[[2, 0, 1]][found.permutations[1]])
        True

    Attributes:
      points: float32[n, D].
      permutations: int32[E, n]; `clouds[k][permutations[k]]` is aligned with the points.
      objective: (1/E) sum_k ||clouds[k][permutations[k]] - points||_F^2 after every round, in float64.
      rounds: number of rounds.
      converged: False if the last round still changed an order: `max_rounds` was reached or, for large clouds, a round
        gained next to nothing.
      optimality: "exact": the plans are solutions of the assignment problems, not blurred or rounded ones. The
        barycenter is a local minimum of a problem that is NP-hard for more than two clouds.
      duality_gap: how much the potentials of the last entropic plans leave unproven of the optimality of the rounded
        assignments, relative to their cost; for large clouds that were not annealed, how much the prices of the last
        round leave unproven of its assignments, relative to the objective. None if all pairs were searched.
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
    max_rounds: int | None = None,
    seed: int = 0,
    progress: AlignmentProgress | None = None,
) -> Barycenter:
    """Computes the free-support Wasserstein barycenter of point clouds of equal size.

        >>> import numpy as np
        >>> clouds = [np.array([[0.0], [10.0]], np.float32), np.array([[12.0], [2.0]], np.float32)]
        >>> np.sort(moe_jax.free_support_barycenter(clouds).points, axis=0).tolist()
        [[1.0], [11.0]]

    The order of the clouds, and that of their points, affects only the permutations in the result.

    All solvers but `alternation` end with coordinate descent, in which each cloud is aligned to the mean of the others
    until no order changes:

    - `sinkhorn`: entropic plans under falling temperature, rounded by exact assignments.
    - `assignment`: exact assignments throughout. Small clouds go through `alternation` first, and so never end above
      it. Large ones (2^37 multiplications for a round, see `matching.py`) are aligned to the sum of those before them,
      and rounds end when those to come would lower the objective by some 0.04 %.
    - `alternation`: exact assignments to the mean of all clouds in turn with the mean; the algorithm of POT's
      `free_support_barycenter`. Clouds without a common order are stuck after a round or two, some 5 % too high.
    - `auto`: `assignment`; but if the first round of coordinate descent changes more than 2 % of all places, annealing
      goes on from there, unless it ends above `alternation`. On CPUs clouds of more than 2048 points are not annealed.

    Args:
      clouds: E of them, float32, float64 or bfloat16, [n, D] each. They are read in blocks and never copied as a whole.
      solver: one of `SOLVERS`.
      start: [n, D], the points that the clouds are aligned to first, and whose order of rows the result has; by default
        those of the cloud with the greatest norm.
      starts: how many starts are tried; the best result is kept. After the first one come the points of other clouds,
        then points drawn from all clouds.
      max_rounds: of each start. A round aligns every cloud once. By default 100, and 20 for large clouds.
      seed: of the drawn starts.
      progress: called after every alignment with the round, the clouds done in it, and the last objective.

    Raises:
      InputError: for an unknown solver, clouds of different shapes, or values that are not finite.
    """
    check_member("solver", solver, SOLVERS)
    max_rounds = _check(clouds, start, starts, max_rounds)
    by_norm, orders = canonical_order(clouds)
    clouds = [clouds[k] for k in by_norm]
    best = None
    for points, source in _starts(clouds, orders, start, starts, seed):
        found = _search(solver, clouds, orders, points, source, max_rounds, progress)
        if best is None or found.matching.objective < best.matching.objective:
            best = found
    assert best is not None, "there is at least one start"
    matching, gap = best
    permutations = np.empty_like(matching.permutations)
    permutations[by_norm] = matching.permutations
    return Barycenter(
        points=matching.mean.astype(np.float32, copy=False),
        permutations=permutations,
        objective=tuple(matching.objectives),
        rounds=len(matching.objectives),
        converged=matching.converged,
        duality_gap=gap,
    )


class _Found(NamedTuple):
    matching: Matching
    duality_gap: float | None = None


def _search(solver, clouds, orders, start, source: int | None, max_rounds: int, progress) -> _Found:
    """From one start to the end; `source` is the cloud that the start is, if it is one."""
    matching = Matching(clouds, orders, first_round_follows=True)
    if not matching.is_small and source is not None and solver in ("auto", "assignment"):
        return _search_large(solver, matching, source, max_rounds, progress)
    matching.align_all(start, progress, source=source)
    if solver == "sinkhorn":
        return _annealed(matching, max_rounds, progress)
    if solver == "alternation":
        matching.alternate(max_rounds, progress)
        return _Found(matching)
    aligned = matching.copy() if matching.is_small else None
    # If the clouds have a common order they are in it now. One round shows it, for alternation as well: nothing moves.
    matching.descend(min(2, max_rounds), progress)
    if matching.converged and (not matching.moved or len(clouds) == 2):
        return _Found(matching)
    ways = [matching]
    if aligned is not None:
        aligned.alternate(max_rounds, progress)
        ways = [aligned, matching]
    if solver == "auto" and _is_worth_annealing(matching):
        found = _annealed(matching, max_rounds, progress)
        if found.matching.objective <= min(way.objective for way in ways):
            return found
    ways[0].descend(max_rounds, progress)
    return _Found(ways[0])


def _search_large(solver, matching: Matching, source: int, max_rounds: int, progress) -> _Found:
    matching.align_in_turn(source, progress)
    if len(matching.clouds) == 1:
        matching.converged = True
        return _Found(matching, 0.0)
    matching.descend(max_rounds, progress, worth=_WORTH_LARGE)
    found = _Found(matching, matching.gap)
    if solver == "auto" and _is_worth_annealing(matching):
        found = min(found, _annealed(matching, max_rounds, progress), key=lambda one: one.matching.objective)
    return found


def _annealed(matching: Matching, max_rounds: int, progress) -> _Found:
    if len(matching.clouds) == 1:
        matching.descend(max_rounds, progress)
        return _Found(matching)
    # OTT takes a second to import, which who does not anneal need not wait for.
    from moe_jax.compression.alignment.entropic import anneal

    result = anneal(matching, progress)
    better = Matching(matching.clouds, result.permutations)
    better.descend(max_rounds, progress)
    return _Found(better, result.duality_gap)


def _is_worth_annealing(matching: Matching) -> bool:
    most = _ANNEALED_POINTS
    if jax.default_backend() == "cpu":
        most = _ANNEALED_POINTS_CPU if matching.is_small else 0
    return len(matching.mean) <= most and matching.moved > _SETTLED * matching.permutations.size


def _check(clouds, start, starts: int, max_rounds: int | None) -> int:
    """Raises `InputError` for a problem that cannot be solved; returns the number of rounds allowed."""
    if not len(clouds):
        raise InputError("no clouds to take the barycenter of")
    shapes = dict.fromkeys(cloud.shape for cloud in clouds)
    if len(shapes) > 1:
        raise InputError(f"clouds of different shapes: {', '.join(map(str, shapes))}; expected equal ones")
    (shape,) = shapes
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"clouds of shape {shape}; expected [n, D] with at least one point and one dimension")
    if max_rounds is None:
        max_rounds = _MAX_ROUNDS_SMALL if is_small(len(clouds), *shape) else _MAX_ROUNDS_LARGE
    for name, value in (("starts", starts), ("max_rounds", max_rounds)):
        if value < 1:
            raise InputError(f"{name}={value} must be positive")
    if start is not None:
        if start.shape != shape:
            raise InputError(f"start of shape {start.shape}; expected {shape}, that of the clouds")
        if not np.isfinite(start).all():
            raise InputError("the start holds values that are not finite")
    return max_rounds


def _starts(clouds, orders, start, count: int, seed: int) -> Iterator[tuple[Float[np.ndarray, "n D"], int | None]]:
    """Yields the points to begin with, and the cloud that they are, if they are one.

    These are the given start or the first cloud, then the other clouds, then points drawn from all.
    """
    if start is not None:
        yield start, None
        count -= 1
    for k in range(min(count, len(clouds))):
        yield clouds[k][orders[k]].astype(np.float32 if clouds[k].dtype.itemsize < 4 else clouds[k].dtype), k
    random = np.random.default_rng(seed)
    n = len(clouds[0])
    for _ in range(count - len(clouds)):
        drawn = np.empty(clouds[0].shape, np.float32)
        sources, places = random.integers(len(clouds), size=n), random.integers(n, size=n)
        for k in range(len(clouds)):
            drawn[sources == k] = clouds[k][orders[k][places[sources == k]]]
        yield drawn, None
