"""Point clouds brought into one order, so that they lie as near to their mean as local search gets them."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from moe_jax.compress.transport import assign, inner_products, row_blocks, working_dtype

# Called after every alignment: the round (from 1), clouds done in it, and the objective after the last whole round.
Progress = Callable[[int, int, float], None]

# A new order is taken if it gains more than rounding could: a part of the squared norm of a cloud.
_LEAST_GAIN = 1e-13


class Matching:
    """E clouds, an order of each, and their mean. The memory is that of the mean and of one cloud at a time.

    Attributes:
      clouds: [n, D] each.
      permutations: Int32[E, n]; cloud k in its order is `clouds[k][permutations[k]]`.
      mean: [n, D] of the clouds in their orders, float64 if they are small and else float32.
      objectives: (1/E) sum_k ||cloud k in its order - mean||_F^2 after every round.
      converged: whether the last search ended because no order changed any more.
    """

    def __init__(self, clouds: Sequence[Float[np.ndarray, "n D"]], permutations: Int[np.ndarray, "E n"]):
        self.clouds = clouds
        self.permutations = np.array(permutations, np.int32)
        n, dim = clouds[0].shape
        self.mean = np.empty((n, dim), working_dtype(n, dim))
        self._deviations = np.empty(n)
        self._squared_norm = np.empty(n)
        self._refresh(np.arange(n))
        self.objectives = [self.objective]
        self.converged = False

    @property
    def objective(self) -> float:
        """(1/E) sum_k ||cloud k in its order - mean||_F^2."""
        return float(self._deviations.sum()) / len(self.clouds)

    def align_all(self, target: Float[np.ndarray, "n D"], progress: Progress | None = None) -> None:
        """Gives every cloud the order nearest to the target, whatever its order was."""
        for k in range(len(self.clouds)):
            self.permutations[k] = self.permutations[k][self._nearest_order(k, target)]
            self._report(progress, k)
        self._refresh(np.arange(len(target)))
        self.objectives = [self.objective]

    def alternate(self, max_rounds: int, progress: Progress | None = None) -> None:
        """Aligns all clouds to the mean, takes the mean, and so on until no order changes."""
        self.converged = False
        while not self.converged and len(self.objectives) < max_rounds:
            changed = np.zeros(len(self.mean), bool)
            for k in range(len(self.clouds)):
                changed |= self._improve(k, self.mean)
                self._report(progress, k)
            self._end_round(changed)
            self.converged = not changed.any()

    def descend(self, max_rounds: int, progress: Progress | None = None) -> None:
        """Aligns one cloud after another to the sum of the others until no order changes.

        This is coordinate descent on sum_{j<k} ||cloud j - cloud k||^2 = E^2 times the objective. Without a cloud's own
        pull towards where it is, it leaves most of the orders in which `alternate` gets stuck: its fixed points are
        fixed points there as well, and not the other way round.
        """
        count = len(self.clouds)
        unchanged = 0
        self.converged = False
        while not self.converged and len(self.objectives) < max_rounds:
            for k in range(count):
                changed = np.flatnonzero(self._improve(k, self._sum_of_others(k)))
                self._refresh(changed)
                self._report(progress, k)
                unchanged = 0 if len(changed) else unchanged + 1
                # The others of cloud k + 1 are then as they were when it was aligned last.
                if unchanged >= count:
                    break
            self.objectives.append(self.objective)
            self.converged = unchanged >= count

    def _improve(self, k: int, target: Float[np.ndarray, "n D"]) -> np.ndarray:
        """Gives cloud k the best order if it is better; bool[n], the rows that changed."""
        order = self._nearest_order(k, target)
        places = np.flatnonzero(order != np.arange(len(order)))
        proposed = self.permutations[k][order]
        gain = 0.0
        for block in self._blocks(places):
            moved = self._rows(k, proposed[block], np.float64) - self._rows(k, self.permutations[k][block], np.float64)
            gain += float(np.einsum("id,id->", target[block].astype(np.float64, copy=False), moved))
        changed = np.zeros(len(order), bool)
        # A step that gains only what rounding made up would let orders alternate for ever.
        if gain > _LEAST_GAIN * self._squared_norm.sum():
            self.permutations[k] = proposed
            changed[places] = True
        return changed

    def _nearest_order(self, k: int, target: Float[np.ndarray, "n D"]) -> Int[np.ndarray, " n"]:
        """The best order of cloud k, relative to the one it has: between equal ones nothing moves."""
        points = self._rows(k, self.permutations[k], self.mean.dtype)
        scores = inner_products(target.astype(self.mean.dtype, copy=False), points)
        del points  # Before SciPy makes its float64 copy of the scores.
        return assign(scores)

    def _sum_of_others(self, k: int) -> Float[np.ndarray, "n D"]:
        total = self.mean * self.mean.dtype.type(len(self.clouds))
        for block in self._blocks(np.arange(len(total))):
            total[block] -= self._rows(k, self.permutations[k][block], total.dtype)
        return total

    def _refresh(self, rows: Int[np.ndarray, " m"]) -> None:
        """Takes the mean and the deviations from it anew in some rows: nothing is kept that could drift."""
        count = len(self.clouds)
        for block in self._blocks(rows):
            total, squares = 0.0, 0.0
            for k in range(count):
                values = self._rows(k, self.permutations[k][block], np.float64)
                total = total + values
                squares = squares + np.einsum("id,id->i", values, values)
            mean = total / count
            self.mean[block] = mean
            self._squared_norm[block] = squares / count
            self._deviations[block] = sum(
                _squared_distance(self._rows(k, self.permutations[k][block], np.float64), mean) for k in range(count)
            )

    def _rows(self, k: int, rows: Int[np.ndarray, " m"], dtype: np.dtype) -> Float[np.ndarray, "m D"]:
        return self.clouds[k][rows].astype(dtype, copy=False)

    def _blocks(self, rows: Int[np.ndarray, " m"]) -> list[Int[np.ndarray, " b"]]:
        return [rows[part] for part in row_blocks(len(rows), self.mean.shape[1])]

    def _end_round(self, changed: np.ndarray) -> None:
        self._refresh(np.flatnonzero(changed))
        self.objectives.append(self.objective)

    def _report(self, progress: Progress | None, k: int) -> None:
        if progress is not None:
            progress(len(self.objectives), k + 1, self.objectives[-1])


def _squared_distance(points: Float[np.ndarray, "m D"], target: Float[np.ndarray, "m D"]) -> Float[np.ndarray, " m"]:
    difference = points - target
    return np.einsum("id,id->i", difference, difference)
