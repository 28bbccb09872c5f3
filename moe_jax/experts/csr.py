"""Places of sparse deltas: compressed sparse rows, without the leading zero (METHODS 2.3).

`columns` holds the column of every entry, row by row and ascending inside a row; `row_ends` the number of entries in
the rows up to and including each. Columns are uint16 where they can be: with int32 the places would take more room than
values of 16 bits.
"""

import math

import numpy as np
from jaxtyping import Int

from moe_jax.errors import InputError


def columns_dtype(shape: tuple[int, int]) -> np.dtype:
    """Of the columns of a kernel [in, out]."""
    return np.dtype(np.uint16 if shape[1] <= 1 << 16 else np.int32)


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
