"""Bytes of compressed experts in every form in which they can be stored, from a config alone (METHODS 5 and 8)."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from moe_jax.experts.config import PLACES
from moe_jax.experts.places import columns_dtype

INDEX_BYTES = 4
"""Of an int32: ends of rows, flat positions."""


def places_bytes(places: str, shape: tuple[int, int], entries: int) -> int:
    """Bytes that say where the entries of one sparse kernel are.

    Args:
      places: `csr`, `bitmap` or `coo`; see `BankConfig.places`.
      shape: [in, out] of the kernel.
      entries: that are kept.
    """
    if places == "csr":
        return entries * columns_dtype(shape).itemsize + shape[0] * INDEX_BYTES
    if places == "bitmap":
        return shape[0] * math.ceil(shape[1] / 8)
    assert places == "coo", places
    return entries * INDEX_BYTES


def fewest_bytes_places(shapes: Iterable[tuple[int, int]], entries: Sequence[int]) -> Literal["csr", "bitmap", "coo"]:
    """The form of the places that takes the fewest bytes for all kernels of an expert; of equal ones the first.

    The values take the same room in all of them, whatever their dtype.

    Args:
      shapes: [in, out] of the kernels.
      entries: kept of each of them, in the same order.
    """
    pairs = list(zip(shapes, entries, strict=True))
    return min(PLACES, key=lambda places: sum(places_bytes(places, shape, count) for shape, count in pairs))
