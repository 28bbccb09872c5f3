"""Kernels as codes and a scale per group (methods.md 4); `functional.codes` says what these stand for."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import ndtri
from jaxtyping import Array, Float, Int

from moe_jax.experts.forms.coding import Encoded
from moe_jax.functional.codes import SCALE_DTYPE, Grid, dequantize, pack, scale_leaves, scales_of, zero_leaf, zeros_of

# The span of the levels as a share of that of the entries, from which fitting begins.
_SPAN_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
# Then codes, and scale and zero point, are fitted to each other so often.
_LINE_ROUNDS = 3


def asymmetric_grid(
    groups: Float[Array, "g s o"],
    weights: Float[Array, "g s 1"],
    *,
    bits: int,
    scale_bits: int,
    fit: bool,
    whole_zeros: bool = False,
) -> Grid:
    """The grid of least squared error with zero points, as it will be read: scales and zero points [g, 1, o].

    Without `fit`, the least and the greatest entry are the first and the last level (but for rounding). Rows without
    weight do not count. With `whole_zeros`, zero points are codes themselves, from 1 on.
    """

    def read(grid: Grid) -> Grid:
        assert grid.zeros is not None
        zeros = jnp.clip(jnp.round(grid.zeros), 1, 2**bits - 1) if whole_zeros else grid.zeros
        return read_grid(grid._replace(zeros=zeros), bits, scale_bits)

    def better(best: tuple[Array, Grid], grid: Grid) -> tuple[Array, Grid]:
        grid = read(grid)
        difference = grid.numbers(_nearest_with_zeros(groups, grid, bits), bits) - groups
        found = _row_sums(weights, difference**2), grid
        return jax.tree.map(lambda new, old: jnp.where(found[0] < best[0], new, old), found, best)

    def refit(best: tuple[Array, Grid], _: None) -> tuple[tuple[Array, Grid], None]:
        codes = _nearest_with_zeros(groups, best[1], bits)
        if whole_zeros:
            best = better(best, _slope(groups, codes, weights, best[1]))
        return better(best, _line(groups, codes, weights, best[1])), None

    least, greatest = spans(groups, weights)
    start = read(_around(least, greatest, 1.0, bits))
    if not fit:
        return start
    best = jnp.full(least.shape, jnp.inf, jnp.float32), start
    for share in _SPAN_SHARES:
        best = better(best, _around(least, greatest, share, bits))
    (_, grid), _ = lax.scan(refit, best, None, length=_LINE_ROUNDS)
    return grid


def _nearest_with_zeros(groups: Float[Array, "g s o"], grid: Grid, bits: int) -> Float[Array, "g s o"]:
    """The code of the nearest level for every entry, as floats."""
    assert grid.zeros is not None
    steps = jnp.where(grid.scales == 0, 0, groups / jnp.where(grid.scales == 0, 1, 2 * grid.scales))
    return jnp.clip(jnp.floor(steps + grid.zeros + 0.5), 0, 2**bits - 1)


def spans(
    groups: Float[Array, "g s o"], weights: Float[Array, "g s 1"]
) -> tuple[Float[Array, "g 1 o"], Float[Array, "g 1 o"]]:
    """The least and the greatest entry of every group, or zero where all are above or below it: it is on the grid."""
    counted = jnp.where(weights > 0, groups, 0)
    least, greatest = (each(counted, axis=1, keepdims=True) for each in (jnp.min, jnp.max))
    return jnp.minimum(least, 0), jnp.maximum(greatest, 0)


def read_grid(grid: Grid, bits: int, scale_bits: int) -> Grid:
    """A grid with zero points as it will be read once it is stored."""
    assert grid.zeros is not None
    scales = scales_of(scale_leaves(grid.scales[:, 0, :], scale_bits))[:, None, :]
    return Grid(scales, None, zeros_of(zero_leaf(grid.zeros, bits), bits))


def _around(least: Array, greatest: Array, share: float, bits: int) -> Grid:
    """Levels that span so much of what lies between two numbers, around its middle."""
    scales = share * (greatest - least) / (2 * (2**bits - 1))
    middle = (greatest + least) / 2 / jnp.where(scales == 0, 1, 2 * scales)
    return Grid(scales, None, (2**bits - 1) / 2 - middle)


def _line(groups: Array, codes: Array, weights: Array, grid: Grid) -> Grid:
    """Scale and zero point of the straight line through entries over codes; those of `grid` where there is none."""
    assert grid.zeros is not None

    def mean(terms: Array) -> Array:
        total = jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        return _row_sums(weights, terms) / total

    of_codes, of_entries = mean(codes), mean(groups)
    spread = mean((codes - of_codes) ** 2)
    slope = mean((codes - of_codes) * (groups - of_entries)) / jnp.where(spread > 0, spread, 1)
    is_line = slope > 0
    zeros = of_codes - of_entries / jnp.where(is_line, slope, 1)
    return Grid(jnp.where(is_line, slope / 2, grid.scales), None, jnp.where(is_line, zeros, grid.zeros))


def _slope(groups: Array, codes: Array, weights: Array, grid: Grid) -> Grid:
    """Scale of the straight line through entries over codes that is zero at the zero point of `grid`."""
    assert grid.zeros is not None
    from_zero = codes - grid.zeros
    squares = _row_sums(weights, from_zero**2)
    slope = _row_sums(weights, from_zero * groups) / jnp.where(squares > 0, squares, 1)
    return grid._replace(scales=jnp.where(slope > 0, slope / 2, grid.scales))


# Where the search for a scale begins: the largest level as a share of the largest absolute value of a group. On the odd
# grid each is only the neighbourhood of a best scale, which least squares then finds.
_ODD_SHARES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
# The even grid is for groups with outliers, where the error has many minima: more of them, and smaller ones for whole
# kernels (Student's t with 3 degrees of freedom, 2 bits, levels -1, 0 and 1: error 0.91 without them, 0.74 with them).
_EVEN_SHARES = (*(n / 20 for n in range(20, 1, -1)), 0.07, 0.05, 0.035, 0.025)
# Of the levels of a table, whose largest may be on the side of the smaller entries of a group.
_TABLE_SHARES = (*(1.3 - n / 20 for n in range(21)), 0.2, 0.1, 0.05)
# Then codes and scale are fitted to each other so often. More rounds gain less than 0.1 % of the error.
_FITTING_ROUNDS = 3

# Rounds in which a table and the scales are fitted to each other. Twice as many gain less than 0.1 % of the error.
_TABLE_ROUNDS = 12


@partial(
    jax.jit, static_argnames=("bits", "group_size", "fit", "even", "table", "scale_bits", "zero_points", "whole_zeros")
)
def quantize(
    kernel: Float[Array, "i o"],
    *,
    bits: int,
    group_size: int | None,
    fit: bool = True,
    count: Int[Array, ""] | int | None = None,
    weights: Float[Array, " i"] | None = None,
    even: bool = False,
    table: bool = False,
    scale_bits: int = 16,
    zero_points: bool = False,
    whole_zeros: bool = False,
) -> Encoded:
    """Quantises: leaves as `packing` describes them. Codes are chosen for scales, and a table, as stored.

    Args:
      kernel: float32.
      bits: of a code. One bit has a rule of its own, whatever `fit`: the sign, that of zero being +1, times the mean
        absolute value, which has the least squared error.
      group_size: rows that share a scale; None: one scale for all entries.
      fit: choose grid and scale of every group for the least squared error. Otherwise the grid is the odd one, and its
        largest level is the largest absolute value of the group.
      count: rows that matter; what follows them has no influence on the scales. None: all.
      weights: of the squared errors of rows, when scales are chosen; None: all alike.
      even: every group is on the even grid, which has a zero, with a fitted scale; not for one bit.
      table: the kernel has a table of levels of its own, fitted together with its scales.
      scale_bits: of a scale, 16 or 8: see `functional.codes`.
      zero_points: every group has a zero point beside its scale.
      whole_zeros: it is a code itself, from 1 on, as formats of other libraries have it.
    """
    rows, width = kernel.shape
    size = rows if group_size is None else group_size
    groups = jnp.pad(kernel, ((0, -rows % size), (0, 0))).reshape(-1, size, width)
    rows_of_group = size * jnp.arange(groups.shape[0], dtype=jnp.int32)[:, None] + jnp.arange(size, dtype=jnp.int32)
    counted = (rows_of_group < (rows if count is None else count))[:, :, None]
    groups = jnp.where(counted, groups, 0)
    whole = group_size is None
    counts = counted.astype(jnp.float32)
    if weights is not None:
        largest = jnp.maximum(jnp.max(weights), jnp.finfo(jnp.float32).tiny)
        counts = counts * jnp.pad(weights / largest, (0, -rows % size)).reshape(-1, size)[:, :, None]
    levels = fitted_table(groups, counts, bits=bits, whole=whole) if table else None
    choose = partial(
        best_grid,
        bits=bits,
        fit=fit,
        even=even,
        scale_bits=scale_bits,
        zero_points=zero_points,
        whole_zeros=whole_zeros,
    )
    grid = choose(groups, counts, whole=whole, table=levels)
    return stored(nearest_codes(groups, grid, bits), grid, rows, bits, group_size, scale_bits)


def stored(
    codes: Float[Array, "g s o"], grid: Grid, rows: int, bits: int, group_size: int | None, scale_bits: int
) -> Encoded:
    """The leaves of a kernel of so many rows (others only fill up the last group) and what they stand for, float32.

    Codes are floats, group by group; the grid of the groups, [g, 1, o], is as it will be read.
    """
    packed = pack(codes.astype(jnp.int32).reshape(-1, codes.shape[-1])[:rows], bits)
    leaves = {"codes": packed, **scale_leaves(grid.scales[:, 0, :], scale_bits)}
    if grid.table is not None:
        leaves["table"] = grid.table.astype(SCALE_DTYPE)
    zeros = None
    if grid.zeros is not None:
        zeros = grid.zeros[:, 0, :]
        leaves["zeros"] = zero_leaf(zeros, bits)
    scales = scales_of(leaves)
    return Encoded(leaves, dequantize(packed, scales, rows, bits, group_size, jnp.float32, grid.table, zeros))


def best_grid(
    groups: Float[Array, "g s o"],
    weights: Float[Array, "g s 1"],
    *,
    bits: int,
    whole: bool,
    fit: bool,
    even: bool,
    scale_bits: int,
    zero_points: bool,
    whole_zeros: bool = False,
    table: Float[Array, " n"] | None = None,
) -> Grid:
    """The grids of groups of entries, [g, 1, o], as they will be read; see `quantize` and `best_scales`."""
    if zero_points:
        return asymmetric_grid(groups, weights, bits=bits, scale_bits=scale_bits, fit=fit, whole_zeros=whole_zeros)
    scales = best_scales(groups, weights, bits=bits, whole=whole, fit=fit, even=even, table=table)
    return Grid(scales_of(scale_leaves(scales, scale_bits)), table)


def fitted_table(
    groups: Float[Array, "g s o"], weights: Float[Array, "g s 1"], *, bits: int, whole: bool
) -> Float[Array, " n"]:
    """The levels that, times a scale for each group, come nearest to the entries; ascending, up to 1, as stored.

    Lloyd's algorithm (1957) on entries by their scales: codes, levels and scales in turn, each best for the others. A
    level is the mean of the entries that have it, `sum(w s v) / sum(w s^2)`. Arguments are those of `best_scales`.
    """
    number = 2**bits

    def improve(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        table, scales = state
        codes, weighted = nearest_codes(groups, Grid(scales, table), bits), weights * scales
        # Sums of groups first: one float32 sum would lose most of 10^8 terms.
        masks = [jnp.where(codes == code, weighted, 0) for code in range(number)]
        tops = jnp.stack([jnp.sum(jnp.sum(mask * groups, axis=1)) for mask in masks])
        bottoms = jnp.stack([jnp.sum(jnp.sum(mask * scales, axis=1)) for mask in masks])
        table = jnp.sort(jnp.where(bottoms > 0, tops / jnp.where(bottoms > 0, bottoms, 1), table))
        return (table, _better_sign(groups, weights, scales, table, bits, whole)), None

    # Near where the levels of normal numbers would be that all are alike often; but not symmetric, so that the sign of
    # a scale is a choice: of symmetric ones, symmetric entries would make a symmetric table (8 % more error at 3 bits).
    start = ndtri((jnp.arange(number, dtype=jnp.float32) + 0.3) / number)
    start = start / jnp.max(jnp.abs(start))
    scales = best_scales(groups, weights, bits=bits, whole=whole, fit=True, table=start)
    (table, _), _ = lax.scan(improve, (start, scales), None, length=_TABLE_ROUNDS)
    return _stored(table / jnp.max(jnp.abs(table)))


def _better_sign(
    groups: Float[Array, "g s o"],
    weights: Float[Array, "g s 1"],
    scales: Float[Array, "g 1 o"],
    table: Float[Array, " n"],
    bits: int,
    whole: bool,
) -> Float[Array, "g 1 o"]:
    """Scales of either sign, fitted to the codes that they or their opposites give, whichever leave less error."""
    tried = []
    for start in (scales, -scales):
        levels = Grid(jnp.ones_like(start), table).numbers(nearest_codes(groups, Grid(start, table), bits), bits)
        squares = _total(weights, levels**2, whole)
        products = _total(weights, groups * levels, whole)
        unit = jnp.where(squares > 0, squares, 1)
        tried.append((products**2 / unit, jnp.where(squares > 0, products / unit, start)))
    (gain, fitted), (other_gain, other) = tried
    return jnp.where(other_gain > gain, other, fitted)


def best_scales(
    groups: Float[Array, "g s o"],
    weights: Float[Array, "g s 1"],
    *,
    bits: int,
    whole: bool,
    fit: bool,
    even: bool = False,
    table: Float[Array, " n"] | None = None,
) -> Float[Array, "g 1 o"]:
    """The scales of groups of float32 entries, as they will be read: after rounding to bfloat16.

    Weights are those of the squared errors of rows, not negative. If they are `whole`, all entries share one scale,
    [1, 1, 1]. Without a table of levels, up to 1, these are those of `functional.codes`.
    """

    def total(terms: Float[Array, "g s o"]) -> Float[Array, "g 1 o"]:
        return _total(weights, terms, whole)

    if bits == 1:
        members = jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        # A mean of means and not one sum: float32 would lose most of 10^8 terms.
        means = _row_sums(weights, jnp.abs(groups)) / members
        return _stored(jnp.mean(means, axis=2, keepdims=True) if whole else means)
    largest = jnp.max(jnp.where(weights > 0, jnp.abs(groups), 0), axis=(1, 2) if whole else 1, keepdims=True)
    if not fit and not even and table is None:
        return _stored(largest / (2**bits - 1))

    def better(best: tuple[Array, Array], scales: Array) -> tuple[Array, Array]:
        grid = Grid(scales, table)
        error = total((grid.numbers(nearest_codes(groups, grid, bits), bits) - groups) ** 2)
        is_better = error < best[0]
        return jnp.where(is_better, error, best[0]), jnp.where(is_better, scales, best[1])

    def try_share(best: tuple[Array, Array], share: Array) -> tuple[tuple[Array, Array], None]:
        return better(best, _stored(largest * share)), None

    def refit(best: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        scales = best[1]
        levels = Grid(jnp.sign(scales), table).numbers(nearest_codes(groups, Grid(scales, table), bits), bits)
        squares = total(levels**2)
        fitted = jnp.where(squares > 0, total(groups * levels) / squares, 0)
        # Codes that were chosen for a scale correlate with what they stand for: the sign stays, and with it the grid.
        return better(best, _stored(jnp.sign(scales) * fitted)), None

    if table is not None:
        shares = [sign * share for share in _TABLE_SHARES for sign in (1, -1)]
    else:
        odd = [] if even else [share / (2**bits - 1) for share in _ODD_SHARES]
        shares = odd + [-share / (2**bits - 2) for share in _EVEN_SHARES]
    start = (jnp.full(largest.shape, jnp.inf, jnp.float32), largest)
    best, _ = lax.scan(try_share, start, jnp.asarray(shares, jnp.float32))
    (_, scales), _ = lax.scan(refit, best, None, length=_FITTING_ROUNDS)
    return scales


def nearest_codes(groups: Float[Array, "g s o"], grid: Grid, bits: int) -> Float[Array, "g s o"]:
    """The code of the nearest level for every entry, and of two equally near ones the greater; as floats."""
    if grid.zeros is not None:
        return _nearest_with_zeros(groups, grid, bits)
    scales = grid.scales
    steps = jnp.where(scales == 0, 0, groups / jnp.where(scales == 0, 1, scales))
    if grid.table is None:
        return jnp.clip(jnp.floor((steps + 2**bits + (scales < 0)) / 2), 0, 2**bits - 1)
    middles = (grid.table[:-1] + grid.table[1:]) / 2
    codes = jnp.zeros_like(steps)
    for code in range(2**bits - 1):
        codes = codes + (steps >= middles[code])
    return codes


def _total(weights: Float[Array, "g s 1"], terms: Float[Array, "g s o"], whole: bool) -> Float[Array, "g 1 o"]:
    sums = _row_sums(weights, terms)
    return jnp.sum(sums, axis=2, keepdims=True) if whole else sums


def _row_sums(weights: Float[Array, "g s 1"], terms: Float[Array, "g s o"]) -> Float[Array, "g 1 o"]:
    """The weighted sums of the rows of groups.

    On a CPU as products: XLA does not use vector instructions for a sum over rows, and the search for scales took six
    times as long. Elsewhere as sums, which are part of the loop that makes the terms.
    """

    def by_products(weights: Array, terms: Array) -> Array:
        return jnp.einsum("gsi,gso->gio", weights, terms, precision="highest")

    def by_sums(weights: Array, terms: Array) -> Array:
        return jnp.sum(weights * terms, axis=1, keepdims=True)

    return lax.platform_dependent(weights, terms, cpu=by_products, default=by_sums)


def _stored(scales: Array) -> Array:
    """Scales as they will be read, in float32."""
    return scales.astype(SCALE_DTYPE).astype(jnp.float32)
