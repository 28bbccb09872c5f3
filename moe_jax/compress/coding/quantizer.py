"""Kernels as codes and a scale per group (methods.md 4); `functional.packing` says what these stand for."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from moe_jax.functional.packing import SCALE_DTYPE, dequantize, pack, scaled_levels

# Where the search for a scale begins: the largest level as a share of the largest absolute value of a group. On the odd
# grid each is only the neighbourhood of a best scale, which least squares then finds.
_ODD_SHARES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
# The even grid is for groups with outliers, where the error has many minima: more of them, and smaller ones for whole
# kernels (Student's t with 3 degrees of freedom, 2 bits, levels -1, 0 and 1: error 0.91 without them, 0.74 with them).
_EVEN_SHARES = (*(n / 20 for n in range(20, 1, -1)), 0.07, 0.05, 0.035, 0.025)
# Then codes and scale are fitted to each other so often. More rounds gain less than 0.1 % of the error.
_FITTING_ROUNDS = 3


class QuantizedKernel(NamedTuple):
    """A kernel [i, o] as it is stored (see `functional.packing`), and what that stands for, float32."""

    codes: UInt8[Array, "b o"]
    scales: Float[Array, "g s"]
    approximation: Float[Array, "i o"]


@partial(jax.jit, static_argnames=("bits", "group_size", "fit", "even"))
def quantize(
    kernel: Float[Array, "i o"],
    *,
    bits: int,
    group_size: int | None,
    fit: bool = True,
    count: Int[Array, ""] | int | None = None,
    weights: Float[Array, " i"] | None = None,
    even: bool = False,
) -> QuantizedKernel:
    """Quantises. Codes are chosen for the scale as it is stored, after rounding to bfloat16.

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
    scales = best_scales(groups, counts, bits=bits, whole=whole, fit=fit, even=even)
    codes = pack(nearest_codes(groups, scales, bits).astype(jnp.int32).reshape(-1, width)[:rows], bits)
    stored = scales[:, 0, :].astype(SCALE_DTYPE)
    return QuantizedKernel(codes, stored, dequantize(codes, stored, rows, bits, group_size, jnp.float32))


def best_scales(
    groups: Float[Array, "g s o"],
    weights: Float[Array, "g s 1"],
    *,
    bits: int,
    whole: bool,
    fit: bool,
    even: bool = False,
) -> Float[Array, "g 1 o"]:
    """The scales of groups of entries, as they will be read: after rounding to bfloat16.

    Args:
      groups: entries that share scales; float32.
      weights: of the squared errors of rows, not negative.
      bits: of a code.
      whole: all entries share one scale, [1, 1, 1].
      fit, even: as of `quantize`.
    """

    def total(terms: Float[Array, "g s o"]) -> Float[Array, "g 1 o"]:
        sums = jnp.sum(jnp.broadcast_to(weights * terms, groups.shape), axis=1, keepdims=True)
        return jnp.sum(sums, axis=2, keepdims=True) if whole else sums

    if bits == 1:
        members = jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        # A mean of means and not one sum: float32 would lose most of 10^8 terms.
        means = jnp.sum(weights * jnp.abs(groups), axis=1, keepdims=True) / members
        return _stored(jnp.mean(means, axis=2, keepdims=True) if whole else means)
    largest = jnp.max(jnp.where(weights > 0, jnp.abs(groups), 0), axis=(1, 2) if whole else 1, keepdims=True)
    if not fit and not even:
        return _stored(largest / (2**bits - 1))

    def better(best: tuple[Array, Array], scales: Array) -> tuple[Array, Array]:
        error = total((scaled_levels(nearest_codes(groups, scales, bits), scales, bits) - groups) ** 2)
        is_better = error < best[0]
        return jnp.where(is_better, error, best[0]), jnp.where(is_better, scales, best[1])

    def try_share(best: tuple[Array, Array], share: Array) -> tuple[tuple[Array, Array], None]:
        return better(best, _stored(largest * share)), None

    def refit(best: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        scales = best[1]
        levels = scaled_levels(nearest_codes(groups, scales, bits), jnp.sign(scales), bits)
        squares = total(levels**2)
        fitted = jnp.where(squares > 0, total(groups * levels) / squares, 0)
        # Codes that were chosen for a scale correlate with what they stand for: the sign stays, and with it the grid.
        return better(best, _stored(jnp.sign(scales) * fitted)), None

    odd = [] if even else [share / (2**bits - 1) for share in _ODD_SHARES]
    shares = odd + [-share / (2**bits - 2) for share in _EVEN_SHARES]
    start = (jnp.full(largest.shape, jnp.inf, jnp.float32), largest)
    best, _ = lax.scan(try_share, start, jnp.asarray(shares, jnp.float32))
    (_, scales), _ = lax.scan(refit, best, None, length=_FITTING_ROUNDS)
    return scales


def nearest_codes(groups: Float[Array, "g s o"], scales: Float[Array, "g 1 o"], bits: int) -> Float[Array, "g s o"]:
    """The code of the nearest level for every entry, and of two equally near ones the greater; as floats."""
    steps = jnp.where(scales == 0, 0, groups / jnp.where(scales == 0, 1, scales))
    return jnp.clip(jnp.floor((steps + 2**bits + (scales < 0)) / 2), 0, 2**bits - 1)


def _stored(scales: Array) -> Array:
    """Scales as they will be read, in float32."""
    return scales.astype(SCALE_DTYPE).astype(jnp.float32)
