"""Quantised deltas: codes of a few bits, and a scale per group (methods.md 4)."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt8

from moe_jax.core.code_options import BITS, TABLE_BITS
from moe_jax.core.form_options import Design, QuantizedOptions
from moe_jax.experts.devices import Platform
from moe_jax.experts.forms.coding import Coder, Encodable, EncodedKernel, Layout, Residual, Wanted, WholeNumberCodes
from moe_jax.experts.forms.optional import CostModel, MadeInPallas, MadeInTriton, MultipliesRows
from moe_jax.experts.forms.protocol import KernelForm, register
from moe_jax.experts.shapes import Arrays, FFNConfig, Matrix, Rows, Split, Window
from moe_jax.functional.codes import (
    SCALE_DTYPE,
    Grid,
    codes_shape,
    pack,
    repeat_over_rows,
    scale_dtype,
    scales_of,
    scales_shape,
    unpack,
    zeros_of,
)
from moe_jax.functional.few_rows.packed_codes import product_with_codes, rows_of_block
from moe_jax.functional.synthesis import InTriton
from moe_jax.kernels.tpu.fused_tile import FusedTile
from moe_jax.kernels.tpu.tiles import PackedTile, why_not_packed

_OWN_BITS = ("gate_bits", "up_bits", "down_bits")


@register("quantized")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized(QuantizedOptions, Encodable, CostModel, MadeInPallas, MadeInTriton, MultipliesRows, KernelForm):
    """`W` plus packed `codes` [E, bytes, out] times `scales` [E, groups, out] (or [E, 1, 1]), which are zero at first.

    Kernels in Pallas, for TPUs and GPUs, know the codes of the plain format only (`is_plain`); others are made by plain
    XLA, a tile at a time. Its options are those of `ExpertCodesOptions`.
    """

    def of_matrix(self, matrix: Matrix) -> "Quantized":
        own = self.own_bits
        bits = own.get(matrix.name, self.bits)
        given = dict.fromkeys(_OWN_BITS) | {"bits": bits, "table": self.table and bits in TABLE_BITS}
        return dataclasses.replace(self, **given) if own else self

    @property
    def is_plain(self) -> bool:
        """Whether a code and its scale alone say what a code stands for."""
        return not self.table and not self.zero_points and not self.row_scales and self.scale_bits == 16

    @property
    def has_codes(self) -> bool:
        return True

    @property
    def bits_of_codes(self) -> int | None:
        return self.bits

    @property
    def whole_numbers(self) -> WholeNumberCodes | None:
        others = self.table or self.row_scales or self.own_bits or self.scale_bits == 8
        if others or self.group_size is None:
            return None
        return WholeNumberCodes(self.bits, self.group_size, self.zero_points, self.scale_bits)

    def describe(self) -> str:
        more = (", zero points" if self.zero_points else "") + (", row scales" if self.row_scales else "")
        return f"quantized, {self.bits} bits{self.own_bits_in_words()}{self.more_in_words()}{more}"

    # ---- what is stored ---------------------------------------------------------------------------------------------

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        if self.own_bits:
            return self.of_matrix(matrix).fresh(rngs, matrix, stack, dtype)
        # No code stands for zero; the scales are zero.
        codes = pack(jnp.full(matrix.shape, 2 ** (self.bits - 1), jnp.int32), self.bits)
        return self.uniform(jnp.broadcast_to(codes, (*stack, *codes_shape(matrix.shape, self.bits))), matrix, 0)

    def uniform(self, codes: UInt8[Array, "*stack b o"], matrix: Matrix, scale: float) -> dict[str, Array]:
        """Leaves of packed codes, whose levels are the odd numbers, with one scale: half the step between levels."""
        stack = codes.shape[:-2]
        shape = (*stack, *scales_shape(matrix.shape, self.group_size))
        leaves = {"codes": codes, "scales": jnp.full(shape, scale, scale_dtype(self.scale_bits))}
        if self.scale_bits == 8:
            # Of scales of zero, too, so that a step has a gradient.
            leaves = {"codes": codes, "scale_codes": jnp.full(shape, 127, jnp.int8)}
            leaves["scale_steps"] = jnp.full((*shape[:-1], 1), scale, SCALE_DTYPE)
        if self.zero_points:
            # Of the odd numbers; of eight bits, of the even ones.
            leaves["zeros"] = jnp.full(shape, 128 - 2 ** (7 - self.bits) if self.bits < 8 else 128, jnp.uint8)
        if self.row_scales:
            leaves["row_scales"] = jnp.ones((*stack, matrix.shape[0], 1), SCALE_DTYPE)
        if self.table:
            odd = jnp.arange(1 - 2**self.bits, 2**self.bits, 2, dtype=jnp.int32).astype(SCALE_DTYPE)
            leaves["table"] = jnp.broadcast_to(odd, (*stack, 2**self.bits))
        return leaves

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        codes = P("expert", "tensor", "fsdp") if split == "in" else P("expert", "fsdp", "tensor")
        scales = ("scales", "scale_codes", "scale_steps", "zeros", "row_scales")
        return {"codes": codes, **dict.fromkeys(scales, P("expert", None, None)), "table": P("expert", None)}

    # ---- what it means, and how it is applied -----------------------------------------------------------------------

    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        delta = self._delta(arrays, window)
        return delta if base is None else base + delta

    def _delta(self, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        assert not self.own_bits, "tiles are made by the form of their matrix"
        rows, first = window.shape[0], None if window.origin is None else window.origin[0]
        by_column = ("scales", "scale_codes", "zeros") if self.group_size is not None else ()
        own = {name: window.columns(array) if name in by_column else array for name, array in arrays.items()}
        # A shard may begin inside a group, and holds the scales of all groups.
        scales, zeros = repeat_over_rows(scales_of(own), rows, self.group_size, first), None
        if self.zero_points:
            zeros = repeat_over_rows(zeros_of(own["zeros"], self.bits), rows, self.group_size, first)
        grid = Grid(scales, arrays.get("table"), zeros)
        codes = unpack(window.columns(arrays["codes"]), rows, self.bits, jnp.uint8 if self.table else jnp.float32)
        numbers = grid.numbers(codes, self.bits)
        if not self.row_scales:
            return numbers
        return numbers * repeat_over_rows(arrays["row_scales"].astype(numbers.dtype), rows, 1, first)

    def product_of_rows(self, rows: Rows, arrays: Arrays, expert: Int[Array, ""]) -> Rows | None:
        if self.own_bits or rows_of_block(rows.shape[1], self.group_size) is None:
            return None
        wide = rows.astype(jnp.float32)
        by_expert = ((name, array) for name, array in arrays.items() if name != "codes")
        own = {name: lax.dynamic_index_in_dim(array, expert, keepdims=False) for name, array in by_expert}
        if self.row_scales:
            wide = wide * own["row_scales"].astype(jnp.float32).T
        zeros = zeros_of(own["zeros"], self.bits) if self.zero_points else None
        grid = Grid(scales_of(own), own.get("table"), zeros)
        return product_with_codes(wide, arrays["codes"], expert, grid, self.bits, self.group_size)

    def fused_tile(self, shape: tuple[int, int], whole: tuple[int, int]) -> FusedTile | str:
        if not self.is_plain:
            return f"{self.describe()}: kernels know no codes but those of a grid with one scale per group"
        reason = why_not_packed(self.bits, self.group_size, shape[0])
        return PackedTile(self.bits, self.group_size, shape[0]) if reason is None else reason

    def in_triton(self, arrays: Arrays, whole: tuple[int, int], origin: Int[Array, "2"]) -> InTriton | None:
        if not self.is_plain:
            return None
        from moe_jax.kernels.gpu.triton_makers import ScaledCodes

        own = arrays["codes"], arrays["scales"], origin[:1]
        return InTriton(ScaledCodes(self.bits, self.group_size), own, is_cheap=False)

    def specs(self, split: Split) -> dict[str, P]:
        per_column = None if self.group_size is None or split == "in" else "tensor"
        codes = P("expert", "tensor", None) if split == "in" else P("expert", None, "tensor")
        specs = {"codes": codes, "scales": P("expert", None, per_column)}
        if self.zero_points:
            specs["zeros"] = specs["scales"]
        if self.row_scales:
            specs["row_scales"] = P("expert", None, None)
        if self.scale_bits == 8:
            specs |= {"scale_codes": specs.pop("scales"), "scale_steps": P("expert", None, None)}
        return specs | ({"table": P("expert", None)} if self.table else {})

    # ---- what it costs ----------------------------------------------------------------------------------------------

    def own_bytes(self, matrices: Sequence[Matrix], itemsize: int) -> float:
        return sum(self.of_matrix(matrix).bits / 8 * matrix.size for matrix in matrices)

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        return platform.unpack * sum(matrix.size for matrix in matrices)

    # ---- how it is encoded ------------------------------------------------------------------------------------------

    @classmethod
    def _layouts(cls) -> tuple[Layout, ...]:
        no_table = {"table": False}
        options = {bits: {"bits": bits} if bits in TABLE_BITS else {"bits": bits} | no_table for bits in BITS}
        return tuple(Layout(f"quantized:{bits}", cls, own) for bits, own in options.items())

    @classmethod
    def sizes_to_try(cls, design: Design) -> tuple[Wanted, ...]:
        return tuple(Wanted(form=cls, bits=bits) for bits in BITS)

    @classmethod
    def for_share(
        cls, wanted: Wanted, expert: FFNConfig, d_model: int, num_experts: int, shares: Sequence[float] | None = None
    ) -> "Quantized":
        return cls._of(wanted)

    @classmethod
    def _of(cls, wanted: Wanted) -> "Quantized":
        names = (field.name for field in dataclasses.fields(cls) if field.name not in _OWN_BITS)
        return cls(**{name: getattr(wanted, name) for name in names})

    def encode(self, residual: Residual, matrix: Matrix, coder: Coder) -> EncodedKernel:
        options = dataclasses.asdict(self.of_matrix(matrix))
        made = coder.quantize(residual.values, **{name: options[name] for name in options if name not in _OWN_BITS})
        return dict(made.leaves), made.approximation
