"""Optional: tiles of kernels made inside the kernels of an accelerator, and a form as those kernels take it."""

import abc
import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.experts.forms.matrix import ORIGIN, Arrays, Window
from moe_jax.functional.synthesis import InTriton
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
        self,
        lhs: Float[Array, "M i"],
        dout: Float[Array, "M o"],
        arrays: Arrays,
        group_sizes: Int[Array, " E"],
        products: Any,
    ) -> dict[str, Array] | None:
        """The gradients of the trained arrays without those of whole kernels, float32; None: there is no such way.

        Args:
          lhs: rows sorted by expert.
          dout: gradient of the product of the rows with their experts' kernels.
          arrays: stacked over the experts.
          group_sizes: number of rows of every expert.
          products: the grouped products of the platform; see `kernels.gpu.grouped.TritonProducts`.
        """
        return None


@dataclasses.dataclass(frozen=True)
class FormTiles:
    """A form together with the shapes of a matrix: the `Tiles` that `functional.synthesis` takes.

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
        """Whether a kernel is the base plus something that does not depend on it."""
        return self.form.adds_to_base

    def tile(
        self, base: Float[Array, "i w"] | None, arrays: Arrays, start: Int[Array, ""] | int, width: int
    ) -> Float[Array, "i w"]:
        """Makes columns of one expert's kernel, float32."""
        window = Window(self.shape, self.whole, arrays.get(ORIGIN), start, width)
        return self.form.tile(base, _own(arrays), window)

    def fused(self) -> FusedTile | str:
        """Returns how tiles are made inside a TPU kernel; or in words, why they are not."""
        if isinstance(self.form, MadeInPallas):
            return self.form.fused_tile(self.shape, self.whole)
        kind = self.form.kind or type(self.form).__name__
        return f"nothing says how {kind} kernels are made inside a Pallas kernel"

    def in_triton(self, arrays: Arrays) -> InTriton | None:
        """Returns how kernels are made inside a Triton kernel; None: they are not."""
        if not isinstance(self.form, MadeInTriton):
            return None
        # It is the same for all experts.
        origin = arrays[ORIGIN][0] if ORIGIN in arrays else jnp.zeros(2, jnp.int32)
        return self.form.in_triton(_own(arrays), self.whole, origin)

    def thin_gradients(
        self, lhs: Array, dout: Array, arrays: Arrays, group_sizes: Array, products: Any
    ) -> dict[str, Array] | None:
        """Returns the gradients of the trained arrays without those of whole kernels; None: there is no such way."""
        if not isinstance(self.form, MadeInTriton):
            return None
        return self.form.thin_gradients(lhs, dout, _own(arrays), group_sizes, products)


def _own(arrays: Arrays) -> dict[str, Array]:
    return {name: array for name, array in arrays.items() if name != ORIGIN}
