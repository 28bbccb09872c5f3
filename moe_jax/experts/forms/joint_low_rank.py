"""Low-rank deltas whose factor over the neurons is shared by the matrices of an expert (methods.md 5, SVD)."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.core.finite import cast
from moe_jax.experts.forms.by_name import register
from moe_jax.experts.forms.encoded import JointCoder
from moe_jax.experts.forms.fresh import uniform_factor
from moe_jax.experts.forms.low_rank import LowRank
from moe_jax.experts.forms.matrix import Arrays, Matrix, Split, ffn_matrices
from moe_jax.experts.forms.protocol import KernelForm, Streams
from moe_jax.experts.layout.config import FFNConfig

NEURONS = "neurons/factor"


@register("joint-low-rank")
@dataclasses.dataclass(frozen=True, kw_only=True)
class JointLowRank(LowRank):
    """A low-rank factorisation of an expert's design matrix, in which a row holds all weights of a neuron.

    The matrices share the leaf `neurons/factor` [E, f, r], zero at first. Each has its own leaf `factor` [E, d, r],
    kaiming uniform.
    """

    delta_option: ClassVar[str | None] = None
    delta_number: ClassVar[tuple[str, type] | None] = None
    couples_matrices: ClassVar[bool] = True
    shared_leaves: ClassVar[tuple[str, ...]] = (NEURONS,)

    def check_fits(self, matrices: Mapping[str, Matrix]) -> None:
        """See `ExpertForm`. The rank may be larger than a side of a single matrix."""

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        """See `KernelForm`."""
        return {"factor": uniform_factor(rngs, stack, _width(matrix), self.rank, dtype)}

    def fresh_shared(self, expert: FFNConfig, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        """See `KernelForm`."""
        return {NEURONS: jnp.zeros((*stack, expert.dim, self.rank), dtype)}

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        """See `KernelForm`."""
        return {"factor": P(None, "fsdp", None)}

    @classmethod
    def shared_stored_specs(cls) -> dict[str, P]:
        """See `KernelForm`."""
        return {NEURONS: P(None, "tensor", None)}

    def from_dense(
        self, kernel: Float[np.ndarray, "i o"], matrix: Matrix, num_experts: int, streams: Streams
    ) -> dict[str, np.ndarray]:
        """See `KernelForm`."""
        return KernelForm.from_dense(self, kernel, matrix, num_experts, streams)

    def combine(self, matrix: Matrix, own: Arrays, shared: Arrays) -> dict[str, Array]:
        """See `KernelForm`. Gives `a` and `b` of a low-rank kernel; the shared factor is on the axis of the neurons."""
        neurons, weights = shared[NEURONS], own["factor"]
        if matrix.split == "in":
            return {"a": neurons, "b": weights.swapaxes(-1, -2)}
        return {"a": weights, "b": neurons.swapaxes(-1, -2)}

    def multiplied_entries(self, expert: FFNConfig, d_model: int) -> int:
        """See `ExpertForm`."""
        return self.rank * (expert.dim + sum(map(_width, ffn_matrices(expert, d_model).values())))

    def encode_expert(
        self,
        residuals: Mapping[str, Float[np.ndarray, "i o"]],
        matrices: Mapping[str, Matrix],
        dtype: np.dtype,
        coder: JointCoder,
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """See `KernelForm`. Factorises the design matrix."""
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


def _neuron_rows(kernel: np.ndarray, matrix: Matrix) -> np.ndarray:
    """Transposes a kernel, if needed, so that its rows are neurons; applied twice, it gives the kernel back."""
    return kernel if matrix.split == "in" else kernel.T


def _width(matrix: Matrix) -> int:
    """The size of the axis that is not that of the neurons: d."""
    return matrix.shape[1] if matrix.split == "in" else matrix.shape[0]
