"""Codes of 8, 4, 3, 2 or 1 bits unpacked inside a kernel; see `functional.products.packing` for how they are packed."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt8


def unpack(packed: UInt8[Array, "b q"], bits: int) -> Int[Array, "p q"]:
    """Returns the codes of all rows that fill whole bytes, int32.

    The codes of a byte belong to consecutive rows. Two or four of them are spread over the parts of a word, which
    become rows when the word is read as numbers of 16 or 8 bits, because this is how short numbers lie in the
    registers. Otherwise the word is repeated, which takes more instructions.
    """
    words, mask = packed.astype(jnp.int32), (1 << bits) - 1
    if bits == 8:
        return words
    if bits == 4:
        return pltpu.bitcast((words & mask) | ((words >> 4) << 16), jnp.int16).astype(jnp.int32)
    if bits == 2:
        spread = (words & mask) | (((words >> 2) & mask) << 8) | (((words >> 4) & mask) << 16) | ((words >> 6) << 24)
        return pltpu.bitcast(spread, jnp.int8).astype(jnp.int32)
    if bits == 3:
        parts = words.reshape(-1, 3, words.shape[1])
        words = parts[:, 0, :] | (parts[:, 1, :] << 8) | (parts[:, 2, :] << 16)
    height, width = words.shape
    repeated = jnp.broadcast_to(words[:, None, :], (height, 8, width)).reshape(8 * height, width)
    shift = (lax.broadcasted_iota(jnp.int32, repeated.shape, 0) & 7) * bits
    return lax.shift_right_logical(repeated, shift) & mask


def scaled_rows(row: Any, step: int, numerator: int, denominator: int) -> Any:
    """Returns `row * numerator / denominator` for a row that is a multiple of `step`, where it is a whole number."""
    if isinstance(row, int):
        return row * numerator // denominator
    return pl.multiple_of(lax.div(row * numerator, denominator), step * numerator // denominator)


def looked_up(table: Float[Array, "1 128"], codes: Int[Array, "p q"]) -> Float[Array, "p q"]:
    """Returns `table[0, codes]`: a register holds the table, and the units that move entries between lanes read it."""
    height, width = codes.shape
    strips = []
    for start in range(0, width, table.shape[1]):
        strip = codes[:, start : start + table.shape[1]]
        missing = table.shape[1] - strip.shape[1]
        strip = jnp.pad(strip, ((0, 0), (0, missing))) if missing else strip
        entries = jnp.broadcast_to(table, (height, table.shape[1]))
        found = jnp.take_along_axis(entries, strip, axis=1, mode="promise_in_bounds")
        strips.append(found[:, : found.shape[1] - missing])
    return jnp.concatenate(strips, axis=1) if len(strips) > 1 else strips[0]
