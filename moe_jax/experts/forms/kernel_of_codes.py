"""Kernels stored in codes: NF4 (see `functional.codes`), and those of a base in any codes (methods.md 4).

They stay codes in memory: a product makes tiles of the kernel, or where a base is part of every expert's kernel
(`experts.hidden_rows`) the part of it that a device needs, and forgets them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.core.draws import INIT_STD
from moe_jax.experts.devices import Platform, sharded_product
from moe_jax.experts.forms.coding import Coder, Encodable, EncodedKernel, Residual
from moe_jax.experts.forms.optional import CostModel, MadeInPallas, MadeInTriton, costs_of
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.forms.quantized import Quantized
from moe_jax.experts.shapes import Arrays, Matrix, Part, ShapesOnly, Split, Window, normal_kernel
from moe_jax.functional.codes import (
    BLOCK,
    LEVELS,
    SCALE_BLOCK,
    Leaves,
    block_scales,
    codes_shape,
    dequantize_nf4,
    nf4_matmul,
    nf4_tile,
    quantize_nf4,
)
from moe_jax.functional.synthesis import InTriton
from moe_jax.kernels.tpu.fused_tile import FusedTile
from moe_jax.kernels.tpu.tiles import NF4Tile, why_not_nf4

_FOLDER = "nf4/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NF4(Encodable, CostModel, MadeInPallas, MadeInTriton, KernelForm):
    """`nf4/codes`, `nf4/scale_codes`, `nf4/scales` and `nf4/offset`, in dtypes of their own."""

    over_base: ClassVar[bool] = False

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        kernel = normal_kernel(rngs, (*stack, *matrix.shape), dtype)
        return {_FOLDER + name: leaf for name, leaf in quantize_nf4(kernel).items()}

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        """Codes are sharded like the kernel; scales, a thirtieth of the bytes, are replicated."""
        codes = P("expert", "tensor", "fsdp") if split == "in" else P("expert", "fsdp", "tensor")
        return {_FOLDER + "codes": codes} | {_FOLDER + name: P() for name in ("scale_codes", "scales", "offset")}

    def is_trained(self, path: str, array: Array) -> bool:
        """Neither codes nor scales are."""
        return False

    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        leaves = nf4_leaves(arrays)
        if window.origin is not None:
            leaves["origin"] = window.origin
        return nf4_tile(leaves, window.shape[0], window.whole[1], window.start, window.width)

    def fused_tile(self, shape: tuple[int, int], whole: tuple[int, int]) -> FusedTile | str:
        reason = why_not_nf4(BLOCK, shape[0])
        levels = tuple(map(float, LEVELS))
        return NF4Tile(levels, BLOCK, SCALE_BLOCK, shape[0], whole[1], _FOLDER) if reason is None else reason

    def in_triton(self, arrays: Arrays, whole: tuple[int, int], origin: Int[Array, "2"]) -> InTriton:
        from moe_jax.kernels.gpu.triton_makers import CodesOfLevels

        leaves = nf4_leaves(arrays)
        width = leaves["codes"].shape[-1]
        scales = jax.vmap(lambda own: block_scales(own | {"origin": origin}, whole[1], 0, width))(leaves)
        own = leaves["codes"], scales, jnp.asarray(LEVELS), origin[:1]
        return InTriton(CodesOfLevels(BLOCK), own, is_cheap=False)

    def apply(self, x: Float[Array, "... i"], arrays: Arrays, matrix: Matrix, key: Array | None) -> Array:
        return nf4_linear(x, nf4_leaves(arrays), matrix.shape[0], matrix.split)

    def own_bytes(self, matrices: Sequence[Matrix], itemsize: int) -> float:
        """Codes, and a byte for the scale of a block."""
        return (1 / 2 + 1 / BLOCK) * sum(matrix.size for matrix in matrices)

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        return platform.unpack * sum(matrix.size for matrix in matrices)

    def encode(self, residual: Residual, matrix: Matrix, coder: Coder) -> EncodedKernel:
        """NF4 leaves a coder no choice."""
        leaves = quantize_nf4(jnp.asarray(residual.values))
        made = {_FOLDER + name: np.asarray(leaf) for name, leaf in leaves.items()}
        return made, np.asarray(dequantize_nf4(leaves, residual.values.shape[0], jnp.dtype(jnp.float32)))

    def specs(self, split: Split) -> dict[str, P]:
        specs = {"codes": P("expert", None, "tensor"), "scale_codes": P("expert", None, "tensor")}
        if split == "in":
            specs = {"codes": P("expert", "tensor", None), "scale_codes": P("expert", None, None)}
        specs |= {"scales": P("expert", None), "offset": P("expert")}
        return {_FOLDER + name: spec for name, spec in specs.items()}


def nf4_leaves(arrays: Arrays) -> dict[str, Array]:
    """The arrays by the names that `functional.codes` uses."""
    return {name.removeprefix(_FOLDER): array for name, array in arrays.items() if name.startswith(_FOLDER)}


def nf4_linear(x: Float[Array, "... i"], leaves: Leaves, rows: int, split: Split) -> Float[Array, "... o"]:
    """`x W` with W in NF4, in the dtype of `x`; `tensor` splits this axis of W. See `functional.codes.nf4_matmul`."""
    columns = leaves["codes"].shape[1]

    def multiply(x: Array, leaves: Leaves, part: Part | None) -> Array:
        if part is None:
            return nf4_matmul(x, leaves, rows)
        return nf4_matmul(x, leaves | {"origin": part.origin}, part.shape[0], columns)

    specs = {name.removeprefix(_FOLDER): P(*spec[1:]) for name, spec in NF4().specs(split).items()}
    return sharded_product(x, leaves, Matrix("", (rows, columns), split), specs, multiply, unit=2)


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


FOLDERS_OF_NF4 = tuple(folder.rstrip("/") for folder in (_FOLDER, CodedNF4.folder))
"""Between the paths of a map, or of a matrix, and the leaves of its kernel, if that is in NF4."""
