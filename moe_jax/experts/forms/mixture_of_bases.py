"""Kernels whose larger factor is a mixture of bases that all experts share (MoBE, arXiv 2508.05257, section 3)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from moe_jax.core.errors import InputError, check_member, check_positive
from moe_jax.core.form_options import BasisActivation
from moe_jax.experts.devices import Cost, Platform
from moe_jax.experts.forms.coding import Layout, Storable, Wanted
from moe_jax.experts.forms.low_rank import LowRank, ProductOfFactors
from moe_jax.experts.forms.protocol import KernelForm, register
from moe_jax.experts.forms.whole import Full
from moe_jax.experts.shapes import Arrays, FFNConfig, Load, Matrix, Split, ffn_matrices, normal_kernel

FUNCTIONS: dict[str, Callable[[Array], Array]] = {"silu": jax.nn.silu, "tanh": jnp.tanh}
MIXTURE = "mixture"


@register("mixture-of-bases")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureOfBases(ProductOfFactors, Storable):
    """`a b`, one factor of an expert's own, the other `act(sum_j softmax(mixture)_j basis_j)`; `down` is whole.

    The leaf of the mixed factor is `basis/a` [m, in, r] or `basis/b` [m, r, out], without an axis of experts; `mixture`
    [E, m] holds logits. The expert's own factor is on the shorter side of a kernel: of narrow experts, which alone
    are in the paper, `b` [E, r, f]; of wide ones `a` [E, d, r]. It is zero at first; bases are normal. `down` has the
    leaf `kernel` [E, f, d]. There is no shared base.

    Attributes:
      bases: m.
      activation: of the mixed bases.
    """

    allowed_bases: ClassVar[tuple[str, ...]] = ("none",)
    asks_for: ClassVar[tuple[str, ...]] = ("keep",)
    common_leaves: ClassVar[tuple[str, ...]] = ("basis/a", "basis/b")

    bases: int
    activation: BasisActivation = "silu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "bases")
        check_member("activation", self.activation, get_args(BasisActivation))

    def check_base(self, base: str) -> None:
        """There is none."""
        super().check_base(base)
        if base != "none":
            raise InputError(f"mixture-of-bases experts have no shared base: base is 'none', not {base!r}")

    def check_fits(self, matrices: Mapping[str, Matrix]) -> None:
        super().check_fits({name: matrix for name, matrix in matrices.items() if _is_factored(matrix)})

    def of_matrix(self, matrix: Matrix) -> KernelForm:
        return self if _is_factored(matrix) else Full()

    # ---- what is stored ---------------------------------------------------------------------------------------------

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        mixed, own = sides(matrix)
        shapes = {"a": (matrix.shape[0], self.rank), "b": (self.rank, matrix.shape[1])}
        return {
            f"basis/{mixed}": normal_kernel(rngs, (self.bases, *shapes[mixed]), dtype),
            MIXTURE: jnp.zeros((*stack, self.bases), dtype),
            own: jnp.zeros((*stack, *shapes[own]), dtype),
        }

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        """Bases are split like the factors of one expert."""
        factors = LowRank.stored_specs(split)
        bases = {f"basis/{name}": spec for name, spec in factors.items()}
        return {**factors, **bases, MIXTURE: P(None, None), **Full.stored_specs(split)}

    def combine(self, matrix: Matrix, own: Arrays, shared: Arrays) -> dict[str, Array]:
        """Gives `a` and `b` of a low-rank kernel; bases are mixed in float32."""
        mixed, other = sides(matrix)
        return {mixed: self.mix(own[f"basis/{mixed}"], own[MIXTURE]), other: own[other]}

    def mix(self, bases: Array, logits: Array) -> Array:
        """The mixed factors [..., x, y], in the dtype of the bases [m, x, y], for logits [..., m]."""
        alpha = jax.nn.softmax(jnp.asarray(logits).astype(jnp.float32), axis=-1)
        mixed = jnp.tensordot(alpha, jnp.asarray(bases).astype(jnp.float32), axes=1)
        return FUNCTIONS[self.activation](mixed).astype(bases.dtype)

    @classmethod
    def _layouts(cls) -> tuple[Layout, ...]:
        return (Layout("bases", cls),)

    @classmethod
    def for_share(
        cls, wanted: Wanted, expert: FFNConfig, d_model: int, num_experts: int, shares: Sequence[float] | None = None
    ) -> "MixtureOfBases":
        return cls.of_size(expert, d_model, num_experts, keep=wanted.keep)

    @classmethod
    def of_size(
        cls,
        expert: FFNConfig,
        d_model: int,
        num_experts: int,
        *,
        keep: float | None = None,
        rank: int | None = None,
        bases: int | None = None,
        activation: BasisActivation = "silu",
    ) -> "MixtureOfBases":
        """Experts whose gate and up take the share `keep` of their numbers, or have the rank.

        Args:
          expert: the shape of an expert.
          d_model: d.
          num_experts: E.
          keep: share; None: the rank is given.
          rank: None: min(d, f), which with `keep` is the most.
          bases: m; None: a quarter of E, and at least one.
          activation: of mixed bases.
        """
        short, long = sorted((d_model, expert.dim))
        bases = max(1, num_experts // 4) if bases is None else bases
        if keep is not None:
            numbers = num_experts * (keep * short * long - bases)
            rank = max(1, min(short, int(numbers / (num_experts * short + bases * long))))
        return cls(rank=short if rank is None else rank, bases=bases, activation=activation)

    # ---- what it costs ----------------------------------------------------------------------------------------------

    def multiplied_entries(self, expert: FFNConfig, d_model: int) -> int:
        matrices = ffn_matrices(expert, d_model).values()
        return sum(self.rank * sum(m.shape) if _is_factored(m) else m.size for m in matrices)

    def own_bytes(self, matrices: Sequence[Matrix], itemsize: int) -> float:
        """The mixed factor is read as if it were the expert's own."""
        factored, whole = _apart(matrices)
        return super().own_bytes(factored, itemsize) + itemsize * sum(matrix.size for matrix in whole)

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        """Products of factors, and the mixing of bases."""
        factored, _ = _apart(matrices)
        return super().making(factored, platform) + self._mixing(factored, platform)

    def delta_costs(self, matrices: Sequence[Matrix], load: Load, platform: Platform) -> dict[str, Cost]:
        """Two thin products, and a whole one with `down`."""
        factored, whole = _apart(matrices)
        thin = super().delta_costs(factored, load, platform)["grouped"]
        whole_products = platform.products(2 * load.rows * sum(matrix.size for matrix in whole))
        total = thin + whole_products
        return {"grouped": total._replace(making=total.making + load.num_experts * self._mixing(factored, platform))}

    def _mixing(self, factored: Sequence[Matrix], platform: Platform) -> float:
        """Estimated seconds that it takes to mix the factors of one expert."""
        entries = sum(self.rank * max(matrix.shape) for matrix in factored)
        return platform.products(2.0 * self.bases * entries).total


def sides(matrix: Matrix) -> tuple[str, str]:
    """The factor that is mixed of bases, on the longer side of a kernel, and the expert's own."""
    return ("a", "b") if matrix.shape[0] >= matrix.shape[1] else ("b", "a")


def _is_factored(matrix: Matrix) -> bool:
    """Whether a kernel is one of gate and up, whose outputs are the neurons."""
    return matrix.split == "out"


def _apart(matrices: Sequence[Matrix]) -> tuple[list[Matrix], list[Matrix]]:
    """The factored ones, and the whole ones."""
    return [m for m in matrices if _is_factored(m)], [m for m in matrices if not _is_factored(m)]
