"""Low-rank deltas: each matrix has its own factors (DeRS-LM; methods.md 2.2), or an expert one for all (5, SVD)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.core.draws import FACTOR, draw_factor
from moe_jax.core.errors import InputError
from moe_jax.core.finite import cast
from moe_jax.core.form_options import Design, FactorsOptions, LowRankOptions
from moe_jax.experts.devices import Cost, Platform
from moe_jax.experts.forms.coding import (
    CodedJointly,
    Coder,
    Encodable,
    EncodedKernel,
    JointCoder,
    Layout,
    Residual,
    Wanted,
)
from moe_jax.experts.forms.optional import CostModel, MadeInPallas, MadeInTriton, SideBySide
from moe_jax.experts.forms.protocol import KernelForm, Streams, register
from moe_jax.experts.shapes import (
    Arrays,
    FFNConfig,
    GroupSizes,
    Load,
    Matrix,
    Part,
    Rows,
    Split,
    Window,
    ffn_matrices,
    uniform_factor,
)
from moe_jax.functional.grouped import grouped_matmul
from moe_jax.functional.synthesis import InTriton
from moe_jax.kernels.tpu.fused_tile import FusedTile
from moe_jax.kernels.tpu.tiles import LowRankTile

NEURONS = "neurons/factor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductOfFactors(FactorsOptions, CostModel, SideBySide, MadeInPallas, MadeInTriton, KernelForm):
    """`W + a b` with arrays `a` [E, in, r] and `b` [E, r, out], whatever leaves they are made of.

    Attributes:
      rank: r.
    """

    includes_base: ClassVar[bool] = False

    def check_fits(self, matrices: Mapping[str, Matrix]) -> None:
        for name, matrix in matrices.items():
            if self.rank > min(matrix.shape):
                raise InputError(
                    f"rank {self.rank} is above min(d, f) = {min(matrix.shape)} of the {name} kernel {matrix.shape}"
                )

    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        delta = arrays["a"].astype(jnp.float32) @ window.columns(arrays["b"].astype(jnp.float32))
        return delta if base is None else base + delta

    def specs(self, split: Split) -> dict[str, P]:
        return low_rank_specs(split)

    def fused_tile(self, shape: tuple[int, int], whole: tuple[int, int]) -> FusedTile | str:
        return LowRankTile()

    def in_triton(self, arrays: Arrays, whole: tuple[int, int], origin: Int[Array, "2"]) -> InTriton:
        from moe_jax.kernels.gpu.triton_makers import LowRankFactors

        a, b = self.factors(arrays)
        return InTriton(LowRankFactors(a.shape[-1]), (a, b), is_cheap=True)

    def thin_gradients(
        self, lhs: Array, dout: Array, arrays: Arrays, group_sizes: Array, products: Any
    ) -> dict[str, Array]:
        """`da = x^T (dy b^T)` and `db = (x a)^T dy`."""
        a, b = (factor.astype(lhs.dtype) for factor in self.factors(arrays))
        through_b = products.product(dout, b, group_sizes, transposed=True)
        da = products.outer(lhs, through_b, group_sizes, dtype=jnp.float32)
        db = products.outer(products.product(lhs, a, group_sizes), dout, group_sizes, dtype=jnp.float32)
        return {"a": da, "b": db}

    def grouped_delta(
        self, rows: Rows, arrays: Arrays, group_sizes: GroupSizes, matrix: Matrix, way: str, part: Part | None = None
    ) -> Rows:
        """Two thin products."""
        a, b = (factor.astype(rows.dtype) for factor in self.factors(arrays))
        return grouped_matmul(grouped_matmul(rows, a, group_sizes), b, group_sizes)

    def factors(self, arrays: Arrays) -> tuple[Float[Array, "E i r"], Float[Array, "E r o"]]:
        return arrays["a"], arrays["b"]

    def multiplied_entries(self, expert: FFNConfig, d_model: int) -> int:
        return sum(self.rank * sum(matrix.shape) for matrix in ffn_matrices(expert, d_model).values())

    def own_bytes(self, matrices: Sequence[Matrix], itemsize: int) -> float:
        return itemsize * self.rank * sum(sum(matrix.shape) for matrix in matrices)

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        return platform.products(2.0 * self.rank * sum(matrix.size for matrix in matrices)).total

    def delta_costs(self, matrices: Sequence[Matrix], load: Load, platform: Platform) -> dict[str, Cost]:
        into, out = (self.rank * sum(matrix.shape[axis] for matrix in matrices) for axis in (0, 1))
        # Sorting moves the rows of every matrix, which costs about two reads and writes of them.
        moved = 4 * platform.itemsize * load.rows * sum(sum(matrix.shape) for matrix in matrices)
        return {
            "side-by-side": platform.products(2 * load.num_experts * (load.tokens * into + load.rows * out)),
            "grouped": platform.products(2 * load.rows * (into + out)) + platform.reading(moved),
        }


@register("low-rank")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank(LowRankOptions, ProductOfFactors, Encodable):
    """`W + a b` with `a` [E, in, r], kaiming uniform with a = sqrt(5) as in LoRA, and `b` [E, r, out], zero at first.

    Attributes:
      rank: r.
    """

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        fan_in, fan_out = matrix.shape
        a = uniform_factor(rngs, stack, fan_in, self.rank, dtype)
        return {"a": a, "b": jnp.zeros((*stack, self.rank, fan_out), dtype)}

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        if split == "in":
            return {"a": P(None, "tensor", None), "b": P(None, None, "fsdp")}
        return {"a": P(None, "fsdp", None), "b": P(None, None, "tensor")}

    def from_dense(
        self, kernel: Float[np.ndarray, "i o"], matrix: Matrix, num_experts: int, streams: Streams
    ) -> dict[str, np.ndarray]:
        fan_in, fan_out = kernel.shape
        a = np.empty((num_experts, fan_in, self.rank), kernel.dtype)
        for expert in range(num_experts):
            a[expert] = draw_factor(streams(FACTOR, expert), fan_in, self.rank)
        return {"a": a, "b": np.zeros((num_experts, self.rank, fan_out), kernel.dtype)}

    # ---- how residuals are encoded ----------------------------------------------------------------------------------

    @classmethod
    def _layouts(cls) -> tuple[Layout, ...]:
        return Layout("svd", cls, {"design": "concat"}), Layout("svd-separate", cls, {"design": "separate"})

    @classmethod
    def sizes_to_try(cls, design: Design) -> tuple[Wanted, ...]:
        return tuple(Wanted(form=cls, keep=keep, design=design) for keep in (0.05, 0.1, 0.15, 0.2, 0.25))

    @classmethod
    def for_share(
        cls, wanted: Wanted, expert: FFNConfig, d_model: int, num_experts: int, shares: Sequence[float] | None = None
    ) -> KernelForm:
        """As many numbers as a share of the entries: of [f, m d] for m matrices, or of [d, f] (methods.md 5)."""
        assert wanted.keep is not None
        joint = wanted.design == "concat"
        f, width = expert.dim, (len(expert.matrices) if joint else 1) * d_model
        rank = min(max(1, int(wanted.keep * f * width / (f + width))), f, width)
        return JointLowRank(rank=rank) if joint else LowRank(rank=rank)

    def encode(self, residual: Residual, matrix: Matrix, coder: Coder) -> EncodedKernel:
        factors = coder.factors(residual.values, self.rank)
        left, right = (cast("a low-rank factor", factor, residual.dtype) for factor in factors)
        product = left.astype(np.float32) @ right.astype(np.float32).T
        return {"a": left, "b": np.ascontiguousarray(right.T)}, product


@register("joint-low-rank")
@dataclasses.dataclass(frozen=True, kw_only=True)
class JointLowRank(ProductOfFactors, CodedJointly):
    """A low-rank factorisation of an expert's design matrix, in which a row holds all weights of a neuron.

    The matrices share the leaf `neurons/factor` [E, f, r], zero at first. Each has its own leaf `factor` [E, d, r],
    kaiming uniform.
    """

    shared_leaves: ClassVar[tuple[str, ...]] = (NEURONS,)

    def check_fits(self, matrices: Mapping[str, Matrix]) -> None:
        """The rank may be larger than a side of a single matrix."""

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        return {"factor": uniform_factor(rngs, stack, _width(matrix), self.rank, dtype)}

    def fresh_shared(self, expert: FFNConfig, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        return {NEURONS: jnp.zeros((*stack, expert.dim, self.rank), dtype)}

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        return {"factor": P(None, "fsdp", None)}

    @classmethod
    def shared_stored_specs(cls) -> dict[str, P]:
        return {NEURONS: P(None, "tensor", None)}

    def combine(self, matrix: Matrix, own: Arrays, shared: Arrays) -> dict[str, Array]:
        """Gives `a` and `b` of a low-rank kernel; the shared factor is on the axis of the neurons."""
        neurons, weights = shared[NEURONS], own["factor"]
        if matrix.split == "in":
            return {"a": neurons, "b": weights.swapaxes(-1, -2)}
        return {"a": weights, "b": neurons.swapaxes(-1, -2)}

    def multiplied_entries(self, expert: FFNConfig, d_model: int) -> int:
        return self.rank * (expert.dim + sum(map(_width, ffn_matrices(expert, d_model).values())))

    def encode_expert(
        self, residuals: Mapping[str, np.ndarray], matrices: Mapping[str, Matrix], dtype: np.dtype, coder: JointCoder
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Factorises the design matrix."""
        rows = {name: _neuron_rows(residuals[name], matrix) for name, matrix in matrices.items()}
        factor, weights = coder.factors(rows, self.rank)
        neurons = cast("a low-rank factor", factor, dtype)
        leaves, products = {NEURONS: neurons}, {}
        for name, matrix in matrices.items():
            own = cast("a low-rank factor", weights[name], dtype)
            product = neurons.astype(np.float32) @ own.astype(np.float32).T
            leaves[f"{name}/factor"] = own
            products[name] = np.ascontiguousarray(_neuron_rows(product, matrix))
        return leaves, products


def low_rank_specs(split: Split) -> dict[str, P]:
    """How stacked factors are split inside `shard_map`; see `KernelForm.specs`."""
    if split == "in":
        return {"a": P("expert", "tensor", None), "b": P("expert", None, None)}
    return {"a": P("expert", None, None), "b": P("expert", None, "tensor")}


def _neuron_rows(kernel: np.ndarray, matrix: Matrix) -> np.ndarray:
    """Transposes a kernel, if needed, so that its rows are neurons; applied twice, it gives the kernel back."""
    return kernel if matrix.split == "in" else kernel.T


def _width(matrix: Matrix) -> int:
    """The size of the axis that is not that of the neurons: d."""
    return matrix.shape[1] if matrix.split == "in" else matrix.shape[0]
