"""Sparse deltas (DeRS-SM, DARE, ResMoE's pruned residuals; methods.md 2.3, 4, 5)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.core.draws import POSITIONS, draw_positions
from moe_jax.core.errors import InputError, check_member, shown
from moe_jax.core.finite import cast
from moe_jax.experts.forms.by_name import register
from moe_jax.experts.forms.kinds.positions import (
    ENCODINGS,
    POSITION_LEAVES,
    Encoding,
    columns_dtype,
    common_counts,
    encode_positions,
    kept_entries,
    random_positions,
    smallest_encoding,
    to_csr,
)
from moe_jax.experts.forms.kinds.quantized import check_group_size
from moe_jax.experts.forms.matrix import Arrays, Load, Matrix, Part, Split, Window, ffn_matrices
from moe_jax.experts.forms.optional.backends import MadeInPallas
from moe_jax.experts.forms.optional.coding import (
    Coder,
    Design,
    Encodable,
    EncodedKernel,
    Layout,
    Residual,
    Wanted,
    check_keep,
)
from moe_jax.experts.forms.optional.costs import CostModel, Factored
from moe_jax.experts.forms.protocol import KernelForm, Streams
from moe_jax.experts.layout.config import FFNConfig
from moe_jax.experts.layout.platforms import Cost, Platform
from moe_jax.functional.codes import SCALE_DTYPE, dequantize, pack, scales_shape
from moe_jax.functional.sparse_product import (
    bitmap_tile,
    entry_coordinates,
    grouped_sparse_matmul,
    scatter_tile,
)
from moe_jax.kernels.tpu.fused_tile import FusedTile

VALUE_BITS = (8, 4, 3, 2)
# What is tried under a budget.
_KEEPS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
_BITS_OF_VALUES = (None, 8, 4)


@register("sparse")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sparse(Encodable, CostModel, MadeInPallas, Factored, KernelForm):
    """`W` plus `values` [E, n], zero at first, at fixed distinct positions (leaves of `forms.kinds.positions`).

    Quantised values are stored as `value_codes` [E, bytes] and `value_scales` [E, groups] instead.

    Attributes:
      rate: the share of entries that are zero, in [0, 1).
      entries: the number of entries n in every kernel, or in each kernel, in the order of `FFNConfig.matrices`; None:
        `round(d * f * (1 - rate))`.
      encoding: how positions are stored: `csr`, `bitmap` or `coo`.
      bits: per value: 8, 4, 3 or 2; None: values are not quantised.
      group_size: the number of consecutive values that share a scale; None: all do.
    """

    delta_option: ClassVar[str | None] = "sparse:RATE"
    delta_number: ClassVar[tuple[str, type] | None] = ("rate", float)
    includes_base: ClassVar[bool] = False
    residual_option: ClassVar[str | None] = "up"
    asks_for: ClassVar[tuple[str, ...]] = ("keep", "bits", "encoding")
    counts_largest: ClassVar[bool] = True
    places: ClassVar[tuple[str, ...]] = ("columns", "rows", "mask", "row_ends")
    row_pointers: ClassVar[tuple[str, ...]] = ("row_ends",)

    rate: float
    entries: int | tuple[int, ...] | None = None
    encoding: Encoding = "csr"
    bits: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        check_member("encoding", self.encoding, ENCODINGS)
        if not 0.0 <= self.rate < 1.0:
            raise InputError(f"rate={self.rate} must lie in [0, 1): it is the share of entries left out")
        if self.entries is not None and min(self._counts(), default=0) < 1:
            raise InputError(f"entries={shown(self.entries)} must be at least 1")
        if self.bits is not None and self.bits not in VALUE_BITS:
            raise InputError(f"bits={self.bits} must be one of {', '.join(map(str, VALUE_BITS))}")
        check_group_size(self.group_size)

    @property
    def has_codes(self) -> bool:
        return self.bits is not None

    def describe(self) -> str:
        values = "" if self.bits is None else f", {self.bits}-bit values"
        return f"sparse, keep {1 - self.rate:.4g}{values}, {self.encoding}"

    def kept_entries(self, matrix: Matrix) -> int:
        if isinstance(self.entries, tuple):
            return self.entries[matrix.index]
        return self.entries if self.entries is not None else round(matrix.size * (1.0 - self.rate))

    def check_fits(self, matrices: Mapping[str, Matrix]) -> None:
        if isinstance(self.entries, tuple) and len(self.entries) != len(matrices):
            raise InputError(f"entries={shown(self.entries)} is not one for each of {', '.join(matrices)}")
        for name, matrix in matrices.items():
            if self.kept_entries(matrix) < 1:
                raise InputError(f"rate {self.rate} leaves no entry of the {name} kernel {matrix.shape}; lower it")
            if self.kept_entries(matrix) > matrix.size:
                raise InputError(f"entries={shown(self.entries)} is above the size of the {name} kernel {matrix.shape}")

    def _counts(self) -> tuple[int, ...]:
        return self.entries if isinstance(self.entries, tuple) else (self.entries or 0,)

    # ---- what is stored ---------------------------------------------------------------------------------------------

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        entries, (num_experts,) = self.kept_entries(matrix), stack
        leaves = random_positions(rngs.params(), num_experts, matrix.shape, entries, self.encoding)
        if self.bits is None:
            return leaves | {"values": jnp.zeros((num_experts, entries), dtype)}
        codes = pack(jnp.full((entries, 1), 2 ** (self.bits - 1), jnp.int32), self.bits)[:, 0]
        groups = scales_shape((entries, 1), self.group_size)[0]
        return leaves | {
            "value_codes": jnp.broadcast_to(codes, (num_experts, *codes.shape)),
            "value_scales": jnp.zeros((num_experts, groups), SCALE_DTYPE),
        }

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        names = ("columns", "rows", "row_ends", "values", "value_codes", "value_scales")
        return {name: P("expert", None) for name in names} | {"mask": P("expert", None, None)}

    def from_dense(
        self, kernel: Float[np.ndarray, "i o"], matrix: Matrix, num_experts: int, streams: Streams
    ) -> dict[str, np.ndarray]:
        if self.encoding != "csr" or self.bits is not None:
            return super().from_dense(kernel, matrix, num_experts, streams)
        entries = self.kept_entries(matrix)
        columns = np.empty((num_experts, entries), columns_dtype(kernel.shape))
        row_ends = np.empty((num_experts, kernel.shape[0]), np.int32)
        for expert in range(num_experts):
            positions = draw_positions(streams(POSITIONS, expert), kernel.size, entries)
            columns[expert], row_ends[expert] = to_csr(positions, kernel.shape)
        return {"columns": columns, "row_ends": row_ends, "values": np.zeros((num_experts, entries), kernel.dtype)}

    # ---- what it means, and how it is applied -----------------------------------------------------------------------

    def values(self, arrays: Arrays) -> Float[Array, " n"]:
        """The values of one expert, float32. With a bitmap, padding may follow quantised values."""
        if self.bits is None:
            return arrays["values"].astype(jnp.float32)
        codes = arrays["value_codes"]
        count = arrays["columns"].shape[0] if "columns" in arrays else codes.shape[0] * 8 // self.bits
        scales = arrays["value_scales"][:, None]
        if self.group_size is not None:
            scales = jnp.pad(scales, ((0, -(-count // self.group_size) - scales.shape[0]), (0, 0)))
        return dequantize(codes[:, None], scales, count, self.bits, self.group_size, jnp.float32)[:, 0]

    def tile(self, base: Float[Array, "i w"] | None, arrays: Arrays, window: Window) -> Float[Array, "i w"]:
        values, shape = self.values(arrays), (window.shape[0], window.width)
        if self.encoding == "bitmap":
            row, column = (0, 0) if window.origin is None else (window.origin[0], window.origin[1])
            delta = bitmap_tile(values, arrays["mask"], row, column + window.start, shape)
        else:
            delta = scatter_tile(values, *entry_coordinates(arrays, window.origin), window.start, shape)
        return delta if base is None else base + delta

    def fused_tile(self, shape: tuple[int, int], whole: tuple[int, int]) -> FusedTile | str:
        """There is none: a kernel can look up entries of a register only, and not of an array."""
        if self.encoding == "bitmap":
            return "the values of a bitmap lie at places that have to be counted, and Mosaic cannot look up an array"
        return f"the entries of rows in {self.encoding.upper()} lie anywhere, and Mosaic cannot scatter into an array"

    def specs(self, split: Split) -> dict[str, P]:
        """Entries are not split over `tensor`: every device takes those of its part."""
        values = ("values",) if self.bits is None else ("value_codes", "value_scales")
        stored = self.stored_specs(split)
        return {name: stored[name] for name in (*POSITION_LEAVES[self.encoding], *values)}

    def grouped_delta(
        self,
        rows: Float[Array, "M i"],
        arrays: Arrays,
        group_sizes: Int[Array, " E"],
        matrix: Matrix,
        way: str,
        part: Part | None = None,
    ) -> Float[Array, "M o"]:
        # Where a kernel is divided, which entries are a device's is known only when they are placed in a tile.
        if way != "entrywise" or part is not None and part.shape != matrix.shape:
            return self.grouped(rows, arrays, group_sizes, matrix, part)
        values = jax.vmap(self.values)(dict(arrays))
        positions = {name: arrays[name] for name in POSITION_LEAVES[self.encoding]}
        return grouped_sparse_matmul(rows, values, positions, group_sizes, matrix.shape[1])

    # ---- what it costs ----------------------------------------------------------------------------------------------

    def multiplied_entries(self, expert: FFNConfig, d_model: int) -> int:
        return sum(map(self.kept_entries, ffn_matrices(expert, d_model).values()))

    def formula_entries(self, expert: FFNConfig, d_model: int) -> float:
        """P * (1 - p) for P entries: not rounded to whole entries of each matrix."""
        return sum(matrix.size for matrix in ffn_matrices(expert, d_model).values()) * (1.0 - self.rate)

    def own_bytes(self, matrices: Sequence[Matrix], itemsize: int) -> float:
        entries = sum(map(self.kept_entries, matrices))
        values = entries * (itemsize if self.bits is None else self.bits / 8)
        return values + (sum(matrix.size for matrix in matrices) / 8 if self.encoding == "bitmap" else 2 * entries)

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        if self.encoding == "bitmap":
            return platform.gather * sum(matrix.size for matrix in matrices)
        return platform.scatter * sum(map(self.kept_entries, matrices))

    def delta_costs(self, matrices: Sequence[Matrix], load: Load, platform: Platform) -> dict[str, Cost]:
        costs = super().delta_costs(matrices, load, platform)
        if self.encoding != "bitmap" and platform.sparse_entry is not None:
            entries = load.rows * sum(map(self.kept_entries, matrices))
            costs["entrywise"] = Cost(entries * platform.sparse_entry)
        return costs

    # ---- how it is encoded ------------------------------------------------------------------------------------------

    @classmethod
    def _layouts(cls) -> tuple[Layout, ...]:
        """CSR has int16 columns where these are enough, so `csr32` is never written; int64 is what public code has."""
        csr, bitmap, coo = ({"encoding": encoding, "design": "separate"} for encoding in ENCODINGS)
        return (
            Layout("csr16", cls, csr),
            Layout("csr32", cls, csr, position_bytes=4),
            Layout("bitmap", cls, bitmap),
            Layout("coo", cls, coo),
            Layout("coo64", cls, csr, position_bytes=16, has_row_pointers=False),
        )

    @classmethod
    def sizes_to_try(cls, design: Design) -> tuple[Wanted, ...]:
        """From next to nothing to everything kept."""
        return tuple(
            Wanted(form=cls, keep=keep, bits=bits, design=design) for keep in _KEEPS for bits in _BITS_OF_VALUES
        )

    @classmethod
    def check_wanted(cls, wanted: Wanted) -> None:
        check_keep(wanted.keep)
        if wanted.bits is not None and wanted.bits not in VALUE_BITS:
            raise InputError(f"bits={wanted.bits} of kept entries must be one of {', '.join(map(str, VALUE_BITS))}")

    @classmethod
    def for_share(
        cls, wanted: Wanted, expert: FFNConfig, d_model: int, num_experts: int, shares: Sequence[float] | None = None
    ) -> "Sparse":
        assert wanted.keep is not None
        shapes = expert.shapes(d_model).values()
        counts = cls.counts_for(wanted, [math.prod(shape) for shape in shapes], shares)
        return cls(
            rate=1 - wanted.keep,
            entries=counts,
            encoding=wanted.encoding or smallest_encoding(shapes, counts),  # type: ignore[arg-type]
            bits=wanted.bits,
            group_size=None if wanted.bits is None else wanted.group_size,
        )

    @staticmethod
    def counts_for(wanted: Wanted, sizes: Sequence[int], shares: Sequence[float] | None) -> tuple[int, ...]:
        """Number of entries that stay of each matrix.

        Args:
          wanted: the share, and whether there is one threshold for all matrices.
          sizes: entries of each matrix.
          shares: see `Wanted.made`.
        """
        assert wanted.keep is not None
        if not wanted.needs_shares:
            return tuple(kept_entries(size, wanted.keep) for size in sizes)
        assert shares is not None
        return common_counts(shares, sizes, wanted.keep)

    def encode(self, residual: Residual, matrix: Matrix, coder: Coder) -> EncodedKernel:
        assert residual.kept is not None
        shape, positions = residual.values.shape, np.flatnonzero(residual.kept)
        values = residual.values.reshape(-1)[positions]
        leaves = encode_positions(positions, shape, self.encoding, kept=residual.kept)
        if self.bits is None:
            leaves["values"] = cast("the values that sparse residuals keep", values, residual.dtype)
            read_back = leaves["values"].astype(np.float32)
        else:
            made = coder.quantize(values[:, None], bits=self.bits, group_size=self.group_size)
            leaves |= {"value_codes": made.codes[:, 0], "value_scales": made.scales[:, 0]}
            read_back = made.approximation[:, 0]
        approximation = np.zeros(shape, np.float32)
        approximation.reshape(-1)[positions] = read_back
        return leaves, approximation
