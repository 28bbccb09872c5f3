"""Places of sparse deltas, in one of three forms (METHODS 2.3, 5). Entries lie row by row, columns ascending.

- `csr`: compressed sparse rows without the leading zero. `columns` holds the column of every entry, `row_ends` the
  number of entries in the rows up to and including each.
- `coo`: `rows` and `columns` of every entry. Smaller than the ends of many empty rows.
- `bitmap`: `mask`, a bit for every entry of the kernel; bit c % 8 of byte c // 8 for column c. The smallest where more
  than one in 16 is kept.

Rows and columns are uint16 where they can be: with int32 the places would take more room than values of 16 bits.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int

from moe_jax.errors import InputError
from moe_jax.experts.config import PLACES

PLACES_LEAVES = {"csr": ("columns", "row_ends"), "coo": ("columns", "rows"), "bitmap": ("mask",)}


def index_dtype(size: int) -> np.dtype:
    """Of indices below `size`."""
    return np.dtype(np.uint16 if size <= 1 << 16 else np.int32)


def columns_dtype(shape: tuple[int, int]) -> np.dtype:
    """Of the columns of a kernel [in, out]."""
    return index_dtype(shape[1])


def encode_places(
    positions: Int[np.ndarray, " n"], shape: tuple[int, int], places: str
) -> dict[str, np.ndarray]:
    """Leaves of one kernel for flat positions, which are distinct and ascending.

    Args:
      positions: of the entries.
      shape: [in, out] of the kernel.
      places: `csr`, `coo` or `bitmap`.
    """
    if places == "csr":
        columns, row_ends = to_csr(positions, shape)
        return {"columns": columns, "row_ends": row_ends}
    if places == "coo":
        rows, columns = np.divmod(positions, shape[1])
        return {"columns": columns.astype(index_dtype(shape[1])), "rows": rows.astype(index_dtype(shape[0]))}
    kept = np.zeros(shape, bool)
    kept.reshape(-1)[positions] = True
    return {"mask": np.packbits(kept, axis=1, bitorder="little")}


def places_bytes(places: str, shape: tuple[int, int], entries: int) -> int:
    """Bytes that say where the entries of one sparse kernel are.

    Args:
      places: `csr`, `bitmap` or `coo`; see `BankConfig.places`.
      shape: [in, out] of the kernel.
      entries: that are kept.
    """
    if places == "csr":
        return entries * columns_dtype(shape).itemsize + shape[0] * np.dtype(np.int32).itemsize
    if places == "bitmap":
        return shape[0] * math.ceil(shape[1] / 8)
    assert places == "coo", places
    return entries * sum(index_dtype(size).itemsize for size in shape)


def fewest_bytes_places(shapes: Iterable[tuple[int, int]], entries: Sequence[int]) -> Literal["csr", "bitmap", "coo"]:
    """The form of the places that takes the fewest bytes for all kernels of an expert; of equal ones the first.

    The values take the same room in all of them, whatever their dtype.

    Args:
      shapes: [in, out] of the kernels.
      entries: kept of each of them, in the same order.
    """
    pairs = list(zip(shapes, entries, strict=True))
    return min(PLACES, key=lambda places: sum(places_bytes(places, shape, count) for shape, count in pairs))


def check_addressable(shape: tuple[int, int]) -> None:
    """Raises `InputError` if int32 cannot count the entries of a kernel."""
    if math.prod(shape) > np.iinfo(np.int32).max:
        raise InputError(f"a kernel of {math.prod(shape)} entries is too large for the int32 places of a sparse delta")


def to_csr(
    positions: Int[np.ndarray, " n"], shape: tuple[int, int]
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " i"]]:
    """Columns and row ends of flat positions, which are distinct and ascending."""
    rows, columns = np.divmod(positions, shape[1])
    row_ends = np.searchsorted(rows, np.arange(shape[0]), side="right").astype(np.int32)
    return columns.astype(columns_dtype(shape)), row_ends


def to_positions(
    columns: Int[np.ndarray, " n"], row_ends: Int[np.ndarray, " i"], shape: tuple[int, int]
) -> Int[np.ndarray, " n"]:
    """The flat positions again; int64."""
    rows = np.repeat(np.arange(shape[0]), np.diff(row_ends, prepend=0))
    return rows * shape[1] + columns.astype(np.int64)
