"""Common parts of the bodies of kernels: loops over pieces of a block, rows of a group, products."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from moe_jax.kernels.tpu.group_visits import Visits

COLUMNS = 256
"""Columns of a piece: enough to keep the units busy, few enough for a compiler that unrolls every register."""


def in_pieces(size: int, step: int, body: Callable[[Any, int], None]) -> None:
    """Calls `body(start, size of the piece)` for pieces of `step`; the last is shorter where that does not divide."""
    whole, remainder = divmod(size, step)
    if whole == 1:
        body(0, step)
    elif whole:
        lax.fori_loop(0, whole, lambda n, _: body(pl.multiple_of(n * step, step), step), None)
    if remainder:
        body(whole * step, remainder)


def over_strips(visits: Visits, v: Any, rows: int, strip: int, body: Callable[[Any, Bool[Array, "m 1"]], None]) -> None:
    """Calls `body(first row in the block, which of the rows are the group's)` for every strip with rows of the group.

    Args:
      visits: of all blocks.
      v: index of the visit.
      rows: of a block.
      strip: rows of a strip; divides `rows`.
      body: of the loop.
    """
    top, first, end = visits.block[v] * rows, visits.first[v], visits.end[v]

    def one(index: Any, _: None) -> None:
        at = pl.multiple_of(index * strip, strip)
        number = lax.broadcasted_iota(jnp.int32, (strip, 1), 0) + at + top
        body(at, jnp.logical_and(number >= first, number < end))

    # `//` would need the signs, which Mosaic lowers with a look at the default device.
    low = lax.div(jnp.maximum(first - top, 0), strip)
    high = lax.div(jnp.clip(end - top, 0, rows) + (strip - 1), strip)
    lax.fori_loop(low, high, one, None)


def changed(values: Any, v: Any) -> Any:
    """Whether a value of a list differs from that of the visit before, or this is the first visit."""
    return jnp.logical_or(v == 0, values[v] != values[jnp.maximum(v - 1, 0)])


def dot(left: Array, right: Array, contract: tuple[int, int]) -> Float[Array, "m n"]:
    """Returns the product over one axis of each operand, float32; float32 operands are not rounded to bfloat16."""
    exact = left.dtype == jnp.float32
    return lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def split(array: Array) -> tuple[Array, Array]:
    """Returns two bfloat16 terms whose sum is the array, to 16 bits."""
    array = array.astype(jnp.float32)
    # Truncated by a mask: XLA may leave out a conversion there and back, and Mosaic has no `reduce_precision`.
    bits = lax.bitcast_convert_type(array, jnp.int32) & jnp.int32(-(1 << 16))
    large = lax.bitcast_convert_type(bits, jnp.float32)
    return large.astype(jnp.bfloat16), (array - large).astype(jnp.bfloat16)
