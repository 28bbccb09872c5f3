"""Zero points by half-quadratic splitting (HQQ; Badri and Shaji, mobiusml.github.io/hqq_blog, 2023).

The scale of a group is that of its span; its zero point z is to make a norm of the errors small that outliers count
little in, sum |W - W_z|^p with p = 0.7. With the errors E as variables of their own, two steps in turn, each of closed
form:

    E = shrink(W - W_z),   shrink(x) = sign(x) max(0, |x| - |x|^(p - 1) / beta)
    z = mean(q - (W - E) / s)

where q are the codes for the z before, s is the distance between levels, W_z = s (q - z), and beta grows by a factor.
It looks at no inputs.
"""

from dataclasses import dataclass
from functools import partial
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from moe_jax.compression.coding.coder import LeastError
from moe_jax.compression.coding.quantizer import nearest_codes, stored
from moe_jax.compression.coding.zero_points import read_grid
from moe_jax.experts.forms.coding import Encoded, MoreOfCodes
from moe_jax.functional.products.packing import Grid

NORM, BETA, GROWTH, ROUNDS = 0.7, 10.0, 1.01, 20
"""p, beta, its factor, and the number of steps: as published."""


@dataclass(frozen=True)
class HalfQuadratic(LeastError):
    """Codes with zero points. The published rounds go on as long as the mean error falls."""

    def quantize(
        self, values: Float[np.ndarray, "i o"], *, bits: int, group_size: int | None, **more: Unpack[MoreOfCodes]
    ) -> Encoded:
        """Quantises in groups, with zero points and without a table."""
        assert group_size is not None and more.get("zero_points") and not more.get("table")
        made = half_quadratic(values, bits=bits, group_size=group_size, scale_bits=more.get("scale_bits", 16))
        return jax.tree.map(np.asarray, made)


@partial(jax.jit, static_argnames=("bits", "group_size", "scale_bits"))
def half_quadratic(kernel: Float[Array, "i o"], *, bits: int, group_size: int, scale_bits: int = 16) -> Encoded:
    """Quantises a float32 kernel; see `quantizer.quantize`."""
    rows, width = kernel.shape
    padding = -rows % group_size
    groups = jnp.pad(kernel, ((0, padding), (0, 0))).reshape(-1, group_size, width)
    counted = (jnp.arange(rows + padding, dtype=jnp.int32) < rows).reshape(-1, group_size, 1)
    scales, zeros = zero_points(groups, counted, bits=bits)
    grid = read_grid(Grid(scales / 2, None, zeros), bits, scale_bits)
    return stored(nearest_codes(groups, grid, bits), grid, rows, bits, group_size, scale_bits)


def zero_points(
    groups: Float[Array, "g s o"], counted: Array, *, bits: int
) -> tuple[Float[Array, "g 1 o"], Float[Array, "g 1 o"]]:
    """The distances between levels, and the zero points, of groups.

    Args:
      groups: float32.
      counted: bool [g, s, 1]: entries that are there.
      bits: of a code.
    """
    top = 2**bits - 1
    least = jnp.min(jnp.where(counted, groups, jnp.inf), axis=1, keepdims=True)
    greatest = jnp.max(jnp.where(counted, groups, -jnp.inf), axis=1, keepdims=True)
    # A group of equal entries has no span: one that reaches to zero, which has a level.
    has_span = greatest > least
    least, greatest = (jnp.where(has_span, x, y) for x, y in ((least, jnp.minimum(least, 0)),
                                                              (greatest, jnp.maximum(greatest, 0))))  # fmt: skip
    scales = (greatest - least) / top
    unit = jnp.where(scales > 0, scales, 1)
    members = jnp.sum(counted, axis=1, keepdims=True)

    def mean(terms: Array) -> Array:
        return jnp.sum(jnp.where(counted, terms, 0), axis=1, keepdims=True) / members

    def step(state: tuple[Array, Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array, Array], None]:
        zeros, beta, before, falls = state
        codes = jnp.clip(jnp.round(groups / unit + zeros), 0, top)
        errors = groups - unit * (codes - zeros)
        now = jnp.sum(mean(jnp.abs(errors))) / zeros.size
        size = jnp.abs(errors)
        left = size - jnp.where(size > 0, size, 1) ** (NORM - 1) / beta
        shrunk = jnp.sign(errors) * jnp.maximum(left, 0)
        found = mean(codes - (groups - shrunk) / unit)
        # As published, the step in which the error no longer falls is the last one that counts.
        return (jnp.where(falls, found, zeros), beta * GROWTH, now, falls & (now < before)), None

    start = -least / unit, jnp.float32(BETA), jnp.float32(jnp.inf), jnp.bool_(True)
    (zeros, *_), _ = lax.scan(step, start, None, length=ROUNDS)
    return scales, zeros
