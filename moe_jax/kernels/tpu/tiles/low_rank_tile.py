"""The fused tile of low-rank kernels or deltas, `a b`.

Forms name their tile whatever the platform: Pallas, which takes a while to import, is imported where it is used.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.tpu.chip import ANY_CORE, Core
from moe_jax.kernels.tpu.tiles.fused_tile import Operand, Piece
from moe_jax.kernels.tpu.tiles.stored_tile import StoredTile


@dataclasses.dataclass(frozen=True)
class LowRankTile:
    """Makes `a` [E, i, r] times `b` [E, r, o].

    Where rows are bfloat16 and the factors are not, each factor is split into two terms of bfloat16, and three of the
    four products of terms are added: the tile is then exact to 2^-16. The terms lie side by side along the axis of the
    rank, which is shorter than the matrix unit, so they cost nothing.
    """

    step: int = 256
    is_whole: bool = False

    def operands(self, arrays: Mapping[str, Array], dtype: Any) -> Sequence[Operand]:
        """Returns the factors, `a` transposed: a block of few columns would be padded to 128."""
        from moe_jax.kernels.tpu.pieces import split

        a, b = jnp.swapaxes(arrays["a"], 1, 2), arrays["b"]
        if dtype == jnp.float32:
            a, b = a.astype(dtype), b.astype(dtype)
        elif a.dtype == dtype == b.dtype:
            pass
        else:
            (a, small_a), (b, small_b) = split(a), split(b)
            a, b = jnp.concatenate([a, a, small_a], axis=1), jnp.concatenate([b, small_b, b], axis=1)
        return Operand(a, rows=1), Operand(b, columns=1)

    def make(self, refs: Sequence[Any], piece: Piece) -> Float[Array, "p q"]:
        """Returns a piece of `a b`, float32."""
        from jax.experimental import pallas as pl

        from moe_jax.kernels.tpu.pieces import dot

        (rows, columns), (a, b) = piece.shape, refs
        left, right = a[:, pl.ds(piece.row, rows)], b[:, pl.ds(piece.column, columns)]
        return dot(left, right, (0, 0))

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
        """Returns gradients of `a` and `b`, float32: by the kernel for thin factors, or for a high rank by products."""
        from moe_jax.kernels.tpu.low_rank_gradient import fits, low_rank_gradients

        a, b = arrays["a"], arrays["b"]
        if fits(rows.shape[0], (a.shape[1], b.shape[2]), a.shape[2], rows.dtype, core):
            da, db = low_rank_gradients(rows, dout, a, b, group_sizes, core=core, interpret=interpret)
        else:
            da, db = self._gradients_by_products(rows, dout, a, b, group_sizes, core, interpret)
        return {name: gradient for name, gradient in (("a", da), ("b", db)) if name in trained}

    def _gradients_by_products(
        self, rows: Array, dout: Array, a: Array, b: Array, group_sizes: Array, core: Core, interpret: bool
    ) -> tuple[Array, Array]:
        """The factor between the two products is rounded to the dtype of the rows."""
        from moe_jax.kernels.tpu.grouped_outer import grouped_outer
        from moe_jax.kernels.tpu.grouped_product import grouped_product

        def thin(rows: Array, factor: Array, transposed: bool) -> Array:
            _, height, width = factor.shape
            return grouped_product(
                rows, None, {"kernel": factor.astype(rows.dtype)}, group_sizes, StoredTile(), (height, width),
                transposed=transposed, core=core, interpret=interpret,
            )  # fmt: skip

        inner, outer = thin(rows, a, False), thin(dout, b, True)
        da = grouped_outer(rows, outer, group_sizes, jnp.float32, core=core, interpret=interpret)
        return da, grouped_outer(inner, dout, group_sizes, jnp.float32, core=core, interpret=interpret)
