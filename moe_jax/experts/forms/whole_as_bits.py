"""Whole kernels in bfloat16 as a CPU multiplies with them: never stored, made of `Full` when a model is to generate."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from moe_jax.experts.devices import Platform
from moe_jax.experts.forms.never_stored import NeverStored
from moe_jax.experts.shapes import Arrays, GroupSizes, Matrix, Part, Rows, Window
from moe_jax.functional.few_rows.bfloat16_bits import grouped_product_of_bits, linear_of_bits, widened


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeAsBits(NeverStored):
    """`transposed` uint16[..., out, in], the bits of numbers in bfloat16 (`few_rows.bfloat16_bits`)."""

    kind: ClassVar[str] = "full, as bits"
    over_base: ClassVar[bool] = False
    paths: ClassVar[tuple[str, ...]] = ("transposed",)

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        return {"transposed": jnp.zeros((*stack, *reversed(matrix.shape)), jnp.uint16)}

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        return 0.0

    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        bits = lax.dynamic_slice_in_dim(arrays["transposed"], window.start, window.width, 0)
        return widened(bits).T

    def apply(self, x: Float[Array, "... i"], arrays: Arrays, matrix: Matrix, key: Array | None) -> Array:
        return linear_of_bits(x, arrays["transposed"])

    def grouped(
        self, rows: Rows, arrays: Arrays, group_sizes: GroupSizes, matrix: Matrix, part: Part | None = None
    ) -> Rows:
        assert part is None, "one device only"
        return grouped_product_of_bits(rows, arrays["transposed"], group_sizes)
