"""Free-support 2-Wasserstein barycenter of point clouds of equal size (methods.md 5; ResMoE, arXiv 2503.06881, eq. 3).

    min over W and permutations T_k of (1/E) sum_k ||T_k W_k - W||_F^2

With equal sizes and uniform weights optimal plans are permutations, so the search is over orders of the clouds, and the
barycenter is the mean of the clouds in these orders.

Orders are found by exact assignments, and by entropic transport under falling temperature (OTT's Sinkhorn). At a high
temperature the plans are blurred and no point keeps its place; as the temperature falls they harden, and the last ones
are rounded by an exact assignment. The orders found have lower objectives than exact assignments alone reach. Every
cloud is transported to the mean of the others, as in `Matching.descend`: with a mean that contains the cloud itself,
annealing gains at most a fifth as much.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.compression.alignment.assignment import assign
from moe_jax.compression.alignment.matching import AlignmentProgress, Matching, canonical_order, is_small
from moe_jax.compression.options.in_common import SOLVERS
from moe_jax.core.errors import InputError, check_member

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
    permutations, gap = anneal(matching, progress)
    better = Matching(matching.clouds, permutations)
    better.descend(max_rounds, progress)
    return _Found(better, gap)


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


# In standard deviations of the costs: from where orders melt to where plans are all but hard.
_TEMPERATURES = tuple(float(temperature) for temperature in np.geomspace(0.6, 0.05, 8))
# At each temperature. Plans need not be exact on the way: the next temperature goes on from these potentials.
_ITERATIONS = 15

Potentials = tuple[Float[Array, " n"], Float[Array, " n"]]


def anneal(matching: Matching, progress: AlignmentProgress | None) -> tuple[Int[np.ndarray, "E n"], float]:
    """Melts the orders of at least two clouds, and lets them set again; returns the new ones, and their duality gap.

    The gap is an upper bound, proven by the entropic potentials (their c-transform is a feasible dual), on how far the
    cost of the last assignments is above the least, relative to that cost; over all clouds. One plan is computed at a
    time. The blurred clouds are kept, large ones in bfloat16: they only guide the search.
    """
    count, n = matching.permutations.shape
    dtype = jnp.float32 if matching.is_small else jnp.bfloat16
    blurred = [jnp.asarray(matching.rows(k, np.float32), dtype) for k in range(count)]
    total = sum(cloud.astype(jnp.float32) for cloud in blurred)
    potentials = [(jnp.zeros(n, jnp.float32), jnp.zeros(n, jnp.float32))] * count
    permutations = np.empty_like(matching.permutations)
    gap, cost = 0.0, 0.0
    for temperature in (*_TEMPERATURES, None):
        for k in range(count):
            points = jnp.asarray(matching.rows(k, np.float32))
            total -= blurred[k].astype(jnp.float32)
            if temperature is None:
                order, own_cost, own_gap = _round(points, total / (count - 1), potentials[k])
                permutations[k] = matching.permutations[k][order]
                moved, gap, cost = points[order], gap + own_gap, cost + own_cost
            else:
                moved, potentials[k] = transport(points, total / (count - 1), potentials[k], temperature)
            blurred[k] = moved.astype(dtype)
            total += blurred[k].astype(jnp.float32)
            if progress is not None:
                progress(len(matching.objectives) + 1, k + 1, matching.objective)
    return permutations, gap / cost if cost > 0 else 0.0


class _Costs(NamedTuple):
    """Squared distances |target_i - points_j|^2 = offset + spread * matrix_ij + terms that depend only on i or j."""

    matrix: Float[Array, "n n"]  # of mean 0 in every row and column, and of standard deviation 1
    spread: Float[Array, ""]  # the divisor that normalised it
    offset: Float[Array, ""]  # the mean of all squared distances


def _costs(points: Float[Array, "n D"], target: Float[Array, "n D"]) -> _Costs:
    products = jnp.einsum("id,jd->ij", target, points, precision="highest")
    squares = jnp.mean(jnp.sum(target**2, axis=1)) + jnp.mean(jnp.sum(points**2, axis=1))
    offset = squares - 2 * jnp.mean(products)
    # A constant of a row or column changes no assignment, and would hide the spread of the rest.
    products -= jnp.mean(products, axis=1, keepdims=True)
    products -= jnp.mean(products, axis=0, keepdims=True)
    # For equal points only rounding is left, which must not be amplified.
    spread = jnp.maximum(jnp.std(products), jnp.finfo(products.dtype).eps * squares + jnp.finfo(products.dtype).tiny)
    return _Costs(-products / spread, 2 * spread, offset)


@jax.jit
def transport(
    points: Float[Array, "n D"], target: Float[Array, "n D"], potentials: Potentials, temperature: Float[Array, ""]
) -> tuple[Float[Array, "n D"], Potentials]:
    """The barycentric projection of an entropic plan, blurred points in the places of the target; and potentials."""
    # They take a second to import, which who does not anneal need not wait for.
    from ott.geometry.geometry import Geometry
    from ott.problems.linear.linear_problem import LinearProblem
    from ott.solvers.linear.sinkhorn import Sinkhorn

    # OTT accepts a traced temperature, although its type says float.
    geometry = Geometry(cost_matrix=_costs(points, target).matrix, epsilon=temperature)  # pyright: ignore[reportArgumentType]
    solver = Sinkhorn(
        threshold=-1.0, min_iterations=_ITERATIONS, inner_iterations=_ITERATIONS, max_iterations=_ITERATIONS
    )
    solution = solver(LinearProblem(geometry), init=potentials)
    plan = solution.matrix
    moved = jnp.einsum("ij,jd->id", plan, points, precision="highest")
    return moved / jnp.sum(plan, axis=1, keepdims=True), (solution.f, solution.g)


def _round(
    points: Float[Array, "n D"], target: Float[Array, "n D"], potentials: Potentials
) -> tuple[Int[np.ndarray, " n"], float, float]:
    """Returns an exact assignment; its cost, squared distances divided by n; and how much less it could be at most."""
    reduced, dual, spread = _reduced_costs(points, target, potentials)
    reduced = np.asarray(reduced)
    order = assign(reduced)
    taken = np.take_along_axis(reduced, order[:, None], axis=1).mean(dtype=np.float64)
    # min_j (c_ij - g_j) and g are a feasible dual; f_i is above it by the least reduced cost of its row.
    gap = float(spread) * float(taken - reduced.min(axis=1).mean(dtype=np.float64))
    return order, float(dual) + float(spread) * float(taken), gap


@jax.jit
def _reduced_costs(
    points: Float[Array, "n D"], target: Float[Array, "n D"], potentials: Potentials
) -> tuple[Float[Array, "n n"], Float[Array, ""], Float[Array, ""]]:
    """c_ij - f_i - g_j, the dual objective as a squared distance, and a cost of 1 as a squared distance.

    An assignment is the same for these as for the costs themselves, and SciPy finds it several times faster.
    """
    costs = _costs(points, target)
    f, g = potentials
    reduced = costs.matrix - f[:, None] - g[None, :]
    return reduced, costs.offset + costs.spread * (jnp.mean(f) + jnp.mean(g)), costs.spread
