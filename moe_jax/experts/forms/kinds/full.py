"""Plain kernels: of a linear map, or of experts without a base (vanilla upcycling, Mixtral, OLMoE)."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.experts.forms.by_name import register
from moe_jax.experts.forms.matrix import Arrays, Matrix, Part, Split, Window, normal_kernel
from moe_jax.experts.forms.optional.backends import MadeInPallas
from moe_jax.experts.forms.optional.coding import Storable
from moe_jax.experts.forms.optional.costs import CostModel
from moe_jax.experts.forms.protocol import KernelForm, Streams
from moe_jax.experts.layout.platforms import Platform
from moe_jax.functional.dense import linear
from moe_jax.functional.grouped import grouped_matmul
from moe_jax.kernels.tpu.fused_tile import FusedTile
from moe_jax.kernels.tpu.tiles import StoredTile


@register("full")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(Storable, CostModel, MadeInPallas, KernelForm):
    """`kernel` [..., in, out], normal with standard deviation 0.02 at first."""

    over_base: ClassVar[bool] = False
    delta_option: ClassVar[str | None] = "full"
    rounded_leaves: ClassVar[tuple[str, ...]] = ("kernel",)

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        return {"kernel": normal_kernel(rngs, (*stack, *matrix.shape), dtype)}

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        return {"kernel": P("expert", "tensor", "fsdp") if split == "in" else P("expert", "fsdp", "tensor")}

    def from_dense(
        self, kernel: Float[np.ndarray, "i o"], matrix: Matrix, num_experts: int, streams: Streams
    ) -> dict[str, np.ndarray]:
        """The kernel is a view with stride 0 along the experts, and not copied."""
        return {"kernel": np.broadcast_to(kernel, (num_experts, *kernel.shape))}

    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        return window.columns(arrays["kernel"]).astype(jnp.float32)

    def materialise(self, base: Float[Array, "i o"] | None, arrays: Arrays, matrix: Matrix) -> Float[Array, "i o"]:
        """The kernel as it is stored, in its own dtype."""
        return arrays["kernel"]

    def apply(self, x: Float[Array, "... i"], arrays: Arrays, matrix: Matrix, key: Array | None) -> Array:
        return linear(x, arrays["kernel"])

    def fused_tile(self, shape: tuple[int, int], whole: tuple[int, int]) -> FusedTile:
        return StoredTile()

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        """They are multiplied as they are stored."""
        return 0.0

    def specs(self, split: Split) -> dict[str, P]:
        return {"kernel": P("expert", "tensor", None) if split == "in" else P("expert", None, "tensor")}

    def grouped(
        self,
        rows: Float[Array, "M i"],
        arrays: Arrays,
        group_sizes: Int[Array, " E"],
        matrix: Matrix,
        part: Part | None = None,
    ) -> Float[Array, "M o"]:
        return grouped_matmul(rows, arrays["kernel"].astype(rows.dtype), group_sizes)
