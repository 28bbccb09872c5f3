"""Local search for orders of point clouds in which they lie as near to their mean as possible."""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int

from moe_jax.compression.alignment.assignment import (
    assign,
    distinct_nearest,
    reduce_costs,
    row_blocks,
    transport_costs,
    working_dtype,
)
from moe_jax.compression.alignment.nearest import nearest_order
from moe_jax.compression.threads import in_threads
from moe_jax.core.errors import InputError

# Called after every alignment: the round (from 1), clouds done in it, and the objective after the last whole round.
AlignmentProgress = Callable[[int, int, float], None]
# A new order is accepted if its gain, relative to the mean squared norm of the clouds, is more than rounding.
_LEAST_GAIN = 1e-13
# Clouds are small up to this many multiplications per round: some seconds in float64, searches included. Larger clouds
# are assigned from few candidates and proven, in float32.
_SMALL_ROUND = 2**37


class Matching:
    """E clouds, an order of each, and their mean. Memory holds, besides the clouds, the mean and one cloud at a time.

    Attributes:
      clouds: [n, D] each.
      permutations: Int32[E, n]; cloud k in its order is `clouds[k][permutations[k]]`.
      mean: [n, D] of the clouds in their orders, float64 for small clouds and else float32.
      objectives: (1/E) sum_k ||cloud k in its order - mean||_F^2 after every round.
      converged: whether the last search ended because no order changed any more.
      moved: number of points, over all clouds, that changed their position in the last round.
    """

    def __init__(
        self,
        clouds: Sequence[Float[np.ndarray, "n D"]],
        permutations: Int[np.ndarray, "E n"],
        *,
        first_round_follows: bool = False,
    ):
        """Computes the mean, unless `align_all` or `align_in_turn` is called next and computes it itself."""
        self.clouds = clouds
        self.permutations = np.array(permutations, np.int32)
        n, dim = clouds[0].shape
        self.is_small = is_small(len(clouds), n, dim)
        self.mean = np.empty((n, dim), np.float64 if self.is_small else np.float32)
        self.objectives: list[float] = []
        self.converged = False
        self.moved = 0
        self._unproven: dict[int, float] = {}  # of products, of every cloud's last assignment
        self._squares: dict[int, np.ndarray] = {}
        self._are_apart = False  # whether large clouds were found to have no common order
        self._distinct = n > 1  # whether every assignment so far could be read off the nearest points
        self._deviations = np.full(n, np.nan)
        self._squared_norm = 0.0
        if not first_round_follows:
            self._refresh(np.ones(n, bool))

    @property
    def objective(self) -> float:
        """The objective (1/E) sum_k ||cloud k in its order - mean||_F^2 at the end of the last round."""
        return float(self._deviations.sum()) / len(self.clouds)

    @property
    def gap(self) -> float | None:
        """How much, relative to the objective, the last assignments of all clouds together may be above the least.

        Apart from the rounding of products; None if they were searched among all pairs.
        """
        if self.is_small:
            return None
        unproven = sum(self._unproven.values())
        return 2 * unproven / (len(self.clouds) ** 2 * self.objective) if unproven else 0.0

    def copy(self) -> "Matching":
        """Returns an independent copy; the clouds are shared."""
        other = Matching(self.clouds, self.permutations)
        other.objectives = list(self.objectives)
        return other

    def rows(self, k: int, dtype: npt.DTypeLike, places: Int[np.ndarray, " m"] | slice = slice(None)) -> np.ndarray:
        """Returns a copy of cloud k in its order, or of some places of it."""
        return self.clouds[k][self.permutations[k][places]].astype(dtype, copy=False)

    def align_all(
        self, target: Float[np.ndarray, "n D"], progress: AlignmentProgress | None = None, *, source: int | None = None
    ) -> None:
        """Runs the first round: every cloud gets the order nearest to the target, whatever its order was.

        `source` is the cloud that the target is, in its present order, if it is one.
        """
        for k in range(len(self.clouds)):
            if k != source:
                self.permutations[k] = self.permutations[k][self._nearest_order(k, target, far=True)]
            self._report(progress, k)
        self._end_round(np.ones(len(target), bool))

    def align_in_turn(self, first: int, progress: AlignmentProgress | None = None) -> None:
        """Runs another first round: every cloud is aligned to the sum of those before it, beginning with `first`.

        Without a common order this comes as far as `align_all` and four rounds of `descend`.
        """
        total = self.rows(first, self.mean.dtype)
        for done, k in enumerate([first, *(k for k in range(len(self.clouds)) if k != first)]):
            if done:
                self.permutations[k] = self.permutations[k][self._nearest_order(k, total, far=True)]
                self._combine(np.add, total, k)
            self._report(progress, done)
        del total
        self._end_round(np.ones(len(self.mean), bool))

    def alternate(self, max_rounds: int, progress: AlignmentProgress | None = None) -> None:
        """Aligns all clouds to the mean, computes the mean, and repeats both until no order changes."""
        self.converged = False
        while not self.converged and len(self.objectives) < max_rounds:
            changed = np.zeros(len(self.mean), bool)
            self.moved = 0
            for k in range(len(self.clouds)):
                places, order, _ = self._better_order(k, self.mean)
                self.permutations[k][places] = order
                changed[places] = True
                self.moved += len(places)
                self._report(progress, k)
            self._end_round(changed)
            self.converged = not self.moved

    def descend(self, max_rounds: int, progress: AlignmentProgress | None = None, *, worth: float = 0.0) -> None:
        """Aligns one cloud after another to the sum of the others until no order changes.

        It also ends when all further rounds together would lower the objective by hardly twice `worth` of it. Without a
        common order the r-th round gains about 1 / r^2 of a constant, so the rounds after it gain one to two times r
        times as much as it did. The gain of the first round can then be predicted from its first quarter, if the clouds
        that were aligned last come first (except the very last, which is in its best order): the others are in the sums
        that these were aligned to, and gain less. All rounds together gain some two and a half times that (Gaussian
        clouds, up to 64 of 3000 points).

        This is coordinate descent on sum_{j<k} ||cloud j - cloud k||^2, which is E^2 times the objective. The sum
        leaves out the cloud itself, which would pull it to where it is already. So this escapes from most of the orders
        in which `alternate` is stuck: its fixed points are fixed points of `alternate` as well, but not the other way
        round.
        """
        count, apart = len(self.clouds), self._are_apart
        turns = [*reversed(range(count - 1)), count - 1] if apart else range(count)
        # Number of consecutive clouds that are in their best order. With two clouds, one is if the other is.
        settled, enough = 0, 1 if count == 2 else count
        done = 0
        self.converged = False
        while not self.converged and len(self.objectives) < max_rounds:
            changed = np.zeros(len(self.mean), bool)
            self.moved, gained, least = 0, 0.0, worth / (done + 1) * self.objective
            for number, k in enumerate(turns, start=1):
                places, order, gain = self._better_order(k, self._sum_of_others(k))
                self._move(k, places, order)
                changed[places] = True
                self.moved += len(places)
                gained += 2 * gain / count**2
                self._report(progress, number - 1)
                settled = 1 if len(places) else settled + 1
                if settled >= enough:
                    break
                if apart and not done and 4 * number >= count and 0 < gained * count / number < least / 2:
                    break
            self._end_round(changed)
            self.converged = settled >= enough
            done += 1
            if worth and self.objectives[-2] - self.objectives[-1] < least:
                break

    def _better_order(self, k: int, target: Float[np.ndarray, "n D"]) -> tuple[np.ndarray, np.ndarray, float]:
        """Places at which cloud k should have another point, these points, and the gain in <target, cloud k>.

        There are no places if the cloud is in the best order.
        """
        relative = self._nearest_order(k, target)
        places = np.flatnonzero(relative != np.arange(len(relative)))
        order = self.permutations[k][relative[places]]
        gain = 0.0
        for part in self._blocks(len(places)):
            difference = self._difference(k, places[part], order[part], np.float64)
            gain += float(np.einsum("id,id->", target[places[part]].astype(np.float64, copy=False), difference))
        # A step that gains only what rounding made up would let orders alternate for ever.
        if gain <= _LEAST_GAIN * self._squared_norm:
            return places[:0], order[:0], 0.0
        return places, order, gain

    def _nearest_order(self, k: int, target: Float[np.ndarray, "n D"], *, far: bool = False) -> Int[np.ndarray, " n"]:
        """The best order of cloud k, relative to its present one: between equal ones nothing moves.

        `far` says that the order is not yet near the target; it makes the search faster, and may choose another
        of equal cost.
        """
        if not self.is_small:
            return self._proven_order(k, target, far=far)
        if self._distinct:
            points, rounded = self.rows(k, np.float32), target.astype(np.float32, copy=False)
            costs = transport_costs(rounded, points)
            order = distinct_nearest(costs, rounded, points)
            if order is not None:
                return order
            self._distinct = False  # one cloud that needs a search is a sign that the others do, too
        target = target.astype(self.mean.dtype, copy=False)
        costs = transport_costs(target, self.rows(k, self.mean.dtype))
        return assign(reduce_costs(costs) if far else costs)

    def _proven_order(self, k: int, target: Float[np.ndarray, "n D"], *, far: bool) -> Int[np.ndarray, " n"]:
        cloud, order = self.clouds[k], self.permutations[k]

        def points(
            places: Int[np.ndarray, " r"] | slice, columns: slice, dtype: npt.DTypeLike
        ) -> Float[np.ndarray, "r m"]:
            return cloud[order[places], columns].astype(dtype, copy=False)

        if k not in self._squares:
            self._squares[k] = np.empty(len(order))
            for part in self._blocks(len(order)):
                rows = cloud[part].astype(np.float32, copy=False)
                self._squares[k][part] = np.einsum("id,id->i", rows, rows)
        guess = None if far else np.arange(len(order))
        found = nearest_order(
            target.astype(np.float32, copy=False),
            points,
            self._squares[k][order],
            guess=guess,
            may_be_common=not self._are_apart,
        )
        self._are_apart = not found.is_common
        self._unproven[k] = found.gap
        return found.order

    def _sum_of_others(self, k: int) -> Float[np.ndarray, "n D"]:
        total = self.mean * self.mean.dtype.type(len(self.clouds))
        self._combine(np.subtract, total, k)
        return total

    def _combine(self, operation: np.ufunc, total: Float[np.ndarray, "n D"], k: int) -> None:
        """Adds cloud k in its order to the total, or subtracts it."""

        def combine(part: slice) -> None:
            operation(total[part], self.rows(k, total.dtype, part), out=total[part])

        in_threads(combine, self._blocks(len(total)))

    def _move(self, k: int, places: Int[np.ndarray, " m"], order: Int[np.ndarray, " m"]) -> None:
        for part in self._blocks(len(places)):
            difference = self._difference(k, places[part], order[part], self.mean.dtype)
            self.mean[places[part]] += difference / self.mean.dtype.type(len(self.clouds))
        self.permutations[k][places] = order

    def _difference(self, k, places: np.ndarray, order: np.ndarray, dtype: npt.DTypeLike) -> Float[np.ndarray, "m D"]:
        return self.clouds[k][order].astype(dtype, copy=False) - self.rows(k, dtype, places)

    def _end_round(self, changed: np.ndarray) -> None:
        self._refresh(changed)
        self.objectives.append(self.objective)

    def _refresh(self, changed: np.ndarray) -> None:
        """Computes the mean and the deviations from it anew in the changed places, so that no error grows."""
        places, count = np.flatnonzero(changed), len(self.clouds)
        whole = len(places) == len(changed)

        def refresh(part: slice) -> float:
            block = part if whole else places[part]
            total = sum(self.rows(k, np.float64, block) for k in range(count))
            mean = np.asarray(total / count)
            self.mean[block] = mean
            deviations = np.zeros(len(mean))
            for k in range(count):
                difference = self.rows(k, np.float64, block) - mean
                deviations += np.einsum("id,id->i", difference, difference)
            self._deviations[block] = deviations
            return float(np.einsum("id,id->", mean, mean) + deviations.sum() / count)

        norms = in_threads(refresh, self._blocks(len(places)))
        if whole:
            self._squared_norm = sum(norms)

    def _blocks(self, count: int) -> Iterator[slice]:
        return row_blocks(count, self.mean.shape[1])

    def _report(self, progress: AlignmentProgress | None, k: int) -> None:
        if progress is not None:
            progress(len(self.objectives) + 1, k + 1, self.objectives[-1] if self.objectives else float("nan"))


def is_small(count: int, n: int, dim: int) -> bool:
    """Whether assignments of `count` clouds [n, D] are searched among all pairs, from products in float64."""
    return count * n * n * dim <= _SMALL_ROUND and working_dtype(n, dim) == np.float64


def canonical_order(clouds: Sequence[Float[np.ndarray, "n D"]]) -> tuple[list[int], Int[np.ndarray, "E n"]]:
    """Returns clouds in the order of their norms, the greatest first, and the orders of their points, the least first.

    Points of equal norm are sorted by their coordinates. Whatever is computed from the sorted clouds is then the same,
    bit for bit, if the clouds or their points are given in another order.
    """
    orders, norms = [], []
    for k, cloud in enumerate(clouds):
        squares = squared_row_norms(cloud, k)
        order = np.argsort(squares)
        ascending = squares[order]
        equal = ascending[1:] == ascending[:-1]
        tied = np.flatnonzero(np.append(equal, False) | np.append(False, equal))
        if len(tied):
            rows = order[tied]
            # The last key of a lexicographic sort comes first.
            order[tied] = rows[np.lexsort((*cloud[rows].astype(np.float64).T, squares[rows]))]
        orders.append(order.astype(np.int32))
        norms.append(float(ascending.sum()))
    keys = [(-norm, _digest(clouds[k], orders[k]) if norms.count(norm) > 1 else b"") for k, norm in enumerate(norms)]
    by_norm = sorted(range(len(clouds)), key=keys.__getitem__)
    return by_norm, np.stack([orders[k] for k in by_norm])


def squared_row_norms(cloud: Float[np.ndarray, "n D"], index: int) -> Float[np.ndarray, " n"]:
    """The squared norms of the points, float64; raises `InputError`, with the cloud's index, if one is not finite."""
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
        digest.update(cloud[order[rows]].tobytes())
    return digest.digest()
