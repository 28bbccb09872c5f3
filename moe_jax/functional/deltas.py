"""Deltas of one expert in the form they are stored in, and how they become a kernel, a tile of columns at a time.

A *form* says what the arrays mean. It is static and hashable; the arrays of one expert go beside it, by name. Tiles
are float32. With an `origin` (row, column) among the arrays, the form describes a part of the kernel that begins there:
a shard of it.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from moe_jax.functional.nf4 import nf4_tile
from moe_jax.functional.packing import dequantize, scaled_levels, unpack

Leaves = Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class LowRankForm:
    """`a` [i, r] times `b` [r, o].

    Attributes:
      shape: [i, o] of the kernel.
    """

    shape: tuple[int, int]

    def tile(self, leaves: Leaves, start: Int[Array, ""] | int, width: int) -> Float[Array, "i w"]:
        return leaves["a"].astype(jnp.float32) @ _columns(leaves["b"].astype(jnp.float32), start, width)


@dataclasses.dataclass(frozen=True)
class SparseForm:
    """`values` [n] at distinct places, row by row.

    The places are `row_ends` [rows] and `columns` [n] (CSR without its leading zero), `rows` [n] and `columns` [n]
    (COO), or a bitmap, `mask` [rows, bytes]: bit c % 8 of byte c // 8 says whether there is an entry in column c.

    Attributes:
      shape: [i, o] of the kernel, or of the part of it that begins at `origin`.
      places: `csr`, `coo` or `bitmap`.
      bits: of a value that is quantised: instead of `values` there are `value_codes` [b] and `value_scales`
        [g]; None: floats.
      group_size: consecutive values that share a scale; None: all.
    """

    shape: tuple[int, int]
    places: str = "csr"
    bits: int | None = None
    group_size: int | None = None

    def tile(self, leaves: Leaves, start: Int[Array, ""] | int, width: int) -> Float[Array, "i w"]:
        values = self.values(leaves)
        if self.places == "bitmap":
            return _bitmap_tile(leaves["mask"], values, self._origin(leaves), start, (self.shape[0], width))
        rows, columns = self.coordinates(leaves)
        columns = columns - start
        inside = (rows >= 0) & (rows < self.shape[0]) & (columns >= 0) & (columns < width)
        flat = jnp.where(inside, rows * width + columns, self.shape[0] * width)
        zeros = jnp.zeros(self.shape[0] * width, jnp.float32)
        return zeros.at[flat].add(values, mode="drop", unique_indices=True).reshape(self.shape[0], width)

    def values(self, leaves: Leaves) -> Float[Array, " n"]:
        """The entries, float32; quantised ones of a bitmap may be followed by others without a place."""
        if self.bits is None:
            return leaves["values"].astype(jnp.float32)
        codes = leaves["value_codes"]
        count = leaves["columns"].shape[0] if "columns" in leaves else codes.shape[0] * 8 // self.bits
        scales = leaves["value_scales"][:, None]
        if self.group_size is not None:
            scales = jnp.pad(scales, ((0, -(-count // self.group_size) - scales.shape[0]), (0, 0)))
        return dequantize(codes[:, None], scales, count, self.bits, self.group_size, jnp.float32)[:, 0]

    def coordinates(self, leaves: Leaves) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
        """Row and column of every entry in this part; outside of it for entries of other parts. Not of a bitmap."""
        columns = leaves["columns"].astype(jnp.int32)
        if self.places == "csr":
            rows = entry_rows(leaves["row_ends"], columns.shape[0])
        else:
            rows = leaves["rows"].astype(jnp.int32)
        if "origin" in leaves:
            rows, columns = rows - leaves["origin"][0], columns - leaves["origin"][1]
        return rows, columns

    def _origin(self, leaves: Leaves) -> tuple[Int[Array, ""] | int, Int[Array, ""] | int]:
        return (leaves["origin"][0], leaves["origin"][1]) if "origin" in leaves else (0, 0)


@dataclasses.dataclass(frozen=True)
class QuantizedForm:
    """Packed `codes` [b, o] and `scales` [g, o] or [1, 1]; see `functional.packing`.

    Attributes:
      shape: [i, o] of the kernel, or of the part of it that begins at `origin`.
      bits: of a code.
      group_size: rows that share a scale; None: all.
    """

    shape: tuple[int, int]
    bits: int
    group_size: int | None

    def tile(self, leaves: Leaves, start: Int[Array, ""] | int, width: int) -> Float[Array, "i w"]:
        codes, scales = _columns(leaves["codes"], start, width), leaves["scales"]
        if self.group_size is None:
            return dequantize(codes, scales, self.shape[0], self.bits, None, jnp.float32)
        scales = _columns(scales, start, width)
        if "origin" not in leaves:
            return dequantize(codes, scales, self.shape[0], self.bits, self.group_size, jnp.float32)
        # A shard may begin inside a group, and holds the scales of all groups.
        group = (leaves["origin"][0] + jnp.arange(self.shape[0], dtype=jnp.int32)) // self.group_size
        scales = jnp.take(scales.astype(jnp.float32), group, axis=0)
        return scaled_levels(unpack(codes, self.shape[0], self.bits, jnp.float32), scales, self.bits)


@dataclasses.dataclass(frozen=True)
class NF4Form:
    """The arrays of `functional.nf4`; of a part that begins at `origin`, see `nf4_tile`.

    Attributes:
      shape: [i, o] of the kernel, or of the part of it that begins at `origin`.
      columns: of the whole kernel.
    """

    shape: tuple[int, int]
    columns: int

    def tile(self, leaves: Leaves, start: Int[Array, ""] | int, width: int) -> Float[Array, "i w"]:
        return nf4_tile(leaves, self.shape[0], self.columns, start, width)


DeltaForm = LowRankForm | SparseForm | QuantizedForm | NF4Form


def entry_rows(row_ends: Int[Array, " i"], entries: int) -> Int[Array, " n"]:
    """Row of every entry of a CSR matrix, ascending; int32.

    Args:
      row_ends: entries in the rows up to and including each.
      entries: in all.
    """
    # Where a row begins, all rows before it have ended.
    ended = jnp.zeros(entries, jnp.int32).at[row_ends].add(1, mode="drop")
    return jnp.cumsum(ended)


def _bitmap_tile(
    mask: UInt8[Array, "rows bytes"],
    values: Float[Array, " n"],
    origin: tuple[Int[Array, ""] | int, Int[Array, ""] | int],
    start: Int[Array, ""] | int,
    shape: tuple[int, int],
) -> Float[Array, "i w"]:
    """A tile of the part that begins at `origin`: an entry for every set bit, the one with as many before it."""
    (rows, width), begin = shape, origin[1] + start
    set_bits = lax.population_count(mask).astype(jnp.int32)
    in_rows = jnp.sum(set_bits, axis=1)
    before = (jnp.cumsum(in_rows) - in_rows)[:, None] + jnp.cumsum(set_bits, axis=1) - set_bits

    # Whole bytes, from the one in which the tile begins; one more at the end, where the tile may not fill a byte.
    first, count = begin // 8, width // 8 + 2
    mask, before = (
        lax.dynamic_slice(jnp.pad(a, ((0, 0), (0, count))), (origin[0], first), (rows, count)) for a in (mask, before)
    )
    bit = jnp.arange(8, dtype=jnp.uint8)[None, None, :]
    lower = mask[:, :, None] & ((jnp.uint8(1) << bit) - jnp.uint8(1))
    index = before[:, :, None] + lax.population_count(lower).astype(jnp.int32)
    index = jnp.where((mask[:, :, None] >> bit) & jnp.uint8(1) == 1, index, values.shape[0])
    index = lax.dynamic_slice_in_dim(index.reshape(rows, -1), begin % 8, width, 1)
    return values.at[index].get(mode="fill", fill_value=0)


def _columns(array: Array, start: Int[Array, ""] | int, width: int) -> Array:
    if width == array.shape[1]:
        return array
    return lax.dynamic_slice_in_dim(array, start, width, 1)
