"""Kernels as codes of a few bits and a scale per group (METHODS 4)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from moe_jax.functional.packing import SCALE_DTYPE, dequantize, largest_level, pack

# Where clipping is looked for: shares of the largest absolute value of a group. The smallest are for whole kernels with
# outliers (Student's t with 3 degrees of freedom, 2 bits: error 0.91 without them, 0.74 with them).
CLIP_FACTORS = (*(n / 20 for n in range(20, 1, -1)), 0.07, 0.05, 0.035, 0.025)


class Quantized(NamedTuple):
    """A kernel [i, o] as it is stored (see `functional.packing`), and what that stands for, float32."""

    codes: UInt8[Array, "b o"]
    scales: Float[Array, "g s"]
    approximation: Float[Array, "i o"]


@partial(jax.jit, static_argnames=("bits", "group_size", "clip"))
def quantize(delta: Float[Array, "i o"], *, bits: int, group_size: int | None, clip: bool) -> Quantized:
    """Quantises symmetrically. Levels are chosen for the scale as it is stored, after rounding to bfloat16.

    Args:
      delta: float32.
      bits: of a code.
      group_size: rows that share a scale; None: one scale for all entries.
      clip: choose the scale of every group for the least squared error instead of the largest absolute value. One bit
        has its own rule.
    """
    rows, width = delta.shape
    size = rows if group_size is None else group_size
    groups = jnp.pad(delta, ((0, -rows % size), (0, 0))).reshape(-1, size, width)
    whole = group_size is None

    if bits == 1:
        members = jnp.minimum(size, rows - size * jnp.arange(groups.shape[0]))[:, None, None].astype(jnp.float32)
        # A mean of means and not one sum: float32 would lose most of 10^8 terms.
        means = jnp.sum(jnp.abs(groups), axis=1, keepdims=True) / members
        scales = _stored(jnp.mean(means, axis=2, keepdims=True) if whole else means)
        levels = jnp.where(groups >= 0, 1, -1)
    else:
        largest = jnp.max(jnp.abs(groups), axis=(1, 2) if whole else 1, keepdims=True) / largest_level(bits)
        scales = _least_error_scales(groups, largest, bits, whole) if clip else _stored(largest)
        levels = _levels(groups, scales, bits).astype(jnp.int32)

    codes = pack(levels.reshape(-1, width)[:rows], bits)
    stored = scales[:, 0, :].astype(SCALE_DTYPE)
    return Quantized(codes, stored, dequantize(codes, stored, rows, bits, group_size, jnp.float32))


def _least_error_scales(
    groups: Float[Array, "g s o"], largest: Float[Array, "g 1 o"], bits: int, whole: bool
) -> Float[Array, "g 1 o"]:
    """The best of `CLIP_FACTORS` for every group."""

    def attempt(best: tuple[Array, Array], factor: Array) -> tuple[tuple[Array, Array], None]:
        scales = _stored(largest * factor)
        error = jnp.sum((_levels(groups, scales, bits) * scales - groups) ** 2, axis=1, keepdims=True)
        error = jnp.sum(error, axis=2, keepdims=True) if whole else error
        better = error < best[0]
        return (jnp.where(better, error, best[0]), jnp.where(better, scales, best[1])), None

    start = (jnp.full(largest.shape, jnp.inf, jnp.float32), largest)
    (_, scales), _ = lax.scan(attempt, start, jnp.asarray(CLIP_FACTORS, jnp.float32))
    return scales


def _levels(groups: Float[Array, "g s o"], scales: Float[Array, "g 1 o"], bits: int) -> Float[Array, "g s o"]:
    """The nearest level of every entry; 0 in a group of zeros."""
    level = largest_level(bits)
    return jnp.where(scales > 0, jnp.clip(jnp.round(groups / scales), -level, level), 0)


def _stored(scales: Array) -> Array:
    """Scales as they will be read, in float32."""
    return scales.astype(SCALE_DTYPE).astype(jnp.float32)
