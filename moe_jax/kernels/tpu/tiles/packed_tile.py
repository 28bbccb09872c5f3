"""The fused tile of packed codes with a scale per group; see `functional.products.packing`.

Forms name their tile whatever the platform: Pallas, which takes a while to import, is imported where it is used.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.tpu.chip import ANY_CORE, Core
from moe_jax.kernels.tpu.tiles.fused_tile import Operand, Piece
from moe_jax.kernels.tpu.tiles.group_rows import group_rows, rows_that_share

STEP = 256


@dataclasses.dataclass(frozen=True)
class PackedTile:
    """Makes kernels from `codes` [E, bytes, o] and `scales` [E, g, o] or [E, 1, 1].

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
    step: int = STEP
    is_whole: bool = False

    @property
    def shared(self) -> int:
        """Number of rows that share a scale where a kernel is made."""
        return rows_that_share(self.group_size, self.height, self.step)

    def operands(self, arrays: Mapping[str, Array], dtype: Any) -> Sequence[Operand]:
        """Returns the codes, and the scales of every `shared` rows in float32."""
        scales = self._scales(arrays["scales"], arrays)
        return (
            Operand(arrays["codes"], rows=0, columns=1, per_row=Fraction(self.bits, 8)),
            # The axis of length 1 before the last lets a kernel's block begin at any index of the axis before it.
            Operand(scales[:, :, None, :], rows=0, columns=2, per_row=Fraction(1, self.shared)),
        )

    def _scales(self, scales: Array, arrays: Mapping[str, Array]) -> Float[Array, "E s o"]:
        scales = jnp.broadcast_to(scales, (*scales.shape[:2], arrays["codes"].shape[2])).astype(jnp.float32)
        origin = arrays["origin"][0, 0] if "origin" in arrays else None
        return group_rows(scales, self.group_size, self.shared, self.height, origin)

    def make(self, refs: Sequence[Any], piece: Piece) -> Float[Array, "p q"]:
        """Returns a piece of levels times scales, float32."""
        levels, scales = self._levels(refs, piece)
        return (levels * scales).reshape(piece.shape)

    def _levels(self, refs: Sequence[Any], piece: Piece) -> tuple[Float[Array, "s n q"], Float[Array, "s 1 q"]]:
        """Returns the levels of the codes, and the scales, group by group."""
        from jax.experimental import pallas as pl

        from moe_jax.kernels.tpu.tiles.unpacking import scaled_rows, unpack

        (rows, width), (codes_ref, scales_ref) = piece.shape, refs
        columns = pl.ds(piece.column, width)
        start = scaled_rows(piece.row, self.step, self.bits, 8)
        codes = unpack(codes_ref[pl.ds(start, rows * self.bits // 8), columns], self.bits).astype(jnp.float32)
        first = scaled_rows(piece.row, self.step, 1, self.shared)
        scales = scales_ref[pl.ds(first, rows // self.shared), :, columns]
        # Odd levels, or even ones where the scale is negative.
        lowest = (1.0 - 2**self.bits) - (scales < 0).astype(jnp.float32)
        return 2.0 * codes.reshape(-1, self.shared, width) + lowest, scales

    def reduce(self, refs: Sequence[Any], piece: Piece, gradient: Float[Array, "p q"]) -> Float[Array, "s q"]:
        """Returns the gradient of the scales of a piece, given that of its entries; called inside a Pallas kernel."""
        levels, _ = self._levels(refs, piece)
        return jnp.sum(levels * gradient.reshape(levels.shape), axis=1)

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
        """Returns the gradient of the scales, float32, if they are trained; codes have none."""
        from moe_jax.kernels.tpu.grouped_outer import reduced_outer

        if "scales" not in trained:
            return {}
        operands = self.operands(arrays, rows.dtype)
        reduced = reduced_outer(rows, dout, group_sizes, self, operands, core=core, interpret=interpret)
        scales = arrays["scales"].astype(jnp.float32)
        (gradient,) = jax.vjp(lambda scales: self._scales(scales, arrays), scales)[1](reduced)
        return {"scales": gradient}


def why_not_packed(bits: int, group_size: int | None, height: int) -> str | None:
    """Returns in words why kernels of this height have no such tile; None: they have one."""
    if height % 8:
        return f"codes of {bits} bits of {height} rows do not end with a whole word of them"
    if rows_that_share(group_size, height, STEP) % 8:
        return f"groups of {group_size} rows divide pieces of {math.gcd(height, STEP)} rows unevenly"
    return None
