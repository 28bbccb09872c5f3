"""How tiles of kernels are made inside Triton kernels: makers of the forms of experts, and what they consist of."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

# Triton's products need at least 16 rows, columns and terms.
MIN_TILE = 16


class Range(NamedTuple):
    """Consecutive rows or columns of a kernel, inside a Pallas kernel.

    Attributes:
      start: the first of them.
      size: their number.
      inside: mask of those that exist; None: all do.
    """

    start: Any
    size: int
    inside: Array | None

    @property
    def slice(self) -> Any:
        """Returns the range as an index of a reference."""
        return pl.ds(self.start, self.size)

    @property
    def indices(self) -> Int[Array, " n"]:
        """Returns every index of the range."""
        return self.start + jnp.arange(self.size, dtype=jnp.int32)


class Maker(Protocol):
    """How entries of a kernel [i, o] are made inside a Pallas kernel. Static and hashable."""

    def __call__(self, refs: Sequence[Any], expert: Any, rows: Range, columns: Range) -> Float[Array, "r c"]:
        """Returns some rows and columns of the kernel of an expert; entries that do not exist may be anything finite.

        Args:
          refs: references of the arrays that it is made from.
          expert: index of the expert.
          rows, columns: of its kernel.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Stored:
    """Kernels that are stored whole, as an array [E, i, o]."""

    def __call__(self, refs: Sequence[Any], expert: Any, rows: Range, columns: Range) -> Array:
        return load(refs[0].at[expert, rows.slice, columns.slice], rows.inside, columns.inside)


@dataclasses.dataclass(frozen=True)
class OverBase:
    """A base plus the kernel that another maker makes.

    The arrays are the base [i, o], and those of `own`.
    """

    own: Maker

    def __call__(self, refs: Sequence[Any], expert: Any, rows: Range, columns: Range) -> Float[Array, "r c"]:
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
        codes_ref, scales_ref, levels_ref, origin_ref = refs
        codes = unpacked(codes_ref, expert, rows, columns, 4)
        group = jnp.minimum((origin_ref[0] + rows.indices) // self.block, scales_ref.shape[1] - 1)
        return plgpu.load(levels_ref.at[codes]) * gathered(scales_ref, expert, group, columns)


def masked_range(start: Any, size: int, whole: int) -> Range:
    """Returns the range from `start` on; it gets a mask of the `whole` indices that exist, unless tiles always fit."""
    inside = None if whole % size == 0 else start + jnp.arange(size, dtype=jnp.int32) < whole
    return Range(start, size, inside)


def load(ref: Any, rows: Array | None, columns: Array | None) -> Array:
    """Loads a tile; zeros outside of the masks of its rows and columns. None: all entries are inside."""
    mask = tile_mask(ref.shape, rows, columns)
    return plgpu.load(ref, mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def tile_mask(shape: tuple[int, ...], rows: Array | None, columns: Array | None) -> Array | None:
    """Combines the masks of rows and columns into the mask of a tile; None: all entries are inside."""
    if rows is None and columns is None:
        return None
    mask = jnp.ones(shape, bool) if rows is None else jnp.broadcast_to(rows[:, None], shape)
    return mask if columns is None else mask & jnp.broadcast_to(columns[None, :], shape)


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
