"""Scales and zero points of groups: grids that need not lie around zero (`functional.codes`)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moe_jax.functional.codes import Grid, scale_leaves, scales_of, zero_leaf, zeros_of

# The span of the levels as a share of that of the entries, from which fitting begins.
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
# Then codes, and scale and zero point, are fitted to each other so often.
_FITTING_ROUNDS = 3


def asymmetric_grid(
    groups: Float[Array, "g s o"], weights: Float[Array, "g s 1"], *, bits: int, scale_bits: int, fit: bool
) -> Grid:
    """The grid of least squared error, as it will be read: scales and zero points [g, 1, o].

    Args:
      groups: entries that share both; float32.
      weights: of the squared errors of rows, not negative; rows without any do not count.
      bits: of a code.
      scale_bits: of a scale.
      fit: otherwise the least and the greatest entry are the first and the last level (but for rounding).
    """

    def read(grid: Grid) -> Grid:
        return read_grid(grid, bits, scale_bits)

    def better(best: tuple[Array, Grid], grid: Grid) -> tuple[Array, Grid]:
        grid = read(grid)
        difference = grid.numbers(nearest_codes(groups, grid, bits), bits) - groups
        found = jnp.sum(weights * difference**2, axis=1, keepdims=True), grid
        return jax.tree.map(lambda new, old: jnp.where(found[0] < best[0], new, old), found, best)

    def refit(best: tuple[Array, Grid], _: None) -> tuple[tuple[Array, Grid], None]:
        codes = nearest_codes(groups, best[1], bits)
        return better(best, _line(groups, codes, weights, best[1])), None

    least, greatest = spans(groups, weights)
    start = read(_around(least, greatest, 1.0, bits))
    if not fit:
        return start
    best = jnp.full(least.shape, jnp.inf, jnp.float32), start
    for share in _SHARES:
        best = better(best, _around(least, greatest, share, bits))
    (_, grid), _ = lax.scan(refit, best, None, length=_FITTING_ROUNDS)
    return grid


def nearest_codes(groups: Float[Array, "g s o"], grid: Grid, bits: int) -> Float[Array, "g s o"]:
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
    """A grid as it will be read once it is stored."""
    assert grid.zeros is not None
    scales = grid.scales[:, 0, :]
    scales = scales_of(scale_leaves(scales, scale_bits))[:, None, :]
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
        return jnp.sum(weights * terms, axis=1, keepdims=True) / total

    of_codes, of_entries = mean(codes), mean(groups)
    spread = mean((codes - of_codes) ** 2)
    slope = mean((codes - of_codes) * (groups - of_entries)) / jnp.where(spread > 0, spread, 1)
    is_line = slope > 0
    zeros = of_codes - of_entries / jnp.where(is_line, slope, 1)
    return Grid(jnp.where(is_line, slope / 2, grid.scales), None, jnp.where(is_line, zeros, grid.zeros))
