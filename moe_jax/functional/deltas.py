"""Deltas of one expert in the form they are stored in, and how they become a kernel, a tile of columns at a time.

A *form* says what the arrays mean. It is static and hashable; the arrays of one expert go beside it, by name. Tiles
are float32. With an `origin` (row, column) among the arrays, the form describes a part of the kernel that begins there:
a shard of it.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.functional.packing import dequantize, unpack

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
    """`values` [n] at the places that `row_ends` [rows] and `columns` [n] name (CSR without its leading zero).

    Attributes:
      shape: [i, o] of the kernel, or of the part of it that begins at `origin`.
    """

    shape: tuple[int, int]

    def tile(self, leaves: Leaves, start: Int[Array, ""] | int, width: int) -> Float[Array, "i w"]:
        rows, columns = self.places(leaves)
        columns = columns - start
        inside = (rows >= 0) & (rows < self.shape[0]) & (columns >= 0) & (columns < width)
        flat = jnp.where(inside, rows * width + columns, self.shape[0] * width)
        zeros = jnp.zeros(self.shape[0] * width, jnp.float32)
        values = leaves["values"].astype(jnp.float32)
        return zeros.at[flat].add(values, mode="drop", unique_indices=True).reshape(self.shape[0], width)

    def places(self, leaves: Leaves) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
        """Row and column of every entry in this part; outside of it for entries of other parts."""
        rows, columns = entry_rows(leaves["row_ends"], leaves["columns"].shape[0]), leaves["columns"].astype(jnp.int32)
        if "origin" in leaves:
            rows, columns = rows - leaves["origin"][0], columns - leaves["origin"][1]
        return rows, columns


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
        return unpack(codes, self.shape[0], self.bits, jnp.float32) * scales


DeltaForm = LowRankForm | SparseForm | QuantizedForm


def entry_rows(row_ends: Int[Array, " i"], entries: int) -> Int[Array, " n"]:
    """Row of every entry of a CSR matrix, ascending; int32.

    Args:
      row_ends: entries in the rows up to and including each.
      entries: in all.
    """
    # Where a row begins, all rows before it have ended.
    ended = jnp.zeros(entries, jnp.int32).at[row_ends].add(1, mode="drop")
    return jnp.cumsum(ended)


def _columns(array: Array, start: Int[Array, ""] | int, width: int) -> Array:
    if width == array.shape[1]:
        return array
    return lax.dynamic_slice_in_dim(array, start, width, 1)
