"""Codes of 8, 4, 3, 2 or 1 bits packed into bytes, and a scale per group (methods.md 4).

A kernel [i, o] is packed along its input axis. Byte j of column c holds the n = 8 / bits codes of the rows from j * n
on, the first of them in the lowest bits; with three bits, three bytes hold eight codes, the lowest bits in the first
byte. Groups lie along the same axis. If i is not a multiple, unneeded bytes at the end are left out and the last group
is shorter.

A code q in [0, 2^bits) stands for `level * scale`; different codes stand for different levels. The scale is half a
step, and its sign says which of two grids a group has:

- not negative: the odd numbers `2 q + 1 - 2^bits`, from `1 - 2^bits` to `2^bits - 1`. They are symmetric and leave zero
  out; with one bit they are -1 and 1. For few bits, this is the better grid for Gaussian entries.
- negative: the even numbers `2 q - 2^bits`, from `-2^bits` to `2^bits - 2`. Zero is one of them: the better grid where
  many entries are zero, or next to nothing beside a few large ones.

A scale of zero makes a group of zeros. Instead of a grid, a kernel may have a table of its own, with any 2^bits levels.

Or a group has a zero point z, of eight bits: its levels are `2 (q - z / 2^(8 - bits))`. Both grids are special cases;
zero always is one of the levels, or lies between two of them.

Scales may be codes themselves (double quantisation; QLoRA, arXiv 2305.14314, section 3), of eight bits c from -127 to
127: `step * c |c| / 127^2`, where the step is the largest scale of a row of groups; every row of groups has one.
Because of the square, columns whose scales are a thousandth of the largest still have codes other than zero.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

# Its eight bits of mantissa are finer than any code here; a float32 scale would take a quarter of the bytes of 128
# one-bit codes.
SCALE_DTYPE = jnp.bfloat16
_MOST = 127


class Grid(NamedTuple):
    """The numbers that codes stand for: a level times the scale of the code's group.

    Attributes:
      scales: of groups, or of rows; one for every code, or with axes of length 1.
      table: the levels of the codes, ascending; None: the levels that the sign of the scale chooses.
      zeros: zero points of the groups, shaped as scales are: the codes, in fractions of one, that would stand for zero;
        None: there are none.
    """

    scales: Float[Array, "*#s"]
    table: Float[Array, " n"] | None = None
    zeros: Float[Array, "*#s"] | None = None

    def numbers(self, codes: Float[Array, "*s"] | UInt8[Array, "*s"], bits: int) -> Float[Array, "*s"]:
        """Returns the numbers that unpacked codes represent, in the dtype of the scales."""
        if self.zeros is not None:
            return 2 * (codes.astype(self.scales.dtype) - self.zeros) * self.scales
        if self.table is None:
            return scaled_levels(codes.astype(self.scales.dtype), self.scales, bits)
        levels = select_levels(codes.astype(jnp.uint8), [self.table[code] for code in range(2**bits)], bits)
        return levels.astype(self.scales.dtype) * self.scales


def codes_shape(shape: tuple[int, int], bits: int) -> tuple[int, int]:
    """Returns the shape of the packed codes of a kernel [i, o]: [ceil(i * bits / 8), o]."""
    return math.ceil(shape[0] * bits / 8), shape[1]


def scales_shape(shape: tuple[int, int], group_size: int | None) -> tuple[int, int]:
    """Returns the shape of the scales of a kernel [i, o]: [ceil(i / group_size), o], or [1, 1] for one per kernel."""
    return (1, 1) if group_size is None else (math.ceil(shape[0] / group_size), shape[1])


def scale_leaves(scales: Float[Array, "*stack g s"], scale_bits: int) -> dict[str, Array]:
    """Returns scales as they are stored: `scales`, or `scale_codes` int8 and `scale_steps` [..., g, 1].

    Args:
      scales: float32.
      scale_bits: 16, or 8.
    """
    if scale_bits == 16:
        return {"scales": scales.astype(SCALE_DTYPE)}
    steps = jnp.max(jnp.abs(scales), axis=-1, keepdims=True).astype(SCALE_DTYPE)
    wide = steps.astype(jnp.float32)
    roots = jnp.sqrt(jnp.abs(scales) / jnp.where(wide > 0, wide, 1))
    codes = jnp.sign(scales) * jnp.clip(jnp.round(_MOST * roots), 0, _MOST)
    return {"scale_codes": codes.astype(jnp.int8), "scale_steps": steps}


def scales_of(leaves: Mapping[str, Array]) -> Float[Array, "*stack g s"]:
    """Returns the scales that leaves stand for, float32; see `scale_leaves`."""
    if "scales" in leaves:
        return leaves["scales"].astype(jnp.float32)
    codes = leaves["scale_codes"].astype(jnp.float32)
    return leaves["scale_steps"].astype(jnp.float32) * (codes * jnp.abs(codes) / _MOST**2)


def zero_leaf(zeros: Float[Array, "*s"], bits: int) -> UInt8[Array, "*s"]:
    """Returns zero points, given in codes, as they are stored."""
    return jnp.clip(jnp.round(zeros * 2 ** (8 - bits)), 0, 255).astype(jnp.uint8)


def zeros_of(leaf: UInt8[Array, "*s"], bits: int) -> Float[Array, "*s"]:
    """Returns the zero points that a leaf stands for, in codes, float32."""
    return leaf.astype(jnp.float32) / 2 ** (8 - bits)


def pack(codes: Int[Array, "i o"], bits: int) -> UInt8[Array, "b o"]:
    """Packs codes in [0, 2^bits)."""
    rows, per_word, word_bytes = codes.shape[0], *_word(bits)
    fields = jnp.pad(codes.astype(jnp.uint32), ((0, -rows % per_word), (0, 0)))
    shifts = jnp.arange(per_word, dtype=jnp.uint32) * jnp.uint32(bits)
    # The fields do not overlap, so their sum is their bitwise or.
    words = jnp.sum(fields.reshape(-1, per_word, codes.shape[1]) << shifts[None, :, None], axis=1, dtype=jnp.uint32)
    packed = words[:, None, :] >> (8 * jnp.arange(word_bytes, dtype=jnp.uint32))[None, :, None]
    packed = (packed & jnp.uint32(255)).astype(jnp.uint8)
    return packed.reshape(-1, codes.shape[1])[: codes_shape((rows, codes.shape[1]), bits)[0]]


def unpack(packed: UInt8[Array, "b o"], rows: int, bits: int, dtype: DTypeLike) -> Float[Array, "i o"]:
    """Returns the codes of the first `rows` rows, as floats."""
    per_word, word_bytes = _word(bits)
    if word_bytes == 1:
        words = packed
    else:
        parts = jnp.pad(packed, ((0, -packed.shape[0] % word_bytes), (0, 0))).reshape(-1, word_bytes, packed.shape[1])
        shifts = 8 * jnp.arange(word_bytes, dtype=jnp.uint32)
        words = jnp.sum(parts.astype(jnp.uint32) << shifts[None, :, None], axis=1, dtype=jnp.uint32)
    shifts = jnp.arange(per_word, dtype=words.dtype) * words.dtype.type(bits)
    fields = (words[:, None, :] >> shifts[None, :, None]) & words.dtype.type(2**bits - 1)
    return fields.reshape(-1, packed.shape[1])[:rows].astype(dtype)


def scaled_levels(codes: Float[Array, "*s"], scales: Float[Array, "*#s"], bits: int) -> Float[Array, "*s"]:
    """Returns the numbers that unpacked codes represent, in their dtype; `scales` has the scale of every code."""
    # Each difference is a whole number that fits into eight bits of mantissa: it is exact in bfloat16, too.
    levels = 2 * codes - (2**bits - 1) - (scales < 0).astype(codes.dtype)
    return levels * scales


def select_levels(codes: UInt8[Array, "*s"], levels: Sequence[Float[Array, ""]], bits: int) -> Float[Array, "*s"]:
    """Returns the levels of unpacked codes, chosen bit by bit: selections are vector operations, look-ups are not."""
    levels = list(levels)
    for bit in range(bits):
        is_set = (codes >> jnp.uint8(bit)) & jnp.uint8(1) == 1
        levels = [jnp.where(is_set, odd, even) for even, odd in zip(levels[::2], levels[1::2], strict=True)]
    return levels[0]


def dequantize(
    packed: UInt8[Array, "b o"],
    scales: Float[Array, "g s"],
    rows: int,
    bits: int,
    group_size: int | None,
    dtype: DTypeLike,
    table: Float[Array, " n"] | None = None,
    zeros: Float[Array, "g s"] | None = None,
) -> Float[Array, "i o"]:
    """Returns levels times scales, [rows, o] in `dtype`.

    Args:
      packed: codes, packed along the input axis.
      scales: as `scales_shape` says.
      rows: i.
      bits: of a code.
      group_size: rows that share a scale; None: all.
      dtype: of the result.
      table, zeros: see `Grid`.
    """
    codes = unpack(packed, rows, bits, dtype)
    of_all = None if zeros is None else repeat_over_rows(zeros.astype(dtype), rows, group_size)
    return Grid(repeat_over_rows(scales.astype(dtype), rows, group_size), table, of_all).numbers(codes, bits)


def repeat_over_rows(
    group_values: Float[Array, "g s"], rows: int, group_size: int | None, first: Int[Array, ""] | None = None
) -> Float[Array, "i s"]:
    """Repeats the numbers of groups for each of their rows; returns them as they are if all rows are of one group.

    Args:
      group_values: a row for every group of the kernel.
      rows: number of rows.
      group_size: rows of a group; None: all.
      first: the row of the kernel at which they begin, which may be inside a group; None: at the first.
    """
    if group_size is None:
        return group_values
    if first is not None:
        return jnp.take(group_values, (first + jnp.arange(rows, dtype=jnp.int32)) // group_size, axis=0)
    groups, width = group_values.shape
    return jnp.broadcast_to(group_values[:, None, :], (groups, group_size, width)).reshape(-1, width)[:rows]


def _word(bits: int) -> tuple[int, int]:
    """Returns the smallest number of codes that fill whole bytes, and the number of these bytes."""
    return (8, 3) if bits == 3 else (8 // bits, 1)
