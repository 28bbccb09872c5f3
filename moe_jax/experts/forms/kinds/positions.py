"""Positions of the entries of sparse deltas, in one of three encodings (methods.md 2.3, 5).

- `csr`: compressed sparse rows without the leading zero. `columns` holds the column of every entry, `row_ends` the
  number of entries in the rows up to and including each.
- `coo`: `rows` and `columns` of every entry. Smaller than the ends of many empty rows.
- `bitmap`: `mask`, a bit for every entry of the kernel; bit c % 8 of byte c // 8 for column c. The smallest where more
  than one in 16 is kept.

Entries lie row by row, columns ascending. Rows and columns are uint16 where they can be: with int32 the positions would
take more room than values of 16 bits. On the device, `functional.sparse_product` reads the same.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from moe_jax.core.errors import InputError

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


def encoding_bytes(encoding: str, shape: tuple[int, int], entries: int) -> int:
    """The bytes that the positions of one sparse kernel take.

    Args:
      encoding: `csr`, `bitmap` or `coo`.
      shape: [in, out] of the kernel.
      entries: that are kept.
    """
    if encoding == "csr":
        return entries * columns_dtype(shape).itemsize + shape[0] * np.dtype(np.int32).itemsize
    if encoding == "bitmap":
        return shape[0] * math.ceil(shape[1] / 8)
    assert encoding == "coo", encoding
    return entries * sum(index_dtype(size).itemsize for size in shape)


def smallest_encoding(shapes: Iterable[tuple[int, int]], entries: Sequence[int]) -> Encoding:
    """The encoding in which the positions of all kernels of an expert take the fewest bytes; of equal ones the first.

    Args:
      shapes: [in, out] of the kernels.
      entries: kept of each of them, in the same order.
    """
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


def from_csr(
    columns: Int[np.ndarray, " n"], row_ends: Int[np.ndarray, " i"], shape: tuple[int, int]
) -> Int[np.ndarray, " n"]:
    """The inverse of `to_csr`: flat positions, int64."""
    rows = np.repeat(np.arange(shape[0]), np.diff(row_ends, prepend=0))
    return rows * shape[1] + columns.astype(np.int64)


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
