"""Codes for the least change of outputs: each row makes up for the errors of those before it, and rows have scales.

*Feedback* (GPTQ, arXiv 2210.17323). A kernel W [i, o] is applied to inputs x, whose second moment is H = E[x x^T]. What
its codes Q change in the outputs is tr(E^T H E) for E = W - Q. With H = R R^T and R upper triangular this is a sum over
rows,

    sum_q R_qq^2 || t_q - Q_q ||^2,   t_q = W_q + sum_{j < q} (R_jq / R_qq) E_j,

so that row q is best rounded as t_q, and not as W_q, once the rows before it are. This is GPTQ's update, as Chee et al.
write it (QuIP, arXiv 2307.13304, section 3.1): the inverse of H is not needed. Beside it, scales are chosen for the
least squared error of the targets, each row with the weight R_qq^2 that it has in the sum.

*Order*: rows may be coded in another order than they are stored in, those of large inputs first, while their errors
still find many rows to make up for them (`act-order` in GPTQ's code). Scales then are chosen before, for the groups as
they are stored, by the errors of the kernel with weights R_qq^2.

*Row scales*, one for every input, stand beside those that groups of a column share (methods.md 4): a code stands for
`r_i s_go level`. Choosing codes for W with row scales r is choosing them for `W / r`, where an error of row i counts
`r_i` times: every method that codes a kernel can be used as it is.
"""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.compression.coding.quantizer import best_grid, fitted_table, nearest_codes, stored
from moe_jax.compression.threads import decomposing
from moe_jax.core.errors import InputError
from moe_jax.experts.forms.coding import Encoded
from moe_jax.functional.codes import SCALE_DTYPE, Grid

DAMPING = 0.01
"""The share of the mean of its diagonal that is added to the diagonal of a second moment: as published."""


def triangular_factor(moment: Float[np.ndarray, "i i"]) -> Float[np.ndarray, "i i"]:
    """Upper triangular R with R R^T = H + `DAMPING` mean(diag H) I, float32; the identity for a moment of zeros.

    Raises:
      InputError: if H is not symmetric and positive semi-definite.
    """
    level = float(np.mean(np.diagonal(moment), dtype=np.float64))
    if level == 0:
        return np.eye(len(moment), dtype=np.float32)
    # Upwards from the last row, Cholesky's decomposition gives the factor on the other side.
    for dtype in (np.float32, np.float64):  # rounding can make a moment indefinite that is nearly singular
        flipped = np.divide(moment[::-1, ::-1], np.float32(level), order="C").astype(dtype, copy=False)
        flipped[np.diag_indices_from(flipped)] += dtype(DAMPING)
        try:  # a symmetric matrix is its own transpose, which lies as LAPACK wants it: nothing is copied
            with decomposing(len(flipped)):
                upper = scipy.linalg.cholesky(flipped.T, lower=False, overwrite_a=True, check_finite=False)
        except scipy.linalg.LinAlgError:
            continue
        return np.multiply(upper.T[::-1, ::-1], np.float32(np.sqrt(level)), dtype=np.float32, order="C")
    raise InputError("a second moment is not positive semi-definite: the calibration is damaged; make it again")


# Rows that are coded one after another before the others in a part make up for all of their errors at once; and rows
# whose errors are taken into targets at once.
_ROWS_IN_TURN, _ROWS_BEFORE = 16, 1024


def code_each_row(
    rows: Float[Array, "s o"],
    targets: Float[Array, "s o"],
    shares: Float[Array, "s s"],
    grid_of_row: Callable[[Array], Grid],
    bits: int,
) -> tuple[Float[Array, "s o"], Float[Array, "s o"]]:
    """Codes rows one after another; returns their errors, and codes as floats.

    Args:
      rows: of the kernel.
      targets: of these, as far as they follow from the errors of rows before them.
      shares: R_jq / R_qq among them.
      grid_of_row: returns the grid of a row, given its number.
      bits: of a code.
    """
    count = len(rows)
    in_turn = _ROWS_IN_TURN if count % _ROWS_IN_TURN == 0 else count

    def code_some(errors: Float[Array, "s o"], start: Array) -> tuple[Float[Array, "s o"], Array]:
        shares_of_some = lax.dynamic_slice_in_dim(shares, start, in_turn, axis=1)
        own, reached = (lax.dynamic_slice_in_dim(of_rows, start, in_turn) for of_rows in (rows, targets))
        reached = reached + jnp.matmul(shares_of_some.T, errors, precision="highest")
        within = lax.dynamic_slice_in_dim(shares_of_some, start, in_turn)

        def code_row(own_errors: Float[Array, "n o"], row: Array) -> tuple[Float[Array, "n o"], Array]:
            target = reached[row] + jnp.matmul(within[:, row], own_errors, precision="highest")
            grid = grid_of_row(start + row)
            codes = nearest_codes(target, grid, bits)
            return own_errors.at[row].set(own[row] - grid.numbers(codes, bits)), codes

        found, codes = lax.scan(code_row, jnp.zeros_like(own), jnp.arange(in_turn, dtype=jnp.int32))
        return lax.dynamic_update_slice_in_dim(errors, found, start, 0), codes

    starts = jnp.arange(0, count, in_turn, dtype=jnp.int32)
    errors, codes = lax.scan(code_some, jnp.zeros_like(rows), starts)
    return errors, codes.reshape(rows.shape)


def _shares(factor: Float[Array, "i i"], diagonal: Float[Array, " i"], start: Array, size: int) -> Float[Array, "i s"]:
    """R_jq / R_qq for so many q; of all of them they would be as large as R."""
    some, own = (lax.dynamic_slice_in_dim(one, start, size, axis=-1) for one in (factor, diagonal))
    return some / own


def reached_targets(
    own: Float[Array, "s o"], shares: Float[Array, "i s"], errors: Float[Array, "i o"], start: Array
) -> Float[Array, "s o"]:
    """The targets of `s` rows from row `start` on, a multiple of s, as far as they follow from rows before.

    Only rows before take part in the products: half of what a product with all errors would be.

    Args:
      own: the rows of the kernel.
      shares: R_jq / R_qq, a column for each of these rows.
      errors: of all rows.
    """
    size = len(own)
    targets, begin = own, jnp.zeros_like(start)
    for rows in (max(1, _ROWS_BEFORE // size) * size, size):
        if rows > len(errors):
            continue

        def add(n: Array, targets: Array, rows: int = rows, begin: Array = begin) -> Float[Array, "s o"]:
            some, of_some = (lax.dynamic_slice_in_dim(one, begin + n * rows, rows) for one in (shares, errors))
            return targets + jnp.matmul(some.T, of_some, precision="highest")

        times = (start - begin) // rows
        targets, begin = lax.fori_loop(0, times, add, targets), begin + times * rows
    return targets


_STATIC = ("bits", "group_size", "fit", "even", "table", "scale_bits", "zero_points", "whole_zeros")


@partial(jax.jit, static_argnames=_STATIC)
def quantize_with_feedback(
    kernel: Float[Array, "i o"],
    factor: Float[Array, "i i"],
    *,
    bits: int,
    group_size: int | None,
    fit: bool = True,
    even: bool = False,
    table: bool = False,
    scale_bits: int = 16,
    zero_points: bool = False,
    whole_zeros: bool = False,
) -> Encoded:
    """Quantises a float32 kernel for the least change of the outputs, given R of its inputs' second moment.

    Options are those of `quantize`. A scale that all entries share, and a table, are chosen for the kernel as it is.
    """
    rows, width = kernel.shape
    size = min(rows, 128) if group_size is None else group_size
    padding = -rows % size
    # Rows that only fill up the last group have no weight, and no part in the errors of others.
    kernel = jnp.pad(kernel, ((0, padding), (0, 0)))
    diagonal = jnp.diagonal(factor)
    weights = jnp.pad((diagonal / jnp.max(diagonal)) ** 2, (0, padding))[:, None]
    if padding:
        factor, diagonal = (
            jnp.pad(factor, ((0, padding), (0, padding))),
            jnp.pad(diagonal, (0, padding), constant_values=1),
        )
    levels = None
    if table:
        by_group = (1, -1, width) if group_size is None else (-1, size, width)
        levels = fitted_table(
            kernel.reshape(by_group), weights.reshape(*by_group[:2], 1), bits=bits, whole=group_size is None
        )
    choose = partial(
        best_grid,
        bits=bits,
        fit=fit,
        even=even,
        scale_bits=scale_bits,
        zero_points=zero_points,
        whole_zeros=whole_zeros,
        table=levels,
    )
    common = choose(kernel[None], weights[None], whole=True) if group_size is None else None

    def code_group(errors: Float[Array, "i o"], start: Array) -> tuple[Float[Array, "i o"], tuple[Array, Grid]]:
        shares_of_group = _shares(factor, diagonal, start, size)
        own = lax.dynamic_slice_in_dim(kernel, start, size)
        targets = reached_targets(own, shares_of_group, errors, start)
        group_weights = lax.dynamic_slice_in_dim(weights, start, size)
        grid = choose(targets[None], group_weights[None], whole=False) if common is None else common
        of_row = jax.tree.map(lambda scales: scales[0, 0], grid._replace(table=None))._replace(table=levels)
        within = lax.dynamic_slice_in_dim(shares_of_group, start, size)

        row_errors, codes = code_each_row(own, targets, within, lambda row: of_row, bits)
        return lax.dynamic_update_slice_in_dim(errors, row_errors, start, 0), (codes, of_row._replace(table=None))

    starts = jnp.arange(0, rows + padding, size, dtype=jnp.int32)
    _, (codes, grids) = lax.scan(code_group, jnp.zeros_like(kernel), starts)
    grid = jax.tree.map(lambda scales: scales[:, None, :], grids)._replace(table=levels) if common is None else common
    return stored(codes, grid, rows, bits, group_size, scale_bits)


def order_of_inputs(moment: Float[np.ndarray, "i i"]) -> Int[np.ndarray, " i"]:
    """The rows in the order in which `quantize_in_order` codes them: those of the largest inputs first."""
    return np.argsort(-np.diagonal(moment), kind="stable").astype(np.int32)


_ROWS_AT_ONCE = 128


@partial(jax.jit, static_argnames=_STATIC)
def quantize_in_order(
    kernel: Float[Array, "i o"],
    factor: Float[Array, "i i"],
    order: Int[Array, " i"],
    *,
    bits: int,
    group_size: int | None,
    fit: bool = True,
    even: bool = False,
    table: bool = False,
    scale_bits: int = 16,
    zero_points: bool = False,
    whole_zeros: bool = False,
) -> Encoded:
    """Quantises as `quantize_with_feedback`, with the rows in an order, and all scales chosen before.

    Args:
      kernel: float32.
      factor: R of the second moment of its inputs in that order.
      order: the rows.
      bits, group_size, fit, even, table, scale_bits, zero_points, whole_zeros: those of `quantize`.
    """
    rows, width = kernel.shape
    size = rows if group_size is None else group_size
    diagonal = jnp.diagonal(factor)
    weights = jnp.zeros(rows, jnp.float32).at[order].set(jnp.square(diagonal / jnp.max(diagonal)))
    padding = ((0, -rows % size), (0, 0))
    groups = jnp.pad(kernel, padding).reshape(-1, size, width)
    counts = jnp.pad(weights[:, None], padding).reshape(-1, size, 1)
    whole = group_size is None
    levels = fitted_table(groups, counts, bits=bits, whole=whole) if table else None
    grid = best_grid(
        groups,
        counts,
        bits=bits,
        whole=whole,
        fit=fit,
        even=even,
        scale_bits=scale_bits,
        zero_points=zero_points,
        whole_zeros=whole_zeros,
        table=levels,
    )

    def by_row(scales: Float[Array, "g 1 _"]) -> Float[Array, "n _"]:
        return jnp.pad(jnp.repeat(scales[:, 0], size, axis=0)[order], ((0, -rows % _ROWS_AT_ONCE), (0, 0)))

    of_rows = jax.tree.map(by_row, grid._replace(table=None))
    more = -rows % _ROWS_AT_ONCE  # rows without weight, which have no part in the errors of others
    ordered = jnp.pad(kernel[order], ((0, more), (0, 0)))
    if more:
        factor, diagonal = jnp.pad(factor, ((0, more), (0, more))), jnp.pad(diagonal, (0, more), constant_values=1)

    def code_rows(errors: Float[Array, "n o"], start: Array) -> tuple[Float[Array, "n o"], Array]:
        shares_of_part = _shares(factor, diagonal, start, _ROWS_AT_ONCE)
        own = lax.dynamic_slice_in_dim(ordered, start, _ROWS_AT_ONCE)
        targets = reached_targets(own, shares_of_part, errors, start)
        within = lax.dynamic_slice_in_dim(shares_of_part, start, _ROWS_AT_ONCE)

        def grid_of_row(row: Array) -> Grid:
            return jax.tree.map(lambda scales: scales[start + row], of_rows)._replace(table=levels)

        row_errors, codes = code_each_row(own, targets, within, grid_of_row, bits)
        return lax.dynamic_update_slice_in_dim(errors, row_errors, start, 0), codes

    starts = jnp.arange(0, rows + more, _ROWS_AT_ONCE, dtype=jnp.int32)
    _, codes = lax.scan(code_rows, jnp.zeros_like(ordered), starts)
    back = jnp.zeros((rows + padding[0][1], width), codes.dtype).at[order].set(codes.reshape(-1, width)[:rows])
    return stored(back.reshape(-1, size, width), grid, rows, bits, group_size, scale_bits)


_ROUNDS = 10
_POWERS = tuple(n / 10 for n in range(1, 11))
# The errors of candidates are compared on so many columns.
_COLUMNS = 128


def scales_of_magnitudes(
    kernel: Float[np.ndarray, "i o"], group_size: int | None, weights: Float[np.ndarray, " i"] | None = None
) -> Float[np.ndarray, " i"]:
    """r for which `r_i s_go` comes nearest to `|W_io|`, by alternating least squares; as stored, float32.

    For codes of one bit, whose levels are -1 and 1, this is the least squared error of all (as in OneBit, arXiv
    2402.11295, section 3.2, but with a scale for every group of a column).

    Rows of a group share scales s; without a group size all, of all columns. Weights are those of the squared errors of
    rows, not negative; None: all alike.
    """
    rows = len(kernel)
    size, sizes = group_size or rows, np.abs(kernel)
    weights = np.ones(rows, np.float32) if weights is None else weights
    scales = np.ones(rows, np.float32)
    for start in range(0, rows, size):
        part, counted = sizes[start : start + size], weights[start : start + size, None]
        if group_size is None:
            scales[:] = part.mean(axis=1)  # one s for all columns: the mean is the least squares
            continue
        own = np.sqrt(np.mean(part**2, axis=1))
        for _ in range(_ROUNDS):
            columns = _ratio((counted * own[:, None] * part).sum(axis=0), (counted[:, 0] * own**2).sum())
            own = _ratio((part * columns).sum(axis=1), (columns**2).sum())
        scales[start : start + size] = own
    return as_stored(scales)


def candidates(
    kernel: Float[np.ndarray, "i o"], group_size: int | None, moment: Float[np.ndarray, "i i"]
) -> Iterator[Float[np.ndarray, " i"]]:
    """Row scales to choose from: none, those of the entries' sizes, and `a^-p` for the sizes a of the inputs.

    The latter are AWQ's (arXiv 2306.00978, section 3.2): rows of large inputs get finer codes.
    """
    diagonal = np.diagonal(moment).astype(np.float32)
    yield np.ones(len(kernel), np.float32)
    yield scales_of_magnitudes(kernel, group_size, diagonal if diagonal.any() else None)
    inputs = np.sqrt(diagonal)
    if inputs.any():
        # An input that is never there would get the coarsest codes, and its group with it.
        inputs = np.maximum(inputs, 1e-4 * inputs.max())
        for power in _POWERS:
            yield as_stored(inputs**-power)


def best_row_scales(
    kernel: Float[np.ndarray, "i o"],
    group_size: int | None,
    moment: Float[np.ndarray, "i i"],
    coded: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Float[np.ndarray, " i"]:
    """The `candidates` with which codes change the outputs least, tr(E^T H E), on some of the columns.

    `coded` returns what the codes of a kernel stand for, given the kernel divided by row scales, and these.
    """
    columns = np.unique(np.linspace(0, kernel.shape[1] - 1, min(kernel.shape[1], _COLUMNS)).astype(int))
    some = np.ascontiguousarray(kernel[:, columns])
    best, least = np.ones(len(kernel), np.float32), np.inf
    for scales in candidates(some, group_size, moment):
        error = coded(some / scales[:, None], scales) * scales[:, None] - some
        cost = float(np.sum(error * (moment @ error), dtype=np.float64))
        if cost < least:
            best, least = scales, cost
    return best


def as_stored(scales: Float[np.ndarray, " i"]) -> Float[np.ndarray, " i"]:
    """Around 1, in `SCALE_DTYPE`'s precision; next to nothing for rows of zeros, which have nothing but signs."""
    there = scales > 0
    if not there.any():
        return np.ones_like(scales)
    scales = np.clip(scales / np.exp(np.mean(np.log(scales[there]))), 1e-6, 1e6)
    return scales.astype(SCALE_DTYPE).astype(np.float32)


def _ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return (top / bottom if bottom > 0 else np.zeros_like(top)).astype(np.float32)
