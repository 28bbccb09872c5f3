"""The fused tiles of the forms of kernels: stored as they are, low-rank, packed codes, NF4."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from moe_jax.kernels.hardware import ANY_CORE, LANES
from moe_jax.kernels.tpu.fused_tile import STEP, FusedTile, Operand, Piece

Arrays = Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class StoredTile(FusedTile):
    """Loads `kernel` [E, i, o], converted to the dtype of the rows in fast memory if its own is another."""

    is_whole = True

    def operands(self, arrays: Arrays, dtype: Any) -> Sequence[Operand]:
        return (Operand(arrays["kernel"], rows=0, columns=1),)

    def make(self, refs: Sequence[Any], piece: Piece) -> Float[Array, "p q"]:
        from jax.experimental import pallas as pl

        (rows, columns), (kernel,) = piece.shape, refs
        return kernel[pl.ds(piece.row, rows), pl.ds(piece.column, columns)].astype(jnp.float32)

    def gradients(
        self, rows: Array, dout: Array, arrays: Arrays, trained: Sequence[str], group_sizes: Array, **options: Any
    ) -> dict[str, Array]:
        """Returns the gradient of the kernels, in their dtype and of their size."""
        from moe_jax.kernels.tpu.kernel_gradients import grouped_outer

        dtype = arrays["kernel"].dtype
        return {name: grouped_outer(rows, dout, group_sizes, dtype, **options) for name in trained}


@dataclasses.dataclass(frozen=True)
class LowRankTile(FusedTile):
    """Makes `a` [E, i, r] times `b` [E, r, o].

    Where rows are bfloat16 and the factors are not, each factor is split into two terms of bfloat16, and three of the
    four products of terms are added: the tile is then exact to 2^-16. The terms lie side by side along the axis of the
    rank, which is shorter than the matrix unit, so they cost nothing.
    """

    def operands(self, arrays: Arrays, dtype: Any) -> Sequence[Operand]:
        """Returns the factors, `a` transposed: a block of few columns would be padded to 128."""
        from moe_jax.kernels.tpu.parts import split

        a, b = jnp.swapaxes(arrays["a"], 1, 2), arrays["b"]
        if dtype == jnp.float32:
            a, b = a.astype(dtype), b.astype(dtype)
        elif not a.dtype == dtype == b.dtype:
            (a, small_a), (b, small_b) = split(a), split(b)
            a, b = jnp.concatenate([a, a, small_a], axis=1), jnp.concatenate([b, small_b, b], axis=1)
        return Operand(a, rows=1), Operand(b, columns=1)

    def make(self, refs: Sequence[Any], piece: Piece) -> Float[Array, "p q"]:
        from jax.experimental import pallas as pl

        from moe_jax.kernels.tpu.parts import dot

        (rows, columns), (a, b) = piece.shape, refs
        left, right = a[:, pl.ds(piece.row, rows)], b[:, pl.ds(piece.column, columns)]
        return dot(left, right, (0, 0))

    def gradients(
        self, rows: Array, dout: Array, arrays: Arrays, trained: Sequence[str], group_sizes: Array, **options: Any
    ) -> dict[str, Array]:
        """Returns gradients of `a` and `b`, float32: by the kernel for thin factors, or for a high rank by products.

        Between two products a factor is rounded to the dtype of the rows.
        """
        from moe_jax.kernels.tpu.grouped_product import Kernels, grouped_product
        from moe_jax.kernels.tpu.kernel_gradients import fits, grouped_outer, low_rank_gradients

        a, b = arrays["a"], arrays["b"]

        def thin(rows: Array, factor: Array, transposed: bool) -> Array:
            kernels, (_, height, width) = (
                Kernels(None, {"kernel": factor.astype(rows.dtype)}, StoredTile()),
                factor.shape,
            )
            return grouped_product(rows, kernels, group_sizes, (height, width), transposed=transposed, **options)

        if fits(rows.shape[0], (a.shape[1], b.shape[2]), a.shape[2], rows.dtype, options.get("core", ANY_CORE)):
            da, db = low_rank_gradients(rows, dout, a, b, group_sizes, **options)
        else:
            inner, outer = thin(rows, a, False), thin(dout, b, True)
            da = grouped_outer(rows, outer, group_sizes, jnp.float32, **options)
            db = grouped_outer(inner, dout, group_sizes, jnp.float32, **options)
        return {name: gradient for name, gradient in (("a", da), ("b", db)) if name in trained}


class TileOfCodes(FusedTile):
    """Makes kernels from codes [E, bytes, o] and a scale per group of rows.

    Scales are converted to float32 and to equal groups of `shared` rows, with which every piece begins and ends; a
    shard may begin inside a group.

    Attributes:
      bits: of a code.
      group_size: rows that share a scale; None: all rows do.
      height: rows of the kernels, or of the part of them that this device has.
    """

    bits: int
    group_size: int | None
    height: int

    @property
    def shared(self) -> int:
        """Number of rows that share a scale where a kernel is made."""
        return rows_that_share(self.group_size, self.height)

    def operands_of(self, codes: Array, scales: Float[Array, "E s o"]) -> tuple[Operand, Operand]:
        """Returns the codes, and the scales of every `shared` rows, as operands."""
        return (
            Operand(codes, rows=0, columns=1, per_row=Fraction(self.bits, 8)),
            # The axis of length 1 before the last lets a kernel's block begin at any index of the axis before it.
            Operand(scales[:, :, None, :], rows=0, columns=2, per_row=Fraction(1, self.shared)),
        )

    def read(self, refs: Sequence[Any], piece: Piece) -> tuple[Int[Array, "p q"], Float[Array, "s 1 q"]]:
        """Returns the codes of a piece, and the scales of its groups; called inside a Pallas kernel."""
        from jax.experimental import pallas as pl

        from moe_jax.kernels.tpu.parts import scaled_rows, unpack

        (rows, width), (codes_ref, scales_ref) = piece.shape, refs
        columns = pl.ds(piece.column, width)
        start = scaled_rows(piece.row, self.step, self.bits, 8)
        codes = unpack(codes_ref[pl.ds(start, rows * self.bits // 8), columns], self.bits)
        first = scaled_rows(piece.row, self.step, 1, self.shared)
        return codes, scales_ref[pl.ds(first, rows // self.shared), :, columns]

    def regrouped(self, values: Float[Array, "E g o"], origin: Int[Array, ""] | None) -> Float[Array, "E s o"]:
        """Returns the values of every `shared` rows, from those of groups of the whole kernels.

        `origin` is the row at which this device's part begins, a multiple of its height; None: it has whole kernels.
        """
        experts, _, width = values.shape
        if self.group_size is None:
            return jnp.broadcast_to(values, (experts, self.height // self.shared, width))
        every = jnp.repeat(values, self.group_size // self.shared, axis=1)
        if origin is None:
            return every[:, : self.height // self.shared]
        return lax.dynamic_slice_in_dim(every, origin // self.shared, self.height // self.shared, 1)


def rows_that_share(group_size: int | None, height: int) -> int:
    """Returns the most rows that share a scale, and divide groups, pieces, and kernels of this height."""
    return math.gcd(height, STEP) if group_size is None else math.gcd(group_size, height, STEP)


@dataclasses.dataclass(frozen=True)
class PackedTile(TileOfCodes):
    """Makes kernels from `codes` [E, bytes, o] and `scales` [E, g, o] or [E, 1, 1]; see `functional.codes`."""

    bits: int
    group_size: int | None
    height: int

    def operands(self, arrays: Arrays, dtype: Any) -> Sequence[Operand]:
        return self.operands_of(arrays["codes"], self._scales(arrays["scales"], arrays))

    def _scales(self, scales: Array, arrays: Arrays) -> Float[Array, "E s o"]:
        scales = jnp.broadcast_to(scales, (*scales.shape[:2], arrays["codes"].shape[2])).astype(jnp.float32)
        return self.regrouped(scales, arrays["origin"][0, 0] if "origin" in arrays else None)

    def make(self, refs: Sequence[Any], piece: Piece) -> Float[Array, "p q"]:
        levels, scales = self._levels(refs, piece)
        return (levels * scales).reshape(piece.shape)

    def _levels(self, refs: Sequence[Any], piece: Piece) -> tuple[Float[Array, "s n q"], Float[Array, "s 1 q"]]:
        codes, scales = self.read(refs, piece)
        # Odd levels, or even ones where the scale is negative.
        lowest = (1.0 - 2**self.bits) - (scales < 0).astype(jnp.float32)
        return 2.0 * codes.astype(jnp.float32).reshape(-1, self.shared, piece.shape[1]) + lowest, scales

    def reduce(self, refs: Sequence[Any], piece: Piece, gradient: Float[Array, "p q"]) -> Float[Array, "s q"]:
        """Returns the gradient of the scales of a piece, given that of its entries; called inside a Pallas kernel."""
        levels, _ = self._levels(refs, piece)
        return jnp.sum(levels * gradient.reshape(levels.shape), axis=1)

    def gradients(
        self, rows: Array, dout: Array, arrays: Arrays, trained: Sequence[str], group_sizes: Array, **options: Any
    ) -> dict[str, Array]:
        """Returns the gradient of the scales, float32, if they are trained; codes have none."""
        from moe_jax.kernels.tpu.kernel_gradients import grouped_outer

        if "scales" not in trained:
            return {}
        operands = self.operands(arrays, rows.dtype)
        reduced = grouped_outer(rows, dout, group_sizes, jnp.float32, self, operands, **options)
        scales = arrays["scales"].astype(jnp.float32)
        (gradient,) = jax.vjp(lambda scales: self._scales(scales, arrays), scales)[1](reduced)
        return {"scales": gradient}


def why_not_packed(bits: int, group_size: int | None, height: int) -> str | None:
    """Returns in words why kernels of this height have no such tile; None: they have one."""
    if height % 8:
        return f"codes of {bits} bits of {height} rows do not end with a whole word of them"
    if rows_that_share(group_size, height) % 8:
        return f"groups of {group_size} rows divide pieces of {math.gcd(height, STEP)} rows unevenly"
    return None


@dataclasses.dataclass(frozen=True)
class NF4Tile(TileOfCodes):
    """Makes kernels from `codes` [E, i / 2, o], `scale_codes` [E, i / group, o], `scales` [E, n] and `offset` [E].

    The scales of the groups, one number for 64 of the kernel, are computed before the kernel is called.

    Attributes:
      levels: the 16 numbers that codes stand for.
      scale_block: number of scales, row by row, that share a scale of theirs.
      whole_width: columns of the whole kernels.
      prefix: of the names of the arrays.
    """

    levels: tuple[float, ...]
    group_size: int
    scale_block: int
    height: int
    whole_width: int
    prefix: str = ""
    bits = 4

    def operands(self, arrays: Arrays, dtype: Any) -> Sequence[Operand]:
        """Returns the codes, the scales decoded to float32, and a table of the levels."""
        table = np.zeros((1, LANES), np.float32)
        table[0, : len(self.levels)] = self.levels
        codes = arrays[f"{self.prefix}codes"]
        stored = self.operands_of(codes, self._scales(arrays))
        return (*stored, Operand(jnp.broadcast_to(jnp.asarray(table), (codes.shape[0], 1, LANES))))

    def _scales(self, arrays: Arrays) -> Float[Array, "E s o"]:
        codes, scales, offset = (arrays[f"{self.prefix}{name}"] for name in ("scale_codes", "scales", "offset"))
        experts, blocks, width = codes.shape
        # Scales of scales lie row by row: repeated and cut, not looked up one by one.
        per_row, remainder = divmod(self.whole_width, self.scale_block)
        if remainder == 0:
            # The exact product with ones is computed by XLA:TPU where it is used; `repeat` would be written to memory
            # in float32, and again in another shape.
            few = jnp.pad(scales, ((0, 0), (0, max(0, blocks * per_row - scales.shape[1]))))
            few = few[:, : blocks * per_row].reshape(experts, blocks, per_row)
            owner = jnp.arange(self.whole_width, dtype=jnp.int32) // self.scale_block
            owns = owner[None, :] == jnp.arange(per_row, dtype=jnp.int32)[:, None]
            each = jnp.einsum("ebn,nw->ebw", few, owns.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        else:
            each = jnp.repeat(scales, self.scale_block, axis=1)
            each = jnp.pad(each, ((0, 0), (0, max(0, blocks * self.whole_width - each.shape[1]))))
            each = each[:, : blocks * self.whole_width].reshape(experts, blocks, self.whole_width)
        row = None
        if "origin" in arrays:
            row, column = arrays["origin"][0, 0], arrays["origin"][0, 1]
            each = lax.dynamic_slice_in_dim(each, column, width, 2)
        return self.regrouped(scale_levels(codes) * each + offset[:, None, None], row)

    def make(self, refs: Sequence[Any], piece: Piece) -> Float[Array, "p q"]:
        from moe_jax.kernels.tpu.parts import looked_up

        codes, scales = self.read(refs[:2], piece)
        levels = looked_up(refs[2][...], codes)
        return (levels.reshape(-1, self.shared, piece.shape[1]) * scales).reshape(piece.shape)


def scale_levels(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Returns the numbers that codes of scales stand for: an eight-bit float with a dynamic exponent.

    Computed, as a TPU has no fast way to look up entries of an array in memory. Between 1e-7 and 1 there are twice as
    many levels between two powers of ten as between the two below; the formula is that of
    `functional.codes.SCALE_LEVELS`.
    """
    signed = codes.astype(jnp.int32) - 127
    rank = jnp.abs(signed)
    magnitude = jnp.zeros(codes.shape, jnp.float32)
    for exponent in range(7):
        first = 2**exponent
        place = (2 * (rank - first) + 1).astype(jnp.float32) / (2 * first)
        magnitude = jnp.where(rank >= first, (0.1 + 0.9 * place) * 10.0 ** (exponent - 6), magnitude)
    magnitude = jnp.where(rank == 128, jnp.float32(1), magnitude)
    return jnp.where(signed < 0, -magnitude, magnitude)


def why_not_nf4(block: int, height: int) -> str | None:
    """Returns in words why kernels of this height have no such tile; None: they have one."""
    if height % 8 or rows_that_share(block, height) % 8:
        return f"{height} rows of NF4 codes do not end with eight rows of a block of {block}"
    return None
