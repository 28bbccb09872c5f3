"""Finds the order of a large cloud that is nearest to a target, with no more products than its proof needs.

At first products are computed from an eighth of the columns, and bounded: by Cauchy and Schwarz the rest of a product
is at most the product of the norms of the remaining parts of two points. If clouds have a common origin, this proves
for most rows which point is nearest. Only the other rows continue, with twice as many columns, and the last of them are
searched with all costs known (`assign_proven`). A planted order takes an eighth or a quarter of the whole product.

Clouds without a common order take the whole product, once. It is computed from numbers rounded to bfloat16 and summed
in float32, which is twice as fast on CPUs with such products. Single products do not matter there: errors of 2^-9 of
the factors, with independent signs, are 1e-3 of the differences between the products of different points.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, Int

from moe_jax.compression.alignment.assignment import Pinned, assign_proven

# Parts of the columns after which rows are examined.
_PARTS = (1 / 8, 1 / 4, 1 / 2)
# Clouds have no common order, and bounds prove nothing before all columns are there, if fewer rows than the first share
# have their guess nearest after the first part, or without a guess, if fewer points than the second share are nearest
# to a row. For clouds without a common order the latter is 0.63.
_COMMON, _DISTINCT = 1 / 2, 0.8
# From this share of rows with all costs known, the others are computed, too: pinning them would save little.
_MANY = 1 / 4
# Accepted gap between an assignment and its proof, relative to the squared norms. Rounding leaves as much.
_TOLERANCE = 1e-6
# Products that are computed at a time.
_BLOCK_PRODUCTS = 2**23
# Numbers that the caches of a core hold.
_CACHED = 2**17

Points = Callable[[Int[np.ndarray, " r"] | slice, slice, npt.DTypeLike], Float[np.ndarray, "r m"]]
"""Returns some rows and columns of a cloud in a dtype."""

_COARSE = jnp.bfloat16


class NearestOrder(NamedTuple):
    """An order, and a proof of it."""

    order: Int[np.ndarray, " n"]  # int32; `points[order]` is nearest to the target
    # How much sum_i <target_i, points_order(i)> may be below the greatest, apart from the rounding of products.
    gap: float
    share: float  # of the n^2 D multiplications, the share that was made
    is_common: bool  # whether the clouds have a common order, so that products were computed in float32


def nearest_order(
    target: Float[np.ndarray, "n D"],
    points: Points,
    squares: Float[np.ndarray, " n"],
    *,
    guess: Int[np.ndarray, " n"] | None = None,
    may_be_common: bool = True,
) -> NearestOrder:
    """Returns the order of points that is nearest to the target, float32.

    `squares` are the points' squared norms, float64; `guess` is an order that may be the nearest one, None: the nearest
    points by the first columns are tried. Unless it `may_be_common`, the clouds' common order is not looked for.
    """
    search = _Search(target, points, squares, guess)
    is_common = may_be_common and search.prove()
    if not is_common:
        search.finish_coarsely()
    n = len(target)
    while True:
        found = assign_proven(search.costs(), search.rows, search.pinned(), tolerance=_TOLERANCE * search.scale)
        if not len(found.wanted):
            return NearestOrder(found.order, found.gap, search.made / (n * n * target.shape[1]), is_common)
        many = len(search.rows) + len(found.wanted) > _MANY * n
        search.complete(np.flatnonzero(search.pinned().columns >= 0) if many else found.wanted)


class _Search:
    """Scores <t_i, x_j> - |x_j|^2 / 2, as far as they are known."""

    def __init__(self, target: np.ndarray, points: Points, squares: np.ndarray, guess: np.ndarray | None):
        self._target, self._points, self._squares, self._guess = target, points, squares, guess
        n, self._dim = target.shape
        self._target_squares = np.einsum("id,id->i", target, target).astype(np.float64)
        eps = float(np.finfo(np.float32).eps)
        # Largest possible error of a sum of D products in float32.
        greatest = float(np.sqrt(self._target_squares.max() * squares.max()))
        self._rounding = 2 * self._dim * eps * (greatest + float(squares.max()) / 2)
        # The unit of costs of an assignment.
        self.scale = float(np.sqrt(self._target_squares.sum() * squares.sum()))
        self.rows = np.arange(n)  # whose scores are all known, or are being computed
        self.made = 0  # number of multiplications
        # Memory is taken only where it is written: rows that are proven early take none.
        self._products = np.empty((n, n), np.float32)
        self._columns, self._slack = np.full(n, -1), np.zeros(n)
        # CPUs have the products in their memory, and NumPy can look at them there, without copies.
        self._on_host = jax.default_backend() == "cpu"
        self._are_costs = 0  # number of rows whose products became costs
        self._multiplied = 0  # number of columns computed, for the remaining rows

    def prove(self) -> bool:
        """Computes products, part by part, until the nearest point of every row is proven or everything is known.

        Returns False if, after the first part, the clouds turn out to have no common order.
        """
        eps = float(np.finfo(np.float32).eps)
        # Remaining squared norms, rounded up.
        left_target = self._target_squares * (1 + self._dim * eps)
        left_points = self._squares * (1 + self._dim * eps)
        for part in (*_PARTS, 1.0):
            end = round(self._dim * part)
            if end == self._multiplied:
                continue
            columns = slice(self._multiplied, end)
            chunk = self._points(slice(None), columns, np.float32)
            if end == self._dim:
                self._finish(columns, chunk)
                return True
            self._multiplied = end
            left_target -= np.einsum("id,id->i", self._target[:, columns], self._target[:, columns])
            left_points -= np.einsum("id,id->i", chunk, chunk)
            if not self._look(columns, chunk, np.maximum(left_target, 0), np.maximum(left_points, 0)):
                return False
            if not len(self.rows):
                break
        self._unpin_twice()
        return True

    def finish_coarsely(self) -> None:
        """Computes all remaining products from numbers rounded to bfloat16."""
        remaining = slice(self._multiplied, self._dim)
        self._finish(remaining, self._points(slice(None), remaining, _COARSE))

    def _look(self, columns: slice, chunk: np.ndarray, left_target: np.ndarray, left_points: np.ndarray) -> bool:
        """Adds products of some columns and keeps the rows for which they prove nothing.

        Returns whether bounds are of use: False if hardly any row has its guess nearest.
        """
        n, first = len(self._target), columns.start == 0
        known = [
            array.astype(np.float32)
            for array in (np.sqrt(left_points), self._squares / 2, (self._squares - left_points) / 2)
        ]
        on_device = jnp.asarray(chunk)
        look: Any = _look_on_host
        if not self._on_host:
            look, known = _look_on_device, [jnp.asarray(array) for array in known]
        every_nearest = np.empty(len(rows := self.rows), np.int64)
        self.rows = np.empty_like(rows)
        kept = 0
        for begin, block, before in self._blocks(rows, first):
            inside = min(len(block), len(rows) - begin)
            guess = np.full(len(block), -1) if self._guess is None else self._guess[block]
            products = _added(jnp.asarray(self._target[block, columns]), before, on_device)
            left = np.sqrt(left_target[block]).astype(np.float32)
            nearest, second = look(products, left, guess.astype(np.int32), *known)
            nearest, second = np.asarray(nearest)[:inside], np.asarray(second, np.float64)[:inside]
            every_nearest[begin : begin + inside] = nearest
            block, guess = block[:inside], nearest if self._guess is None else guess[:inside]
            slack = self._own_scores(block, guess) - second - self._rounding
            proven = slack > 0
            self._columns[block[proven]], self._slack[block[proven]] = guess[proven], slack[proven]
            left = np.flatnonzero(~proven)
            self._products[kept : kept + len(left)] = np.asarray(products)[:inside][left]
            self.rows[kept : kept + len(left)] = block[left]
            kept += len(left)
        self.made += len(rows) * n * (columns.stop - columns.start)
        self.rows = self.rows[:kept]
        if not first:
            return True
        if self._guess is None:
            return len(np.unique(every_nearest)) >= _DISTINCT * n
        return bool(np.mean(every_nearest == self._guess[rows]) >= _COMMON)

    def _finish(self, columns: slice, chunk: np.ndarray) -> None:
        """Adds the products of all other columns to the remaining rows."""
        on_device, made = jnp.asarray(chunk), None
        for begin, block, before in self._blocks(self.rows, columns.start == 0):
            products = _added(jnp.asarray(self._target[block, columns].astype(chunk.dtype)), before, on_device)
            # One block is fetched while the next one is computed.
            self._keep(made)
            made = begin, products
        self._keep(made)
        self.made += len(self.rows) * len(self._target) * (columns.stop - columns.start)
        self._unpin_twice()

    def _keep(self, made: tuple[int, Array] | None) -> None:
        """Stores products of a block of the remaining rows; further rows in the last block are repeats."""
        if made is not None:
            begin, products = made
            done = min(begin + len(products), len(self.rows))
            self._products[begin:done] = np.asarray(products)[: done - begin]

    def _unpin_twice(self) -> None:
        """Computes all scores of rows that share their nearest point with another row."""
        held = np.flatnonzero(self._columns >= 0)
        columns, times = np.unique(self._columns[held], return_counts=True)
        twice = np.isin(self._columns[held], columns[times > 1])
        if twice.any():
            self.complete(held[twice])
        if len(self.rows) > _MANY * len(self._target):
            self.complete(np.flatnonzero(self._columns >= 0))

    def complete(self, rows: Int[np.ndarray, " r"]) -> None:
        """Computes all scores of rows that were pinned."""
        if not len(rows):
            return
        chunk = jnp.asarray(self._points(slice(None), slice(None), np.float32))
        known = len(self.rows)
        for begin, block, before in self._blocks(rows, True):
            done = min(begin + len(block), len(rows))
            products = _added(jnp.asarray(self._target[block]), before, chunk)
            self._products[known + begin : known + done] = np.asarray(products)[: done - begin]
        self.rows = np.append(self.rows, rows)
        self._columns[rows], self._slack[rows] = -1, 0
        self.made += len(rows) * len(self._target) * self._dim

    def costs(self) -> Float[np.ndarray, "r n"]:
        """Half the squared distances of the known rows, without the target's norm; overwrites the products."""
        halves = (self._squares / 2).astype(np.float32)
        costs = self._products[: len(self.rows)]
        new = costs[self._are_costs :]
        np.subtract(halves, new, out=new)
        self._are_costs = len(costs)
        return costs

    def pinned(self) -> Pinned:
        return Pinned(self._columns, self._slack)

    def _own_scores(self, rows: np.ndarray, columns: np.ndarray) -> Float[np.ndarray, " r"]:
        own = np.einsum("id,id->i", self._target[rows], self._points(columns, slice(None), np.float32))
        return own.astype(np.float64) - self._squares[columns] / 2

    def _blocks(self, rows: Int[np.ndarray, " r"], first: bool) -> Iterator[tuple[int, np.ndarray, Array]]:
        """The position of a block of rows, its rows (the last is repeated to fill it), and their products."""
        n = len(self._target)
        size = min(n, max(1, _BLOCK_PRODUCTS // n))
        for begin in range(0, len(rows), size):
            block = rows[begin : begin + size]
            more = size - len(block)
            before = jnp.zeros((1, 1), jnp.float32)
            if not first:
                before = jnp.asarray(np.pad(self._products[begin : begin + len(block)], ((0, more), (0, 0))))
            yield begin, np.append(block, np.repeat(block[-1], more)), before


@jax.jit
def _added(target: Float[Array, "b m"], before: Float[Array, "#b #n"], points: Float[Array, "n m"]) -> Array:
    # In full float32: TPUs would round to bfloat16 and GPUs to TF32, too coarse for a proof.
    return before + jnp.einsum("id,jd->ij", target, points, precision="highest", preferred_element_type=jnp.float32)


@jax.jit
def _look_on_device(
    products: Float[Array, "b n"],
    left_target: Float[Array, " b"],
    guess: Int[Array, " b"],
    left_points: Float[Array, " n"],
    halves: Float[Array, " n"],
    halves_so_far: Float[Array, " n"],
) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    """The nearest point by some columns, and the greatest score that a point other than the guess can have.

    Without a guess, which is then -1, the nearest point takes its place.
    """
    nearest = jnp.argmax(products - halves_so_far[None, :], axis=1).astype(jnp.int32)
    guess = jnp.where(guess < 0, nearest, guess)
    bounds = products + left_target[:, None] * left_points[None, :] - halves[None, :]
    others = jnp.arange(products.shape[1], dtype=jnp.int32)[None, :] != guess[:, None]
    return nearest, jnp.max(jnp.where(others, bounds, -jnp.inf), axis=1)


def _look_on_host(
    products: Float[Array, "b n"],
    left_target: Float[np.ndarray, " b"],
    guess: Int[np.ndarray, " b"],
    left_points: Float[np.ndarray, " n"],
    halves: Float[np.ndarray, " n"],
    halves_so_far: Float[np.ndarray, " n"],
) -> tuple[Int[np.ndarray, " b"], Float[np.ndarray, " b"]]:
    """Does the same, a few rows at a time, which stay in the cache."""
    values = np.asarray(products)
    nearest, second = np.empty_like(guess), np.empty(len(values), np.float32)
    rows = max(1, _CACHED // values.shape[1])
    for part in (slice(begin, begin + rows) for begin in range(0, len(values), rows)):
        scores = values[part] - halves_so_far
        nearest[part] = scores.argmax(axis=1)
        np.multiply(left_target[part, None], left_points, out=scores)
        scores += values[part]
        scores -= halves
        guessed = np.where(guess[part] < 0, nearest[part], guess[part])
        scores[np.arange(len(scores)), guessed] = -np.inf
        second[part] = scores.max(axis=1)
    return nearest, second
