"""Sparse deltas (DeRS-SM, DARE, ResMoE's pruned residuals; methods.md 2.3, 4, 5).

The positions of entries have one of three encodings:

- `csr`: compressed sparse rows without the leading zero. `columns` holds the column of every entry, `row_ends` the
  number of entries in the rows up to and including each.
- `coo`: `rows` and `columns` of every entry. Smaller than the ends of many empty rows.
- `bitmap`: `mask`, a bit for every entry of the kernel; bit c % 8 of byte c // 8 for column c. The smallest where more
  than one in 16 is kept.

Entries lie row by row, columns ascending. Rows and columns are uint16 where they can be: with int32 the positions would
take more room than values of 16 bits. On the device, `functional.sparse.by_entry` reads the same.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.code_options import VALUE_BITS, check_group_size
from moe_jax.core.draws import POSITIONS, draw_positions
from moe_jax.core.errors import InputError, check_member, shown
from moe_jax.core.finite import cast
from moe_jax.core.form_options import Design, SparseOptions
from moe_jax.experts.devices import Cost, Platform
from moe_jax.experts.forms.coding import Coder, Encodable, EncodedKernel, Layout, Residual, Wanted
from moe_jax.experts.forms.optional import CostModel, Factored, MadeInPallas
from moe_jax.experts.forms.protocol import KernelForm, Streams, register
from moe_jax.experts.shapes import Arrays, FFNConfig, GroupSizes, Load, Matrix, Part, Rows, Split, Window, ffn_matrices
from moe_jax.functional.codes import SCALE_DTYPE, dequantize, pack, scales_shape
from moe_jax.functional.sparse.by_entry import bitmap_tile, entry_coordinates, grouped_sparse_matmul, scatter_tile
from moe_jax.kernels.tpu.fused_tile import FusedTile

Encoding = Literal["csr", "bitmap", "coo"]
ENCODINGS: tuple[Encoding, ...] = ("csr", "bitmap", "coo")
POSITION_LEAVES = {"csr": ("columns", "row_ends"), "coo": ("columns", "rows"), "bitmap": ("mask",)}
"""The names of the leaves, by encoding."""


def index_dtype(size: int) -> np.dtype:
    """The smallest dtype for indices below `size`."""
    return np.dtype(np.uint16 if size <= 1 << 16 else np.int32)


def columns_dtype(shape: tuple[int, int]) -> np.dtype:
    """The dtype of the columns of a kernel [in, out]."""
    return index_dtype(shape[1])


def encode_positions(
    positions: Int[np.ndarray, " n"],
    shape: tuple[int, int],
    encoding: str,
    *,
    kept: Bool[np.ndarray, "i o"] | None = None,
) -> dict[str, np.ndarray]:
    """Makes the leaves of one kernel.

    Args:
      positions: flat positions of the entries, distinct and ascending.
      shape: [in, out] of the kernel.
      encoding: `csr`, `coo` or `bitmap`.
      kept: whether an entry is kept, where that is known already.
    """
    if encoding == "csr":
        columns, row_ends = to_csr(positions, shape)
        return {"columns": columns, "row_ends": row_ends}
    if encoding == "coo":
        rows, columns = np.divmod(positions, shape[1])
        return {"columns": columns.astype(index_dtype(shape[1])), "rows": rows.astype(index_dtype(shape[0]))}
    if kept is None:
        kept = np.zeros(shape, bool)
        kept.reshape(-1)[positions] = True
    return {"mask": np.packbits(kept, axis=1, bitorder="little")}


def decode_positions(
    leaves: Mapping[str, np.ndarray], shape: tuple[int, int]
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " i"]]:
    """Returns columns and row ends of the entries of one kernel, as `to_csr` does.

    Args:
      leaves: of its positions, in any encoding.
      shape: [in, out] of the kernel.
    """
    if "mask" in leaves:
        kept = np.unpackbits(leaves["mask"], axis=1, count=shape[1], bitorder="little").view(bool)
        in_rows = kept.sum(axis=1)
        columns = np.flatnonzero(kept) - np.repeat(np.arange(shape[0]) * shape[1], in_rows)
        return columns.astype(columns_dtype(shape)), np.cumsum(in_rows, dtype=np.int32)
    if "rows" in leaves:
        return leaves["columns"], np.cumsum(np.bincount(leaves["rows"], minlength=shape[0]), dtype=np.int32)
    return leaves["columns"], leaves["row_ends"]


def encoding_bytes(encoding: str, shape: tuple[int, int], entries: int) -> int:
    """The bytes that the positions of a sparse kernel [in, out] take in one of `ENCODINGS`, if so many are kept."""
    if encoding == "csr":
        return entries * columns_dtype(shape).itemsize + shape[0] * np.dtype(np.int32).itemsize
    if encoding == "bitmap":
        return shape[0] * math.ceil(shape[1] / 8)
    assert encoding == "coo", encoding
    return entries * sum(index_dtype(size).itemsize for size in shape)


def smallest_encoding(shapes: Iterable[tuple[int, int]], entries: Sequence[int]) -> Encoding:
    """The encoding in which kept entries of all kernels [in, out] of an expert take the fewest bytes, or the first."""
    pairs = list(zip(shapes, entries, strict=True))
    return min(ENCODINGS, key=lambda encoding: sum(encoding_bytes(encoding, shape, count) for shape, count in pairs))


def kept_entries(size: int, keep: float) -> int:
    """How many of `size` entries a share is; at least one."""
    return min(size, max(1, round(size * keep)))


def common_counts(shares: Sequence[float], sizes: Sequence[int], keep: float) -> tuple[int, ...]:
    """Entries that every expert keeps of each matrix, so that the kept share is exact and storage has no gaps.

    Args:
      shares: of each matrix in what is kept, averaged over experts; they sum to 1.
      sizes: entries of each matrix.
      keep: share of all entries that stays.
    """
    total = kept_entries(sum(sizes), keep)
    counts = [min(size, max(1, math.floor(total * share))) for share, size in zip(shares, sizes, strict=True)]
    while (missing := total - sum(counts)) > 0:
        # What rounding took away, or a matrix had no room for, goes to those that have.
        open_ = [m for m, size in enumerate(sizes) if counts[m] < size]
        for m in open_:
            counts[m] += min(sizes[m] - counts[m], math.ceil(missing / len(open_)), total - sum(counts))
    return tuple(counts)


def check_addressable(shape: tuple[int, int]) -> None:
    """Raises `InputError` if int32 cannot address the entries of a kernel."""
    if math.prod(shape) > np.iinfo(np.int32).max:
        raise InputError(
            f"a kernel of {math.prod(shape)} entries is too large for the int32 positions of a sparse delta"
        )


def to_csr(
    positions: Int[np.ndarray, " n"], shape: tuple[int, int]
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " i"]]:
    """Columns and row ends of flat positions, which are distinct and ascending."""
    rows, columns = np.divmod(positions, shape[1])
    row_ends = np.searchsorted(rows, np.arange(shape[0]), side="right").astype(np.int32)
    return columns.astype(columns_dtype(shape)), row_ends


def random_positions(
    key: Array, num_experts: int, shape: tuple[int, int], entries: int, encoding: str
) -> dict[str, Int[Array, "E ..."]]:
    """Draws distinct positions for every expert, on the device, and makes their leaves.

    Raises:
      InputError: if a kernel has more entries than int32 can address.
    """
    check_addressable(shape)

    def one(key: Array) -> dict[str, Array]:
        # Sorted draws from a range shorter by what is added: distinct, and not a permutation of the whole kernel, which
        # takes seconds. Sets of neighbours are a little less likely than others.
        draws = jax.random.randint(key, (entries,), 0, math.prod(shape) - entries + 1, jnp.int32)
        positions = jnp.sort(draws) + jnp.arange(entries, dtype=jnp.int32)
        rows, columns = positions // shape[1], positions % shape[1]
        if encoding == "bitmap":
            byte, bit = columns // 8, (columns % 8).astype(jnp.uint8)
            empty = jnp.zeros((shape[0], -(-shape[1] // 8)), jnp.uint8)
            return {"mask": empty.at[rows, byte].add(jnp.uint8(1) << bit)}
        columns = columns.astype(columns_dtype(shape))
        if encoding == "coo":
            return {"columns": columns, "rows": rows.astype(index_dtype(shape[0]))}
        every = jnp.arange(shape[0], dtype=jnp.int32)
        return {"columns": columns, "row_ends": jnp.searchsorted(rows, every, side="right").astype(jnp.int32)}

    return jax.lax.map(one, jax.random.split(key, num_experts))


# What is tried under a budget.
_KEEPS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
_BITS_OF_VALUES = (None, 8, 4)


@register("sparse")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sparse(SparseOptions, Encodable, CostModel, MadeInPallas, Factored, KernelForm):
    """`W` plus `values` [E, n], zero at first, at fixed distinct positions (leaves of `POSITION_LEAVES`).

    Quantised values are stored as `value_codes` [E, bytes] and `value_scales` [E, groups] instead.

    Attributes:
      rate: the share of entries that are zero, in [0, 1).
      entries: the number of entries n in every kernel, or in each kernel, in the order of `FFNConfig.matrices`; None:
        `round(d * f * (1 - rate))`.
      encoding: how positions are stored: `csr`, `bitmap` or `coo`.
      bits: per value: 8, 4, 3 or 2; None: values are not quantised.
      group_size: the number of consecutive values that share a scale; None: all do.
    """

    includes_base: ClassVar[bool] = False
    counts_largest: ClassVar[bool] = True
    places: ClassVar[tuple[str, ...]] = ("columns", "rows", "mask", "row_ends")
    row_pointers: ClassVar[tuple[str, ...]] = ("row_ends",)

    entries: int | tuple[int, ...] | None = None
    encoding: Encoding = "csr"
    bits: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        check_member("encoding", self.encoding, ENCODINGS)
        super().__post_init__()
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
        self, rows: Rows, arrays: Arrays, group_sizes: GroupSizes, matrix: Matrix, way: str, part: Part | None = None
    ) -> Rows:
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
