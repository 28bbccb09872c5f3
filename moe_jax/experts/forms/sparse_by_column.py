"""Sparse deltas as a CPU multiplies with them: never stored, made of `Sparse` when a model is to generate."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.devices import Cost, Platform
from moe_jax.experts.forms.never_stored import NeverStored
from moe_jax.experts.forms.optional import Factored
from moe_jax.experts.shapes import Arrays, FFNConfig, GroupSizes, Load, Matrix, Part, Rows, Window, ffn_matrices
from moe_jax.functional.sparse.by_column import MOST_ALONE, Columns, grouped_product_by_column, tile_by_column

# Seconds on a CPU: to multiply one row of few, or one of many, with an entry, and to write it into a tile; measured.
_OF_FEW_ROWS, _OF_MANY_ROWS, _WRITTEN = 2.3e-10, 8e-11, 3.4e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseByColumn(Factored, NeverStored):
    """`W` plus `values` [E, k, out] in the rows `rows` [E, k, out]; see `functional.sparse.by_column`.

    Attributes:
      places: k of each matrix, in the order of `FFNConfig.matrices`.
    """

    kind: ClassVar[str] = "sparse by column"
    includes_base: ClassVar[bool] = False
    paths: ClassVar[tuple[str, ...]] = ("rows", "values")

    places: tuple[int, ...]

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        shape = (*stack, self.places[matrix.index], matrix.shape[1])
        return {"rows": jnp.zeros(shape, jnp.uint16), "values": jnp.zeros(shape, dtype)}

    def multiplied_entries(self, expert: FFNConfig, d_model: int) -> int:
        return self._entries(ffn_matrices(expert, d_model).values())

    # ---- how it is applied ------------------------------------------------------------------------------------------

    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        delta = tile_by_column(arrays["rows"], arrays["values"], window.start, (window.shape[0], window.width))
        return delta if base is None else base + delta

    def grouped_delta(
        self, rows: Rows, arrays: Arrays, group_sizes: GroupSizes, matrix: Matrix, way: str, part: Part | None = None
    ) -> Rows:
        assert part is None, "one device only"
        if way != "entrywise":
            return self.grouped(rows, arrays, group_sizes, matrix)
        return grouped_product_by_column(rows, Columns(arrays["rows"], arrays["values"]), group_sizes)

    # ---- what it costs ----------------------------------------------------------------------------------------------

    def own_bytes(self, matrices: Sequence[Matrix], itemsize: int) -> float:
        return (itemsize + 2) * self._entries(matrices)

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        return _WRITTEN * self._entries(matrices)

    def delta_costs(self, matrices: Sequence[Matrix], load: Load, platform: Platform) -> dict[str, Cost]:
        seconds = _OF_FEW_ROWS if load.rows <= MOST_ALONE * load.used_experts else _OF_MANY_ROWS
        entrywise = Cost(load.rows * self._entries(matrices) * seconds)
        return super().delta_costs(matrices, load, platform) | {"entrywise": entrywise}

    def _entries(self, matrices: Iterable[Matrix]) -> int:
        return sum(self.places[matrix.index] * matrix.shape[1] for matrix in matrices)
