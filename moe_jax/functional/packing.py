"""Symmetric quantisation: codes of 8, 4, 3, 2 or 1 bits packed into bytes, and a scale per group (METHODS 4).

A kernel [i, o] is packed along its input axis: byte j of column c holds the n = 8 / bits rows from j * n on,
the first in the lowest bits; of three bits, three bytes hold eight rows, the first byte being the lowest. Groups lie
along the same axis. Where i is no multiple, the last bytes or group are cut off.
A code q stands for `(q - offset) * scale`, offset = 2^(bits-1) - 1: the levels -offset ... offset are symmetric;
with one bit, the codes 0 and 1 stand for -scale and +scale.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

# Eight bits of mantissa are finer than any code here, and a scale in float32 would be a quarter of a one-bit delta.
SCALE_DTYPE = jnp.bfloat16


def codes_shape(shape: tuple[int, int], bits: int) -> tuple[int, int]:
    """Shape of the packed codes of a kernel [i, o]: [ceil(i * bits / 8), o]."""
    return math.ceil(shape[0] * bits / 8), shape[1]


def scales_shape(shape: tuple[int, int], group_size: int | None) -> tuple[int, int]:
    """Shape of the scales of a kernel [i, o]: [ceil(i / group_size), o], or [1, 1] for one per kernel."""
    return (1, 1) if group_size is None else (math.ceil(shape[0] / group_size), shape[1])


def largest_level(bits: int) -> int:
    """Levels are -n ... n; with one bit -1 and 1."""
    return max(1, 2 ** (bits - 1) - 1)


def pack(levels: Int[Array, "i o"], bits: int) -> UInt8[Array, "b o"]:
    """Packs levels in [-largest, largest]; with one bit -1 and 1."""
    codes = (levels + 1) // 2 if bits == 1 else levels + largest_level(bits)
    rows, per_word, word_bytes = levels.shape[0], *_word(bits)
    codes = jnp.pad(codes.astype(jnp.uint32), ((0, -rows % per_word), (0, 0)))
    shifts = jnp.arange(per_word, dtype=jnp.uint32) * jnp.uint32(bits)
    # The fields do not overlap: a sum is an or.
    words = jnp.sum(codes.reshape(-1, per_word, codes.shape[1]) << shifts[None, :, None], axis=1, dtype=jnp.uint32)
    packed = words[:, None, :] >> (8 * jnp.arange(word_bytes, dtype=jnp.uint32))[None, :, None]
    packed = (packed & jnp.uint32(255)).astype(jnp.uint8)
    return packed.reshape(-1, codes.shape[1])[: codes_shape(levels.shape, bits)[0]]


def unpack(codes: UInt8[Array, "b o"], rows: int, bits: int, dtype: jnp.dtype) -> Float[Array, "i o"]:
    """The levels of the first `rows` rows, as floats."""
    per_word, word_bytes = _word(bits)
    if word_bytes == 1:
        words = codes
    else:
        parts = jnp.pad(codes, ((0, -codes.shape[0] % word_bytes), (0, 0))).reshape(-1, word_bytes, codes.shape[1])
        shifts = 8 * jnp.arange(word_bytes, dtype=jnp.uint32)
        words = jnp.sum(parts.astype(jnp.uint32) << shifts[None, :, None], axis=1, dtype=jnp.uint32)
    shifts = jnp.arange(per_word, dtype=words.dtype) * words.dtype.type(bits)
    fields = (words[:, None, :] >> shifts[None, :, None]) & words.dtype.type(2**bits - 1)
    levels = fields.reshape(-1, codes.shape[1])[:rows].astype(dtype)
    return 2 * levels - 1 if bits == 1 else levels - largest_level(bits)


def dequantize(
    codes: UInt8[Array, "b o"],
    scales: Float[Array, "g s"],
    rows: int,
    bits: int,
    group_size: int | None,
    dtype: jnp.dtype,
) -> Float[Array, "i o"]:
    """Levels times scales; [rows, o] in `dtype`.

    Args:
      codes: packed along the input axis.
      scales: as `scales_shape` says.
      rows: i.
      bits: of a code.
      group_size: rows that share a scale; None: all.
      dtype: of the result.
    """
    levels, scales = unpack(codes, rows, bits, dtype), scales.astype(dtype)
    if group_size is None:
        return levels * scales
    groups, width = scales.shape
    per_row = jnp.broadcast_to(scales[:, None, :], (groups, group_size, width)).reshape(-1, width)[:rows]
    return levels * per_row


def _word(bits: int) -> tuple[int, int]:
    """How many codes make a whole number of bytes, and how many bytes that is."""
    return (8, 3) if bits == 3 else (8 // bits, 1)
