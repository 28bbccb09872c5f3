"""Kernels that are stored whole: plain, of a linear map or of experts without a base, and with LoRA beside them."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.core.form_options import FullOptions
from moe_jax.experts.devices import Platform
from moe_jax.experts.forms.coding import Storable
from moe_jax.experts.forms.kernel_of_codes import NF4, CodedLevels, CodedNF4
from moe_jax.experts.forms.low_rank import LowRank, low_rank_specs
from moe_jax.experts.forms.optional import CostModel, MadeInPallas
from moe_jax.experts.forms.protocol import KernelForm, Streams, register
from moe_jax.experts.shapes import (
    Arrays,
    GroupSizes,
    LoRAConfig,
    Matrix,
    Part,
    Rows,
    Split,
    Window,
    normal_kernel,
    uniform_factor,
)
from moe_jax.functional.adapters import adapter
from moe_jax.functional.dense import linear
from moe_jax.functional.grouped import grouped_matmul
from moe_jax.functional.keys import dropout
from moe_jax.kernels.tpu.fused_tile import FusedTile
from moe_jax.kernels.tpu.tiles import StoredTile


@register("full")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(FullOptions, Storable, CostModel, MadeInPallas, KernelForm):
    """`kernel` [..., in, out], normal with standard deviation 0.02 at first."""

    rounded_leaves: ClassVar[tuple[str, ...]] = ("kernel",)

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        return {"kernel": normal_kernel(rngs, (*stack, *matrix.shape), dtype)}

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        return {"kernel": P("expert", "tensor", "fsdp") if split == "in" else P("expert", "fsdp", "tensor")}

    def from_dense(
        self, kernel: Float[np.ndarray, "i o"], matrix: Matrix, num_experts: int, streams: Streams
    ) -> dict[str, np.ndarray]:
        """The kernel is a view with stride 0 along the experts, and not copied."""
        return {"kernel": np.broadcast_to(kernel, (num_experts, *kernel.shape))}

    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        return window.columns(arrays["kernel"]).astype(jnp.float32)

    def materialise(self, base: Float[Array, "i o"] | None, arrays: Arrays, matrix: Matrix) -> Float[Array, "i o"]:
        """The kernel as it is stored, in its own dtype."""
        return arrays["kernel"]

    def apply(self, x: Float[Array, "... i"], arrays: Arrays, matrix: Matrix, key: Array | None) -> Array:
        return linear(x, arrays["kernel"])

    def fused_tile(self, shape: tuple[int, int], whole: tuple[int, int]) -> FusedTile:
        return StoredTile()

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        """They are multiplied as they are stored."""
        return 0.0

    def specs(self, split: Split) -> dict[str, P]:
        return {"kernel": P("expert", "tensor", None) if split == "in" else P("expert", None, "tensor")}

    def grouped(
        self, rows: Rows, arrays: Arrays, group_sizes: GroupSizes, matrix: Matrix, part: Part | None = None
    ) -> Rows:
        kernel = arrays["kernel"]
        # A narrower kernel is cast where it is multiplied: on a CPU a tile at a time, and only those of experts that
        # have rows.
        is_narrower = kernel.dtype.itemsize < rows.dtype.itemsize
        return grouped_matmul(rows, kernel if is_narrower else kernel.astype(rows.dtype), group_sizes)


_FOLDER = "lora/"


@dataclasses.dataclass(frozen=True)
class WithLoRA(KernelForm):
    """A kernel of another form, `lora/a` [..., in, r], uniform as in LoRA, and `lora/b` [..., r, out], zero at first.

    Attributes:
      kernel: the form of the kernel.
      lora: options of the products beside it. Only linear maps have dropout; experts, which take sorted rows, do not.
    """

    over_base: ClassVar[bool] = False

    kernel: KernelForm
    lora: LoRAConfig

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        inner, (fan_in, fan_out) = self.kernel.fresh(rngs, matrix, stack, dtype), matrix.shape
        a = uniform_factor(rngs, stack, fan_in, self.lora.rank, dtype)
        return inner | {"lora/a": a, "lora/b": jnp.zeros((*stack, self.lora.rank, fan_out), dtype)}

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        """Only the specs of the two factors; the other leaves belong to the form of the kernel."""
        if split == "in":
            return {"lora/a": P("expert", "tensor", None), "lora/b": P("expert", None, "fsdp")}
        return {"lora/a": P("expert", "fsdp", None), "lora/b": P("expert", None, "tensor")}

    def is_trained(self, path: str, array: Array) -> bool:
        return path.startswith(_FOLDER) or self.kernel.is_trained(path, array)

    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        inner, factors = split_lora(arrays)
        product = LowRank(rank=self.lora.rank).tile(None, factors, window)
        return self.kernel.tile(base, inner, window) + self.lora.scale * product

    def apply(self, x: Float[Array, "... i"], arrays: Arrays, matrix: Matrix, key: Array | None) -> Array:
        """Dropout acts on the input of the LoRA product alone."""
        inner, factors = split_lora(arrays)
        y = self.kernel.apply(x, inner, matrix, key)
        return y + adapter(dropout(x, self.lora.dropout, key), factors["a"], factors["b"], "none", self.lora.scale)

    def specs(self, split: Split) -> dict[str, P]:
        return self.kernel.specs(split) | {_FOLDER + name: spec for name, spec in low_rank_specs(split).items()}

    def grouped(
        self, rows: Rows, arrays: Arrays, group_sizes: GroupSizes, matrix: Matrix, part: Part | None = None
    ) -> Rows:
        """LoRA takes two more grouped products, which are thin."""
        inner, factors = split_lora(arrays)
        thin = LowRank(rank=self.lora.rank).grouped_delta(rows, factors, group_sizes, matrix, "grouped")
        y = self.kernel.grouped(rows, inner, group_sizes, matrix, part)
        return y + thin * jnp.asarray(self.lora.scale, rows.dtype)


def whole_form(nf4: bool, lora: LoRAConfig | None, kernel: KernelForm | None = None) -> KernelForm:
    """The form of a whole kernel: plain, as NF4 codes or in another form that is given, with or without LoRA."""
    kernel = kernel or (NF4() if nf4 else Full())
    return kernel if lora is None else WithLoRA(kernel, lora)


WHOLE = (Full, NF4, CodedLevels, CodedNF4, WithLoRA)
"""The forms of kernels that are stored whole."""


def whole_kernel_specs(split: Split) -> dict[str, P]:
    """How all leaves of such kernels, stacked over the experts, are sharded; see `KernelForm.stored_specs`."""
    return {name: spec for form in WHOLE for name, spec in form.stored_specs(split).items()}


def split_lora(arrays: Arrays) -> tuple[dict[str, Array], dict[str, Array]]:
    """Separates the arrays of the kernel from `a` and `b`."""
    inner = {name: array for name, array in arrays.items() if not name.startswith(_FOLDER)}
    return inner, {name.removeprefix(_FOLDER): arrays[name] for name in arrays if name not in inner}
