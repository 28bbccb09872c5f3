"""Frozen kernels in NF4 (see `functional.codes`): of a linear map, of a shared base, or of full experts."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.experts.forms.matrix import Arrays, Matrix, Part, Split, Window, normal_kernel
from moe_jax.experts.forms.optional.backends import MadeInPallas, MadeInTriton
from moe_jax.experts.forms.optional.coding import Coder, Encodable, EncodedKernel, Residual
from moe_jax.experts.forms.optional.costs import CostModel
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.forms.sharded_linear import sharded_product
from moe_jax.experts.layout.platforms import Platform
from moe_jax.functional.codes import (
    BLOCK,
    LEVELS,
    SCALE_BLOCK,
    Leaves,
    block_scales,
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
    """`x W` with W in NF4, in the dtype of `x`; see `functional.codes.nf4_matmul`.

    Args:
      x: activations [B, ..., i].
      leaves: of one kernel, as `quantize_nf4` gives them.
      rows: i.
      split: the axis of the kernel that `tensor` splits.
    """
    columns = leaves["codes"].shape[1]

    def multiply(x: Array, leaves: Leaves, part: Part | None) -> Array:
        if part is None:
            return nf4_matmul(x, leaves, rows)
        return nf4_matmul(x, leaves | {"origin": part.origin}, part.shape[0], columns)

    specs = {name.removeprefix(_FOLDER): P(*spec[1:]) for name, spec in NF4().specs(split).items()}
    return sharded_product(x, leaves, Matrix("", (rows, columns), split), specs, multiply, unit=2)
