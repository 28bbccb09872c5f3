"""The fused tile of NF4 kernels; see `functional.products.nf4` for their arrays.

Forms name their tile whatever the platform: Pallas, which takes a while to import, is imported where it is used.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from moe_jax.kernels.tpu.chip import ANY_CORE, LANES, Core
from moe_jax.kernels.tpu.tiles.fused_tile import Operand, Piece
from moe_jax.kernels.tpu.tiles.group_rows import group_rows, rows_that_share

STEP = 256


@dataclasses.dataclass(frozen=True)
class NF4Tile:
    """Makes kernels from `codes` [E, i / 2, o], `scale_codes` [E, i / block, o], `scales` [E, n] and `offset` [E].

    The scales of the blocks, one number for 64 of the kernel, are computed before the kernel is called.

    Attributes:
      levels: the 16 numbers that codes stand for.
      block: rows that share a scale.
      scale_block: number of scales, row by row, that share a scale of theirs.
      height: rows of the kernels, or of the part of them that this device has.
      whole_width: columns of the whole kernels.
      prefix: of the names of the arrays.
    """

    levels: tuple[float, ...]
    block: int
    scale_block: int
    height: int
    whole_width: int
    prefix: str = ""
    step: int = STEP
    is_whole: bool = False

    @property
    def shared(self) -> int:
        """Number of rows that share a scale where a kernel is made."""
        return rows_that_share(self.block, self.height, self.step)

    def operands(self, arrays: Mapping[str, Array], dtype: Any) -> Sequence[Operand]:
        """Returns the codes, and the scales decoded to float32."""
        table = np.zeros((1, LANES), np.float32)
        table[0, : len(self.levels)] = self.levels
        codes, scales = arrays[f"{self.prefix}codes"], self._scales(arrays)
        experts = codes.shape[0]
        return (
            Operand(codes, rows=0, columns=1, per_row=Fraction(1, 2)),
            Operand(scales[:, :, None, :], rows=0, columns=2, per_row=Fraction(1, self.shared)),
            Operand(jnp.broadcast_to(jnp.asarray(table), (experts, 1, LANES))),
        )

    def _scales(self, arrays: Mapping[str, Array]) -> Float[Array, "E s o"]:
        """Returns the scale of every `shared` rows of a column."""
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
        values = scale_levels(codes) * each + offset[:, None, None]
        return group_rows(values, self.block, self.shared, self.height, row)

    def make(self, refs: Sequence[Any], piece: Piece) -> Float[Array, "p q"]:
        """Returns a piece of the kernels, float32."""
        from jax.experimental import pallas as pl

        from moe_jax.kernels.tpu.tiles.unpacking import looked_up, scaled_rows, unpack

        (rows, width), (codes_ref, scales_ref, table_ref) = piece.shape, refs
        columns = pl.ds(piece.column, width)
        codes = unpack(codes_ref[pl.ds(scaled_rows(piece.row, self.step, 1, 2), rows // 2), columns], 4)
        first = scaled_rows(piece.row, self.step, 1, self.shared)
        scales = scales_ref[pl.ds(first, rows // self.shared), :, columns]
        levels = looked_up(table_ref[...], codes)
        return (levels.reshape(-1, self.shared, width) * scales).reshape(rows, width)

    def gradients(
        self,
        rows: Float[Array, "M i"],
        dout: Float[Array, "M o"],
        arrays: Mapping[str, Array],
        trained: Sequence[str],
        group_sizes: Int[Array, " E"],
        *,
        core: Core = ANY_CORE,
        interpret: bool = False,
    ) -> dict[str, Array]:
        """Returns no gradients: NF4 kernels are not trained."""
        assert not trained, f"NF4 kernels are frozen: {trained}"
        return {}


def scale_levels(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Returns the numbers that codes of scales stand for: an eight-bit float with a dynamic exponent.

    Computed, as a TPU has no fast way to look up entries of an array in memory. Between 1e-7 and 1 there are twice as
    many levels between two powers of ten as between the two below; the formula is that of
    `functional.products.nf4.SCALE_LEVELS`.
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
    if height % 8 or rows_that_share(block, height, STEP) % 8:
        return f"{height} rows of NF4 codes do not end with eight rows of a block of {block}"
    return None
