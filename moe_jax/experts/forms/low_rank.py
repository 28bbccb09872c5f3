"""Low-rank deltas (DeRS-LM; methods.md 2.2)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.draws import FACTOR, draw_factor
from moe_jax.core.errors import InputError, check_positive
from moe_jax.core.finite import cast
from moe_jax.experts.forms.by_name import register
from moe_jax.experts.forms.encoded import Coder
from moe_jax.experts.forms.fresh import uniform_factor
from moe_jax.experts.forms.matrix import Arrays, Load, Matrix, Part, Split, Window, ffn_matrices
from moe_jax.experts.forms.protocol import KernelForm, Streams
from moe_jax.experts.layout.config import FFNConfig
from moe_jax.experts.layout.platforms import Cost, Platform
from moe_jax.functional.products.block_synthesis import InTriton
from moe_jax.functional.products.grouped import grouped_matmul
from moe_jax.kernels.tpu.tiles.fused_tile import FusedTile
from moe_jax.kernels.tpu.tiles.low_rank_tile import LowRankTile


@register("low-rank")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank(KernelForm):
    """`W + a b` with `a` [E, in, r], kaiming uniform with a = sqrt(5) as in LoRA, and `b` [E, r, out], zero at first.

    Attributes:
      rank: r.
    """

    delta_option: ClassVar[str | None] = "low-rank:R"
    delta_number: ClassVar[tuple[str, type] | None] = ("rank", int)

    rank: int

    def __post_init__(self) -> None:
        check_positive(self, "rank")

    def check_fits(self, matrices: Mapping[str, Matrix]) -> None:
        """See `ExpertForm`."""
        for name, matrix in matrices.items():
            if self.rank > min(matrix.shape):
                raise InputError(
                    f"rank {self.rank} is above min(d, f) = {min(matrix.shape)} of the {name} kernel {matrix.shape}"
                )

    # ---- what is stored ---------------------------------------------------------------------------------------------

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        """See `KernelForm`."""
        fan_in, fan_out = matrix.shape
        a = uniform_factor(rngs, stack, fan_in, self.rank, dtype)
        return {"a": a, "b": jnp.zeros((*stack, self.rank, fan_out), dtype)}

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        """See `KernelForm`."""
        if split == "in":
            return {"a": P(None, "tensor", None), "b": P(None, None, "fsdp")}
        return {"a": P(None, "fsdp", None), "b": P(None, None, "tensor")}

    def from_dense(
        self, kernel: Float[np.ndarray, "i o"], matrix: Matrix, num_experts: int, streams: Streams
    ) -> dict[str, np.ndarray]:
        """See `KernelForm`."""
        fan_in, fan_out = kernel.shape
        a = np.empty((num_experts, fan_in, self.rank), kernel.dtype)
        for expert in range(num_experts):
            a[expert] = draw_factor(streams(FACTOR, expert), fan_in, self.rank)
        return {"a": a, "b": np.zeros((num_experts, self.rank, fan_out), kernel.dtype)}

    # ---- what it means, and how it is applied -----------------------------------------------------------------------

    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        """See `KernelForm`."""
        delta = arrays["a"].astype(jnp.float32) @ window.columns(arrays["b"].astype(jnp.float32))
        return delta if base is None else base + delta

    def fused_tile(self, shape: tuple[int, int], whole: tuple[int, int]) -> FusedTile | str:
        """See `KernelForm`."""
        return LowRankTile()

    def thin_gradients(
        self,
        lhs: Float[Array, "M i"],
        dout: Float[Array, "M o"],
        arrays: Arrays,
        group_sizes: Int[Array, " E"],
        products: Any,
    ) -> dict[str, Array]:
        """See `KernelForm`. `da = x^T (dy b^T)` and `db = (x a)^T dy`."""
        a, b = (factor.astype(lhs.dtype) for factor in self.factors(arrays))
        through_b = products.product(dout, b, group_sizes, transposed=True)
        da = products.outer(lhs, through_b, group_sizes, dtype=jnp.float32)
        db = products.outer(products.product(lhs, a, group_sizes), dout, group_sizes, dtype=jnp.float32)
        return {"a": da, "b": db}

    def in_triton(self, arrays: Arrays, whole: tuple[int, int], origin: Int[Array, "2"]) -> InTriton:
        """See `KernelForm`."""
        from moe_jax.kernels.gpu.triton_makers import LowRankFactors

        a, b = self.factors(arrays)
        return InTriton(LowRankFactors(a.shape[-1]), (a, b), is_cheap=True)

    def specs(self, split: Split) -> dict[str, P]:
        """See `KernelForm`."""
        return low_rank_specs(split)

    def grouped_delta(
        self,
        rows: Float[Array, "M i"],
        arrays: Arrays,
        group_sizes: Int[Array, " E"],
        matrix: Matrix,
        way: str,
        part: Part | None = None,
    ) -> Float[Array, "M o"]:
        """See `KernelForm`. Two thin products."""
        a, b = (factor.astype(rows.dtype) for factor in self.factors(arrays))
        return grouped_matmul(grouped_matmul(rows, a, group_sizes), b, group_sizes)

    def factors(self, arrays: Arrays) -> tuple[Float[Array, "E i r"], Float[Array, "E r o"]]:
        """See `KernelForm`."""
        return arrays["a"], arrays["b"]

    # ---- what it costs ----------------------------------------------------------------------------------------------

    def multiplied_entries(self, expert: FFNConfig, d_model: int) -> int:
        """See `ExpertForm`."""
        return sum(self.rank * sum(matrix.shape) for matrix in ffn_matrices(expert, d_model).values())

    @property
    def includes_base(self) -> bool:
        """See `ExpertForm`."""
        return False

    def own_bytes(self, matrices: Sequence[Matrix], itemsize: int) -> float:
        """See `KernelForm`."""
        return itemsize * self.rank * sum(sum(matrix.shape) for matrix in matrices)

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        """See `KernelForm`."""
        return platform.products(2.0 * self.rank * sum(matrix.size for matrix in matrices)).total

    def delta_costs(self, matrices: Sequence[Matrix], load: Load, platform: Platform) -> dict[str, Cost]:
        """See `KernelForm`."""
        into, out = (self.rank * sum(matrix.shape[axis] for matrix in matrices) for axis in (0, 1))
        # Sorting moves the rows of every matrix, which costs about two reads and writes of them.
        moved = 4 * platform.itemsize * load.rows * sum(sum(matrix.shape) for matrix in matrices)
        return {
            "side-by-side": platform.products(2 * load.num_experts * (load.tokens * into + load.rows * out)),
            "grouped": platform.products(2 * load.rows * (into + out)) + platform.reading(moved),
        }

    # ---- how it is encoded ------------------------------------------------------------------------------------------

    def encode(
        self,
        residual: Float[np.ndarray, "i o"],
        matrix: Matrix,
        dtype: np.dtype,
        coder: Coder,
        kept: Bool[np.ndarray, "i o"] | None = None,
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """See `KernelForm`."""
        left, right = (cast("a low-rank factor", factor, dtype) for factor in coder.factors(residual, self.rank))
        product = left.astype(np.float32) @ right.astype(np.float32).T
        return {"a": left, "b": np.ascontiguousarray(right.T)}, product


def low_rank_specs(split: Split) -> dict[str, P]:
    """How stacked factors are split inside `shard_map`; see `KernelForm.specs`."""
    if split == "in":
        return {"a": P("expert", "tensor", None), "b": P("expert", None, None)}
    return {"a": P("expert", None, None), "b": P("expert", None, "tensor")}
