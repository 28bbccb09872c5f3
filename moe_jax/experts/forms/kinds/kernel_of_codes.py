"""The kernel of a base that is stored in codes: of a few bits with a scale per group, or NF4 (methods.md 4).

The codes are those of another form, whose leaves lie in a folder of their own. They stay codes in memory: a product
makes tiles of the kernel, or where a base is part of every expert's kernel (`experts.hidden_rows`) the part of it that
a device needs, and forgets them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.core.draws import INIT_STD
from moe_jax.experts.forms.kinds.nf4 import NF4
from moe_jax.experts.forms.kinds.quantized import Quantized
from moe_jax.experts.forms.matrix import Arrays, Matrix, Part, ShapesOnly, Split, Window
from moe_jax.experts.forms.optional.coding import Coder, Encodable, EncodedKernel, Residual
from moe_jax.experts.forms.optional.costs import CostModel, costs_of
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.forms.sharded_linear import sharded_product
from moe_jax.experts.layout.platforms import Platform
from moe_jax.functional.codes import codes_shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coded(CostModel, KernelForm):
    """A whole kernel in the codes of another form, float32 where it is made. Its arrays have the paths of its leaves.

    Attributes:
      codes: that form.
      made_of: its class.
      folder: of the leaves.
      inner_folder: that in which the form itself has them.
    """

    over_base: ClassVar[bool] = False
    made_of: ClassVar[type[KernelForm]]
    folder: ClassVar[str]
    inner_folder: ClassVar[str] = ""

    codes: KernelForm

    @classmethod
    def _outer(cls, leaves: Mapping) -> dict:
        return {cls.folder + name.removeprefix(cls.inner_folder): leaf for name, leaf in leaves.items()}

    @classmethod
    def _inner(cls, leaves: Mapping) -> dict:
        return {
            cls.inner_folder + name.removeprefix(cls.folder): leaf
            for name, leaf in leaves.items()
            if name.startswith(cls.folder)
        }

    @property
    def has_codes(self) -> bool:
        return True

    def of_matrix(self, matrix: Matrix) -> "Coded":
        return dataclasses.replace(self, codes=self.codes.of_matrix(matrix))

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        return cls._outer(cls.made_of.stored_specs(split))

    def is_trained(self, path: str, array: Array) -> bool:
        return all(self.codes.is_trained(name, leaf) for name, leaf in self._inner({path: array}).items())

    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        return self.codes.tile(None, self._inner(arrays), window)

    def specs(self, split: Split) -> dict[str, P]:
        return self._outer(self.codes.specs(split))

    def specs_of_one(self, split: Split) -> dict[str, P]:
        """Returns the specs of the arrays of one kernel, which lack the axis of experts."""
        return {name: P(*spec[1:]) for name, spec in self.specs(split).items()}

    def own_bytes(self, matrices: Sequence[Matrix], itemsize: int) -> float:
        return costs_of(self.codes).own_bytes(matrices, itemsize)

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        return costs_of(self.codes).making(matrices, platform)

    def encode(self, residual: Residual, matrix: Matrix, coder: Coder) -> EncodedKernel:
        """The leaves of a kernel, and the float32 numbers that they stand for."""
        assert isinstance(self.codes, Encodable)
        leaves, approximation = self.codes.encode(residual, matrix, coder)
        return self._outer(leaves), approximation

    def stored(self, kernel: Float[np.ndarray, "i o"], matrix: Matrix, coder: Coder) -> EncodedKernel:
        """Encodes a whole kernel of any floating-point dtype, as `encode` does it for a residual."""
        wide = Residual(np.asarray(kernel, np.float32), np.dtype(np.float32))
        return self.of_matrix(matrix).encode(wide, matrix, coder)


class CodedLevels(Coded):
    """`coded/codes`, `coded/scales` and so on, as `Quantized` has them. All but the codes are trained."""

    made_of: ClassVar[type[KernelForm]] = Quantized
    folder: ClassVar[str] = "coded/"

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        """All codes alike often, so that the standard deviation is that of other kernels."""
        assert isinstance(self.codes, Quantized)
        bits = self.codes.bits
        shape = (*stack, *codes_shape(matrix.shape, bits))
        if isinstance(rngs, ShapesOnly):
            codes = jnp.zeros(shape, jnp.uint8)
        else:
            codes = jax.random.bits(rngs.params(), shape, jnp.uint8)
        # The mean square of the odd numbers up to 2^b - 1 is (4^b - 1) / 3.
        scale = INIT_STD * (3 / (4**bits - 1)) ** 0.5
        return self._outer(self.codes.uniform(codes, matrix, scale))

    def apply(self, x: Float[Array, "... i"], arrays: Arrays, matrix: Matrix, key: Array | None) -> Array:
        """The product with the only expert of a bank that has no base."""
        form = self.codes

        def multiply(x: Array, arrays: dict[str, Array], part: Part | None) -> Array:
            rows = x.reshape(-1, x.shape[-1])
            stacked = {name: array[None] for name, array in arrays.items()}
            sizes = jnp.full((1,), rows.shape[0], jnp.int32)
            y = form.grouped(rows, stacked, sizes, matrix, part)
            return y.reshape(*x.shape[:-1], y.shape[-1])

        specs = self._inner(self.specs_of_one(matrix.split))
        # Eight codes fill whole bytes, whatever their bits.
        return sharded_product(x, self._inner(arrays), matrix, specs, multiply, unit=8)


class CodedNF4(Coded):
    """`coded_nf4/codes` and so on, as `NF4` has them. Nothing of it is trained."""

    made_of: ClassVar[type[KernelForm]] = NF4
    # Not that of NF4 kernels: those are what a tuned model makes of the kernels of its base (`model_io.tuned_base`).
    folder: ClassVar[str] = "coded_nf4/"
    inner_folder: ClassVar[str] = "nf4/"

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        return self._outer(self.codes.fresh(rngs, matrix, stack, dtype))

    def apply(self, x: Float[Array, "... i"], arrays: Arrays, matrix: Matrix, key: Array | None) -> Array:
        return self.codes.apply(x, self._inner(arrays), matrix, key)
