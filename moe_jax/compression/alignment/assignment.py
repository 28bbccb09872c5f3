"""Exact assignments of one point cloud to another of equal size: from all pairs, or from few candidates with a proof.

Both clouds have uniform weights, so an optimal transport plan is a permutation (Birkhoff). Small problems are one
matrix product and one search (`align`, `assign`).

An optimal assignment of large clouds uses n of n^2 pairs, nearly all of them among the nearest few of a row or a
column. So the problem is solved on these pairs alone, and prices are derived from the solution. With these prices one
look at all pairs either proves that no assignment is better, or finds the missing pairs: they become candidates, and
the problem is solved again (`assign_proven`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import min_weight_full_bipartite_matching

from moe_jax.compression.threads import in_threads
from moe_jax.core.errors import InputError

# Clouds are small up to this many multiplications. Their products are computed in float64, so that near-ties are
# decided as by any exact solver; products of larger ones in float32 on the device, as they take seconds and more.
_FLOAT64_PRODUCT = 2**36
# Values that are converted, gathered or moved to the device at a time.
_BLOCK_VALUES = 2**22


def align(points: Float[np.ndarray, "n D"], target: Float[np.ndarray, "n D"]) -> Int[np.ndarray, " n"]:
    """Returns the order, int32, of least ||points[order] - target||_F: one exact assignment.

    The clouds are float32, float64 or bfloat16. Among equal orders the one in which the points are is preferred.

    Raises:
      InputError: for clouds of different shapes or with values that are not finite.
    """
    if points.ndim != 2 or points.shape != target.shape:
        raise InputError(f"clouds of shapes {points.shape} and {target.shape}; expected two equal ones, [n, D]")
    dtype = working_dtype(*points.shape)
    for name, cloud in (("points", points), ("target", target)):
        if not all(np.isfinite(cloud[rows].astype(dtype)).all() for rows in row_blocks(*cloud.shape)):
            raise InputError(f"the {name} hold values that are not finite")
    return assign(transport_costs(target.astype(dtype, copy=False), points.astype(dtype, copy=False)))


def assign(costs: Float[np.ndarray, "n n"]) -> Int[np.ndarray, " n"]:
    """A column for every row, all different, with the least sum of costs (SciPy: shortest augmenting paths)."""
    return linear_sum_assignment(costs)[1].astype(np.int32)


def reduce_costs(costs: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """The same assignment problem with minima of 0 in every row, then in every column; overwrites `costs`.

    Better than SciPy's prices of zero: that saves a third of its time where points lie far from their targets, and
    takes longer than the search where nearly all are in place already.
    """
    costs -= costs.min(axis=1, keepdims=True)
    costs -= costs.min(axis=0, keepdims=True)
    return costs


def distinct_nearest(
    costs: Float[np.ndarray, "n n"], target: Float[np.ndarray, "n D"], points: Float[np.ndarray, "n D"]
) -> Int[np.ndarray, " n"] | None:
    """The optimal assignment if it can be read off: every target has a nearest point, each another one.

    No assignment costs less than the sum of the least distances. Clouds of a common origin are nearly always of this
    kind. All arguments are float32, the costs those of `transport_costs`. Returns None if two targets have the same
    nearest point, or one has two that float32 cannot tell apart.
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
    """-<target_i, points_j>: the part of |target_i - points_j|^2 / 2 on which the assignment depends.

    Both are float64, or both float32. Large ones are multiplied on the default device.
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
    """Slices of rows that are small enough to be copied."""
    size = max(1, _BLOCK_VALUES // max(dim, 1))
    for begin in range(0, n, size):
        yield slice(begin, min(begin + size, n))


# Candidates of every row, and about as many of every column. On Gaussian costs of 3584 points 16 leave 1e-5 of the gain
# to repairs and 32 nothing; solving then takes little time beside finding the candidates.
_NEAREST = 32
# Rows and columns choose candidates by a threshold estimated from at least this many costs: exact thresholds would take
# longer than everything else.
_SAMPLED = 4096
# Most missing pairs that a row gets in one repair; and most repairs, after which all pairs are searched instead.
_REPAIRS_OF_A_ROW, _MOST_REPAIRS = 8, 40
# Prices converge to this part of the spread of the costs.
_SETTLED = 1e-10


class Pinned(NamedTuple):
    """Rows for which only the nearest column is known, and a bound for all other columns."""

    columns: Int[np.ndarray, " n"]  # -1 for rows whose costs are all known; all others differ
    slack: Float[np.ndarray, " n"]  # how much more every other column costs, at least


class Assignment(NamedTuple):
    """An assignment, and a proof that its cost is at most `gap` above the least."""

    order: Int[np.ndarray, " n"]  # int32, a column for every row
    gap: float  # the unproven part, in units of the costs and over all rows
    # Pinned rows whose column other rows want so much that the proof needs their costs; if there are any, the gap does
    # not hold.
    wanted: Int[np.ndarray, " w"]


def assign_proven(
    costs: Float[np.ndarray, "m n"],
    rows: Int[np.ndarray, " m"] | None = None,
    pinned: Pinned | None = None,
    *,
    tolerance: float = 0.0,
) -> Assignment:
    """Returns a column for every row, all different, with the least sum of costs.

    The costs are those of `rows`, None: of all, and the others are `pinned`. A gap of the tolerance is small enough.
    """
    m, n = costs.shape
    if rows is None or pinned is None:
        assert m == n, costs.shape
        rows, pinned = np.arange(n), Pinned(np.full(n, -1), np.zeros(n))
    order = np.array(pinned.columns, np.int32)
    if not m:
        return Assignment(order, 0.0, np.arange(0))
    taken = np.zeros(n, bool)
    taken[order[order >= 0]] = True
    free = np.flatnonzero(~taken)
    place = np.full(n, -1)
    place[free] = np.arange(m)
    pairs = np.unique(np.append(_nearest_pairs(costs), np.arange(m) * n + free))
    for _ in range(_MOST_REPAIRS):
        found = _solve(costs, pairs, free, place)
        prices = _prices(costs, pairs, found)
        gap, missing = _check(costs, found, prices)
        before, pairs = pairs, np.union1d(pairs, missing)
        # Pairs that are candidates already can be missed only by rounding.
        if gap <= tolerance or len(pairs) == len(before):
            order[rows] = found
            held = np.flatnonzero(pinned.columns >= 0)
            # A pinned row may keep its column if no other column is cheaper for it at these prices.
            wants = pinned.slack[held] < prices.max() - prices[pinned.columns[held]]
            return Assignment(order, gap, held[wants])
    if m < n:  # rare: without pinned rows there is nothing to prove
        order[rows] = free[assign(costs[:, free])]
        return Assignment(order, np.inf, np.flatnonzero(pinned.columns >= 0))
    return Assignment(assign(costs), 0.0, np.arange(0))


def _nearest_pairs(costs: Float[np.ndarray, "m n"]) -> Int[np.ndarray, " c"]:
    """About the nearest `_NEAREST` pairs of every row and every column, as places in the flat matrix."""
    m, n = costs.shape

    def of_rows(part: slice) -> Int[np.ndarray, " c"]:
        block = costs[part]
        near = block <= of_columns
        near |= block <= _near(block[:, :: max(1, n // _SAMPLED)], n)[:, None]
        return np.flatnonzero(near) + part.start * n

    sampled = costs[:: max(1, m // _SAMPLED)]
    parts = [sampled[:, part] for part in row_blocks(n, len(sampled))]
    of_columns = np.concatenate(in_threads(lambda part: _near(np.ascontiguousarray(part.T), m), parts))
    return np.concatenate(in_threads(of_rows, row_blocks(m, n)))


def _near(sampled: Float[np.ndarray, "r s"], of: int) -> Float[np.ndarray, " r"]:
    """A threshold of each row that about `_NEAREST` of its `of` costs do not exceed, from a sample of them."""
    size = sampled.shape[1]
    nearest = max(1, round(_NEAREST * size / of))
    if nearest >= size:
        return np.full(len(sampled), np.inf, sampled.dtype)
    return np.partition(sampled, nearest - 1, axis=1)[:, nearest - 1]


def _solve(costs: np.ndarray, pairs: Int[np.ndarray, " c"], free: np.ndarray, place: np.ndarray) -> np.ndarray:
    """The best assignment that uses only candidate pairs: the column of every row."""
    (m, n), values = costs.shape, costs.reshape(-1)
    inside = pairs[place[pairs % n] >= 0]
    weights = values[inside].astype(np.float64)
    # A constant added to all costs changes no assignment; a weight of zero would mean that there is no pair.
    weights += 1 + np.ptp(weights) - weights.min()
    graph = csr_array((weights, (inside // n, place[inside % n])), shape=(m, m))
    found_rows, found_columns = min_weight_full_bipartite_matching(graph)
    found = np.empty(m, np.int64)
    found[found_rows] = free[found_columns]
    return found


def _prices(costs: np.ndarray, pairs: Int[np.ndarray, " c"], found: np.ndarray) -> Float[np.ndarray, " n"]:
    """Prices at which, among the candidates, no row would rather have another column than its own.

    They are shortest distances (Bellman and Ford) in the graph in which a row leads from its own column to its other
    candidates, at the difference of costs; for an optimal assignment it has no negative cycle.
    """
    (m, n), values = costs.shape, costs.reshape(-1)
    rows, columns = pairs // n, pairs % n
    own = values[np.arange(m) * n + found].astype(np.float64)
    more = values[pairs].astype(np.float64) - own[rows]
    from_column = found[rows]
    by_target = np.argsort(columns, kind="stable")
    more, from_column, columns = more[by_target], from_column[by_target], columns[by_target]
    begins = np.flatnonzero(np.diff(columns, prepend=-1))
    targets = columns[begins]
    prices = np.zeros(n)
    least_step = _SETTLED * max(float(np.ptp(more)), np.finfo(np.float64).tiny)
    for _ in range(n):
        lower = np.minimum(prices[targets], np.minimum.reduceat(prices[from_column] + more, begins))
        settled = np.all(prices[targets] - lower <= least_step)
        prices[targets] = lower
        if settled:
            break
    return prices


def _check(
    costs: np.ndarray, found: np.ndarray, prices: Float[np.ndarray, " n"]
) -> tuple[float, Int[np.ndarray, " c"]]:
    """How much all pairs leave unproven of an assignment, and the missing pairs.

    Prices v and u_i = min_j (c_ij - v_j) are a feasible dual: any assignment costs at least sum u + sum v.
    """
    m, n = costs.shape
    gap, missing = 0.0, []
    prices = prices.astype(costs.dtype)
    for part in row_blocks(m, n):
        reduced = costs[part] - prices
        every = np.arange(len(reduced))
        own = reduced[every, found[part]]
        short = own - reduced.min(axis=1)
        gap += float(short.sum(dtype=np.float64))
        rows = np.flatnonzero(short > 0)
        if len(rows):
            few = reduced[rows]
            few = np.argpartition(few, min(_REPAIRS_OF_A_ROW, n) - 1, axis=1)[:, :_REPAIRS_OF_A_ROW]
            better: Bool[np.ndarray, "r 8"] = np.take_along_axis(reduced[rows], few, axis=1) < own[rows, None]
            missing.append(((rows + part.start)[:, None] * n + few)[better])
    return gap, np.concatenate(missing) if missing else np.empty(0, np.int64)
