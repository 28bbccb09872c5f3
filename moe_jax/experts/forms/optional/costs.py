"""Optional: what kernels of a form cost where that is less than whole kernels, and cheaper exact ways to apply them.

The cost of every strategy follows from these.
"""

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Array, Float, Int

from moe_jax.experts.forms.matrix import Arrays, Load, Matrix, Part
from moe_jax.experts.layout.config import FFNConfig
from moe_jax.experts.layout.platforms import Cost, Platform

if TYPE_CHECKING:
    from moe_jax.experts.forms.protocol import KernelForm


class CostModel:
    """Optional: estimated bytes and seconds. What a form does not say is what whole kernels take."""

    def own_bytes(self, matrices: Sequence[Matrix], itemsize: int) -> float:
        """Estimated bytes read for one expert's own part; by default, those of whole kernels.

        Args:
          matrices: of an expert.
          itemsize: bytes of a parameter that is a floating-point number.
        """
        return itemsize * sum(matrix.size for matrix in matrices)

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        """Estimated seconds that it takes to make the kernels of one expert; by default, two operations per entry."""
        return platform.products(2.0 * sum(matrix.size for matrix in matrices)).total

    def delta_costs(self, matrices: Sequence[Matrix], load: Load, platform: Platform) -> dict[str, Cost]:
        """The ways to apply the deltas alone, with what each takes; reading the parameters is not included."""
        products = platform.products(2 * load.rows * sum(matrix.size for matrix in matrices))
        return {"grouped": products._replace(making=load.used_experts * self.making(matrices, platform))}

    def formula_entries(self, expert: FFNConfig, d_model: int) -> float | None:
        """`multiplied_entries` by a published formula that does not round; None: there is no other formula."""
        return None


WHOLE_KERNELS = CostModel()
"""The costs of forms that say nothing about them."""


def costs_of(form: Any) -> CostModel:
    """The cost model of a form: its own, or that of whole kernels."""
    return form if isinstance(form, CostModel) else WHOLE_KERNELS


def costs_by_strategy(
    form: "KernelForm",
    matrices: Sequence[Matrix],
    load: Load,
    platform: Platform,
    *,
    based: Sequence[Matrix],
    codes: "KernelForm | None" = None,
) -> dict[str, Cost]:
    """The estimated cost of every strategy (`experts.strategy`) by which experts of a form can be applied.

    Args:
      form: of the experts' own part.
      matrices: of an expert.
      load: the numbers of experts and tokens.
      platform: what operations, bytes and entries cost.
      based: those of the matrices that have a base.
      codes: the form of its kernels if they are stored in codes, which are read and unpacked once. For synthesised
        kernels the base is also written in float32, to be read from there.
    """
    own_costs = costs_of(form)
    size, own = sum(matrix.size for matrix in matrices), own_costs.own_bytes(matrices, platform.itemsize)
    of_base = sum(matrix.size for matrix in based)
    base, used = platform.itemsize * of_base, load.used_experts
    unpacked, written = Cost(0.0), 0
    if codes is not None:
        base, written = costs_of(codes).own_bytes(based, platform.itemsize), 4 * of_base
        unpacked = Cost(0.0, making=costs_of(codes).making(based, platform))
    # One kernel of a TPU brings every panel of the base once; elsewhere it is read for every expert.
    bases = 1.0 if platform.chip.platform == "tpu" else used
    made = platform.products(2 * load.rows * size)._replace(making=used * own_costs.making(matrices, platform))
    read = bases * base if codes is None else base + written + bases * written
    costs = {"synthesised": made + platform.reading(read + used * own) + unpacked}
    if form.adds_to_base:
        once = platform.products(2 * load.tokens * of_base)
        once += platform.reading(base + used * own) + unpacked
        ways = own_costs.delta_costs(matrices, load, platform)
        costs |= {f"factored-{way}": once + operations for way, operations in ways.items()}
    return costs


class Factored(abc.ABC):
    """Optional: the deltas alone are multiplied in ways of their own, those that `CostModel.delta_costs` names."""

    @abc.abstractmethod
    def grouped_delta(
        self,
        rows: Float[Array, "M i"],
        arrays: Arrays,
        group_sizes: Int[Array, " E"],
        matrix: Matrix,
        way: str,
        part: Part | None = None,
    ) -> Float[Array, "M o"]:
        """Like `KernelForm.grouped`, but with the deltas alone.

        Args:
          rows, arrays, group_sizes, matrix, part: see there; the base is not among the arrays.
          way: one of the keys of `delta_costs`, except `side-by-side`.
        """


class SideBySide(Factored):
    """Optional: deltas are products of two factors, so that those of all experts are one matrix."""

    @abc.abstractmethod
    def factors(self, arrays: Arrays) -> tuple[Float[Array, "E i r"], Float[Array, "E r o"]]:
        """The factors `a` and `b` of all deltas `a b`."""
