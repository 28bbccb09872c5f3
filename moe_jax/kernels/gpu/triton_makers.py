"""Makers of expert kernels for Triton's grouped product: each makes the kernels of one form, a tile at a time."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.gpu.triton_grouped import MIN_TILE, Maker, Range, load, masked_range


@dataclasses.dataclass(frozen=True)
class OverBase:
    """A base plus the kernel that another maker makes.

    The arrays are the base [i, o], and those of `own`.
    """

    own: Maker

    def __call__(self, refs: Sequence[Any], expert: Any, rows: Range, columns: Range) -> Float[Array, "r c"]:
        """Returns the base's entries plus those that `own` makes, float32; arguments as for `Maker`."""
        base = load(refs[0].at[rows.slice, columns.slice], rows.inside, columns.inside)
        return base.astype(jnp.float32) + self.own(refs[1:], expert, rows, columns)


@dataclasses.dataclass(frozen=True)
class LowRankFactors:
    """Low-rank kernels `a b`.

    The arrays are `a` [E, i, r] and `b` [E, r, o].

    Attributes:
      rank: r.
    """

    rank: int

    def __call__(self, refs: Sequence[Any], expert: Any, rows: Range, columns: Range) -> Float[Array, "r c"]:
        """Multiplies rows of `a` with columns of `b`, float32; arguments as for `Maker`."""
        padded = max(MIN_TILE, 1 << (self.rank - 1).bit_length())
        # The start is traced, so that the range may reach beyond the array.
        along = masked_range(jnp.zeros((), jnp.int32), padded, self.rank)
        a = load(refs[0].at[expert, rows.slice, along.slice], rows.inside, along.inside)
        b = load(refs[1].at[expert, along.slice, columns.slice], along.inside, columns.inside)
        return plgpu.dot(a, b)


@dataclasses.dataclass(frozen=True)
class ScaledCodes:
    """Packed codes times scales; see `functional.codes`.

    The arrays are `codes` uint8[E, bytes, o], `scales` [E, groups, o] (or [E, 1, 1]) and `origin` int32[1], the row at
    which the kernels begin.

    Attributes:
      bits: of a code.
      group_size: rows of a column that share a scale; None: all entries of a kernel share one.
    """

    bits: int
    group_size: int | None

    def __call__(self, refs: Sequence[Any], expert: Any, rows: Range, columns: Range) -> Float[Array, "r c"]:
        """Unpacks and scales codes, float32; arguments as for `Maker`."""
        codes_ref, scales_ref, origin_ref = refs
        fields = unpacked(codes_ref, expert, rows, columns, self.bits).astype(jnp.float32)
        if self.group_size is None:
            scales = scales_ref[expert, 0, 0].astype(jnp.float32)
        else:
            group = jnp.minimum((origin_ref[0] + rows.indices) // self.group_size, scales_ref.shape[1] - 1)
            scales = gathered(scales_ref, expert, group, columns).astype(jnp.float32)
        levels = 2.0 * fields - (2.0**self.bits - 1.0) - (scales < 0).astype(jnp.float32)
        return levels * scales


@dataclasses.dataclass(frozen=True)
class CodesOfLevels:
    """Four-bit codes of levels, times a scale per block of rows of a column; see `functional.codes`.

    The arrays are `codes` uint8[E, ceil(i / 2), o], the scales of blocks float32[E, blocks, o], the levels float32[16]
    and `origin` int32[1], the row at which the kernels begin.

    Attributes:
      block: rows of a column that share a scale.
    """

    block: int

    def __call__(self, refs: Sequence[Any], expert: Any, rows: Range, columns: Range) -> Float[Array, "r c"]:
        """Looks up and scales levels, float32; arguments as for `Maker`."""
        codes_ref, scales_ref, levels_ref, origin_ref = refs
        codes = unpacked(codes_ref, expert, rows, columns, 4)
        group = jnp.minimum((origin_ref[0] + rows.indices) // self.block, scales_ref.shape[1] - 1)
        return plgpu.load(levels_ref.at[codes]) * gathered(scales_ref, expert, group, columns)


def unpacked(codes_ref: Any, expert: Any, rows: Range, columns: Range, bits: int) -> Array:
    """Returns codes int32 of rows and columns of a kernel packed along its rows; arbitrary for missing rows."""
    last, first_bit = codes_ref.shape[1] - 1, rows.indices * bits
    byte = jnp.minimum(first_bit // 8, last)
    words = gathered(codes_ref, expert, byte, columns).astype(jnp.int32)
    if 8 % bits:
        # A code may begin in one byte and end in the next.
        words += gathered(codes_ref, expert, jnp.minimum(byte + 1, last), columns).astype(jnp.int32) * 256
    return (words >> (first_bit % 8)[:, None]) & (2**bits - 1)


def gathered(ref: Any, expert: Any, index: Array, columns: Range) -> Array:
    """Returns rows `index`, all of which must exist, and some columns of an array of an expert."""
    shape = (index.shape[0], columns.size)
    down, across = (jnp.broadcast_to(i, shape) for i in (index[:, None], columns.indices[None, :]))
    return load(ref.at[expert, down, across], None, columns.inside)
