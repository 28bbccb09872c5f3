"""Orders of point clouds by entropic transport under falling temperature (OTT's Sinkhorn).

At a high temperature the plans are blurred and no point keeps its place; as the temperature falls they harden, and the
last ones are rounded by an exact assignment. The orders found have lower objectives than exact assignments alone
reach.
Every cloud is transported to the mean of the others, as in `Matching.descend`: with a mean that contains the cloud
itself, annealing gains at most a fifth as much.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from ott.geometry.geometry import Geometry
from ott.problems.linear.linear_problem import LinearProblem
from ott.solvers.linear.sinkhorn import Sinkhorn

from moe_jax.compression.alignment.assignment import assign
from moe_jax.compression.alignment.matching import AlignmentProgress, Matching

# In standard deviations of the costs: from where orders melt to where plans are all but hard.
_TEMPERATURES = tuple(float(temperature) for temperature in np.geomspace(0.6, 0.05, 8))
# At each temperature. Plans need not be exact on the way: the next temperature goes on from these potentials.
_ITERATIONS = 15

Potentials = tuple[Float[Array, " n"], Float[Array, " n"]]


class Annealed(NamedTuple):
    """The result of annealing.

    Attributes:
      permutations: int32[E, n], the orders.
      duality_gap: upper bound, proven by the entropic potentials (their c-transform is a feasible dual), on how far the
        cost of the last assignments is above the least, relative to that cost; over all clouds.
    """

    permutations: Int[np.ndarray, "E n"]
    duality_gap: float


def anneal(matching: Matching, progress: AlignmentProgress | None = None) -> Annealed:
    """Melts the orders of a matching of at least two clouds, and lets them set again; the matching is not changed.

    Computes one plan at a time. The blurred clouds are kept, large ones in bfloat16: they only guide the search.
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
                rounded = _round(points, total / (count - 1), potentials[k])
                permutations[k] = matching.permutations[k][rounded.order]
                moved, gap, cost = points[rounded.order], gap + rounded.gap, cost + rounded.cost
            else:
                moved, potentials[k] = transport(points, total / (count - 1), potentials[k], temperature)
            blurred[k] = moved.astype(dtype)
            total += blurred[k].astype(jnp.float32)
            if progress is not None:
                progress(len(matching.objectives) + 1, k + 1, matching.objective)
    return Annealed(permutations, gap / cost if cost > 0 else 0.0)


class _Costs(NamedTuple):
    """Squared distances |target_i - points_j|^2 = offset + spread * matrix_ij + terms that depend only on i or j.

    Attributes:
      matrix: [n, n], of mean 0 in every row and column, and of standard deviation 1.
      spread: the divisor that normalised it.
      offset: the mean of all squared distances.
    """

    matrix: Float[Array, "n n"]
    spread: Float[Array, ""]
    offset: Float[Array, ""]


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
    points: Float[Array, "n D"],
    target: Float[Array, "n D"],
    potentials: Potentials,
    temperature: Float[Array, ""],
) -> tuple[Float[Array, "n D"], Potentials]:
    """The barycentric projection of an entropic plan, blurred points in the places of the target; and potentials."""
    # OTT accepts a traced temperature, although its type says float.
    geometry = Geometry(cost_matrix=_costs(points, target).matrix, epsilon=temperature)  # pyright: ignore[reportArgumentType]
    solver = Sinkhorn(
        threshold=-1.0, min_iterations=_ITERATIONS, inner_iterations=_ITERATIONS, max_iterations=_ITERATIONS
    )
    solution = solver(LinearProblem(geometry), init=potentials)
    plan = solution.matrix
    moved = jnp.einsum("ij,jd->id", plan, points, precision="highest")
    return moved / jnp.sum(plan, axis=1, keepdims=True), (solution.f, solution.g)


class _Rounded(NamedTuple):
    """An exact assignment; its cost is the sum of squared distances divided by n, at most `gap` above the least."""

    order: Int[np.ndarray, " n"]
    cost: float
    gap: float


def _round(points: Float[Array, "n D"], target: Float[Array, "n D"], potentials: Potentials) -> _Rounded:
    reduced, dual, spread = _reduced_costs(points, target, potentials)
    reduced = np.asarray(reduced)
    order = assign(reduced)
    taken = np.take_along_axis(reduced, order[:, None], axis=1).mean(dtype=np.float64)
    # min_j (c_ij - g_j) and g are a feasible dual; f_i is above it by the least reduced cost of its row.
    gap = float(spread) * float(taken - reduced.min(axis=1).mean(dtype=np.float64))
    return _Rounded(order, float(dual) + float(spread) * float(taken), gap)


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
