"""The fused tile of kernels that are stored as they are."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.tpu.chip import ANY_CORE, Core
from moe_jax.kernels.tpu.tiles.fused_tile import Operand, Piece


@dataclasses.dataclass(frozen=True)
class StoredTile:
    """Loads `kernel` [E, i, o], converted to the dtype of the rows in fast memory if its own is another."""

    step: int = 256
    is_whole: bool = True

    def operands(self, arrays: Mapping[str, Array], dtype: Any) -> Sequence[Operand]:
        """Returns the kernels themselves."""
        return (Operand(arrays["kernel"], rows=0, columns=1),)

    def make(self, refs: Sequence[Any], piece: Piece) -> Float[Array, "p q"]:
        """Returns a piece of the kernel, float32."""
        from jax.experimental import pallas as pl

        (rows, columns), (kernel,) = piece.shape, refs
        return kernel[pl.ds(piece.row, rows), pl.ds(piece.column, columns)].astype(jnp.float32)

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
        """Returns the gradient of the kernels, in their dtype and of their size."""
        from moe_jax.kernels.tpu.grouped_outer import grouped_outer

        dtype = arrays["kernel"].dtype
        return {name: grouped_outer(rows, dout, group_sizes, dtype, core=core, interpret=interpret) for name in trained}
