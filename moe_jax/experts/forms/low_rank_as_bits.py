"""Low-rank deltas in bfloat16 as a CPU multiplies with them: never stored, made of `LowRank` to generate with."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from moe_jax.experts.devices import Cost, Platform
from moe_jax.experts.forms.never_stored import NeverStored
from moe_jax.experts.forms.optional import Factored
from moe_jax.experts.shapes import Arrays, FFNConfig, GroupSizes, Load, Matrix, Part, Rows, Window, ffn_matrices
from moe_jax.functional.few_rows.bfloat16_bits import grouped_product_of_bits, widened


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankAsBits(Factored, NeverStored):
    """`W + a b`, given the bits of the factors transposed: `a` uint16[E, r, in], `b` uint16[E, out, r].

    See `few_rows.bfloat16_bits`.

    Attributes:
      rank: r.
    """

    kind: ClassVar[str] = "low rank, as bits"
    includes_base: ClassVar[bool] = False
    paths: ClassVar[tuple[str, ...]] = ("a", "b")

    rank: int

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        fan_in, fan_out = matrix.shape
        shapes = {"a": (self.rank, fan_in), "b": (fan_out, self.rank)}
        return {name: jnp.zeros((*stack, *shape), jnp.uint16) for name, shape in shapes.items()}

    def multiplied_entries(self, expert: FFNConfig, d_model: int) -> int:
        return self._entries(ffn_matrices(expert, d_model).values())

    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        b = lax.dynamic_slice_in_dim(arrays["b"], window.start, window.width, 0)
        delta = widened(arrays["a"]).T @ widened(b).T
        return delta if base is None else base + delta

    def grouped_delta(
        self, rows: Rows, arrays: Arrays, group_sizes: GroupSizes, matrix: Matrix, way: str, part: Part | None = None
    ) -> Rows:
        assert part is None, "one device only"
        inner = grouped_product_of_bits(rows, arrays["a"], group_sizes)
        return grouped_product_of_bits(inner, arrays["b"], group_sizes)

    def own_bytes(self, matrices: Sequence[Matrix], itemsize: int) -> float:
        return 2.0 * self._entries(matrices)

    def delta_costs(self, matrices: Sequence[Matrix], load: Load, platform: Platform) -> dict[str, Cost]:
        return {"grouped": platform.products(2.0 * load.rows * self._entries(matrices))}

    def _entries(self, matrices: Iterable[Matrix]) -> int:
        return self.rank * sum(sum(matrix.shape) for matrix in matrices)
