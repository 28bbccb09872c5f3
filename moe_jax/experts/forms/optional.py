"""Optional abilities of a form: tiles in the kernels of an accelerator, costs of its own, cheaper exact products."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.experts.devices import Cost, Platform
from moe_jax.experts.shapes import ORIGIN, Arrays, FFNConfig, GroupSizes, Load, Matrix, Part, Rows, Window
from moe_jax.functional.synthesis import InTriton, Tiles
from moe_jax.kernels.tpu.fused_tile import FusedTile

if TYPE_CHECKING:
    from moe_jax.experts.forms.protocol import KernelForm


class MadeInPallas(abc.ABC):
    """Optional: tiles are made in the fast memory of a TPU."""

    @abc.abstractmethod
    def fused_tile(self, shape: tuple[int, int], whole: tuple[int, int]) -> FusedTile | str:
        """How tiles are made inside a Pallas kernel, which adds them to the base; or in words, why they are not.

        Args:
          shape: [in, out] of the part of the kernels that this device has.
          whole: [in, out] of the kernels.
        """


class MadeInTriton(abc.ABC):
    """Optional: tiles are made in the kernels of an NVIDIA GPU."""

    @abc.abstractmethod
    def in_triton(self, arrays: Arrays, whole: tuple[int, int], origin: Int[Array, "2"]) -> InTriton | None:
        """How what is added to the base, or else the kernel, is made in a Triton kernel; None: it cannot be.

        Args:
          arrays: stacked over the experts. Over a mesh, the part of them that this device holds.
          whole: [in, out] of a kernel.
          origin: row and column of the kernel where the part begins.
        """

    def thin_gradients(
        self, lhs: Array, dout: Array, arrays: Arrays, group_sizes: Array, products: Any
    ) -> dict[str, Array] | None:
        """The gradients of the trained arrays without those of whole kernels, float32; None: there is no such way.

        Arguments as of `functional.synthesis.Tiles.thin_gradients`.
        """
        return None


class MultipliesRows(abc.ABC):
    """Optional: rows are multiplied with what is stored, and no kernel is made; of few rows on a CPU."""

    @abc.abstractmethod
    def product_of_rows(self, rows: Rows, arrays: Arrays, expert: Int[Array, ""]) -> Rows | None:
        """The product with what is added to the base, or else with the kernel, float32; None: not with these options.

        Args:
          rows: few, of one expert [M, in].
          arrays: of whole kernels, stacked over the experts.
          expert: which it is.
        """


@dataclasses.dataclass(frozen=True)
class FormTiles(Tiles):
    """A form together with the shapes of a matrix.

    Attributes:
      form: makes the tiles. An array `origin` [2] among the arrays says where a part begins.
      shape: [in, out] of the part of the kernel, or of the kernel.
      whole: [in, out] of the kernel.
    """

    form: "KernelForm"
    shape: tuple[int, int]
    whole: tuple[int, int]

    @property
    def adds_to_base(self) -> bool:
        return self.form.adds_to_base

    def tile(
        self, base: Float[Array, "i w"] | None, arrays: Arrays, start: Int[Array, ""] | int, width: int
    ) -> Float[Array, "i w"]:
        window = Window(self.shape, self.whole, arrays.get(ORIGIN), start, width)
        return self.form.tile(base, _own(arrays), window)

    def product_of_rows(self, rows: Rows, arrays: Arrays, expert: Int[Array, ""]) -> Rows | None:
        if ORIGIN in arrays or not isinstance(self.form, MultipliesRows):
            return None
        return self.form.product_of_rows(rows, arrays, expert)

    def fused(self) -> FusedTile | str:
        if isinstance(self.form, MadeInPallas):
            return self.form.fused_tile(self.shape, self.whole)
        kind = self.form.kind or type(self.form).__name__
        return f"nothing says how {kind} kernels are made inside a Pallas kernel"

    def in_triton(self, arrays: Arrays) -> InTriton | None:
        if not isinstance(self.form, MadeInTriton):
            return None
        # It is the same for all experts.
        origin = arrays[ORIGIN][0] if ORIGIN in arrays else jnp.zeros(2, jnp.int32)
        return self.form.in_triton(_own(arrays), self.whole, origin)

    def thin_gradients(
        self, lhs: Array, dout: Array, arrays: Arrays, group_sizes: Array, products: Any
    ) -> dict[str, Array] | None:
        if not isinstance(self.form, MadeInTriton):
            return None
        return self.form.thin_gradients(lhs, dout, _own(arrays), group_sizes, products)


def _own(arrays: Arrays) -> dict[str, Array]:
    return {name: array for name, array in arrays.items() if name != ORIGIN}


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
        self, rows: Rows, arrays: Arrays, group_sizes: GroupSizes, matrix: Matrix, way: str, part: Part | None = None
    ) -> Rows:
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
