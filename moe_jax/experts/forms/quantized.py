"""Quantised deltas: codes of a few bits, and a scale per group (methods.md 4)."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from moe_jax.errors import MAX_SIZE, InputError
from moe_jax.experts.forms.by_name import register
from moe_jax.experts.forms.matrix import Arrays, Matrix, Split, Window
from moe_jax.experts.forms.protocol import Coder, KernelForm
from moe_jax.experts.platforms import Platform
from moe_jax.functional.block_synthesis import InTriton
from moe_jax.functional.packing import SCALE_DTYPE, codes_shape, dequantize, pack, scaled_levels, scales_shape, unpack
from moe_jax.kernels.tpu.fused_tile import FusedTile
from moe_jax.kernels.tpu.packed_tile import PackedTile, why_not_packed

BITS = (8, 4, 3, 2, 1)


@register("quantized")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized(KernelForm):
    """`W` plus packed `codes` [E, bytes, out] times `scales` [E, groups, out] (or [E, 1, 1]), which are zero at first.

    Attributes:
      bits: per code: 8, 4, 3, 2 or 1.
      group_size: the number of entries along the input axis that share a scale; None: one scale for the whole kernel.
    """

    bits: int
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise InputError(f"bits={self.bits} must be one of {', '.join(map(str, BITS))}")
        check_group_size(self.group_size)

    @property
    def has_codes(self) -> bool:
        """See `ExpertForm`."""
        return True

    @property
    def codes_in_groups(self) -> tuple[int, int] | None:
        """See `ExpertForm`."""
        return None if self.group_size is None else (self.bits, self.group_size)

    def describe(self) -> str:
        """See `ExpertForm`."""
        return f"quantized, {self.bits} bits"

    # ---- what is stored ---------------------------------------------------------------------------------------------

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        """See `KernelForm`."""
        # No code stands for zero; the scales are zero.
        codes = pack(jnp.full(matrix.shape, 2 ** (self.bits - 1), jnp.int32), self.bits)
        return {
            "codes": jnp.broadcast_to(codes, (*stack, *codes_shape(matrix.shape, self.bits))),
            "scales": jnp.zeros((*stack, *scales_shape(matrix.shape, self.group_size)), SCALE_DTYPE),
        }

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        """See `KernelForm`."""
        codes = P("expert", "tensor", "fsdp") if split == "in" else P("expert", "fsdp", "tensor")
        return {"codes": codes, "scales": P("expert", None, None)}

    # ---- what it means, and how it is applied -----------------------------------------------------------------------

    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        """See `KernelForm`."""
        delta = self._delta(arrays, window)
        return delta if base is None else base + delta

    def _delta(self, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        codes, scales, rows = window.columns(arrays["codes"]), arrays["scales"], window.shape[0]
        if self.group_size is None:
            return dequantize(codes, scales, rows, self.bits, None, jnp.float32)
        scales = window.columns(scales)
        if window.origin is None:
            return dequantize(codes, scales, rows, self.bits, self.group_size, jnp.float32)
        # A shard may begin inside a group, and holds the scales of all groups.
        group = (window.origin[0] + jnp.arange(rows, dtype=jnp.int32)) // self.group_size
        scales = jnp.take(scales.astype(jnp.float32), group, axis=0)
        return scaled_levels(unpack(codes, rows, self.bits, jnp.float32), scales, self.bits)

    def fused_tile(self, shape: tuple[int, int], whole: tuple[int, int]) -> FusedTile | str:
        """See `KernelForm`."""
        reason = why_not_packed(self.bits, self.group_size, shape[0])
        return PackedTile(self.bits, self.group_size, shape[0]) if reason is None else reason

    def in_triton(self, arrays: Arrays, whole: tuple[int, int], origin: Int[Array, "2"]) -> InTriton:
        """See `KernelForm`."""
        from moe_jax.kernels.gpu.triton_makers import ScaledCodes

        own = arrays["codes"], arrays["scales"], origin[:1]
        return InTriton(ScaledCodes(self.bits, self.group_size), own, is_cheap=False)

    def specs(self, split: Split) -> dict[str, P]:
        """See `KernelForm`."""
        if split == "in":
            return {"codes": P("expert", "tensor", None), "scales": P("expert", None, None)}
        per_column = None if self.group_size is None else "tensor"
        return {"codes": P("expert", None, "tensor"), "scales": P("expert", None, per_column)}

    # ---- what it costs ----------------------------------------------------------------------------------------------

    def own_bytes(self, matrices: Sequence[Matrix], itemsize: int) -> float:
        """See `KernelForm`."""
        return self.bits / 8 * sum(matrix.size for matrix in matrices)

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        """See `KernelForm`."""
        return platform.unpack * sum(matrix.size for matrix in matrices)

    # ---- how it is encoded ------------------------------------------------------------------------------------------

    def encode(
        self,
        residual: Float[np.ndarray, "i o"],
        matrix: Matrix,
        dtype: np.dtype,
        coder: Coder,
        kept: Bool[np.ndarray, "i o"] | None = None,
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """See `KernelForm`."""
        made = coder.quantize(residual, bits=self.bits, group_size=self.group_size)
        return {"codes": made.codes, "scales": made.scales}, made.approximation


def check_group_size(group_size: int | None) -> None:
    """Raises `InputError` unless the group size is a multiple of 8, so that groups begin at whole bytes."""
    if group_size is not None and (not 8 <= group_size <= MAX_SIZE or group_size % 8):
        raise InputError(f"group_size={group_size} must be a multiple of 8, or null for one per kernel")
