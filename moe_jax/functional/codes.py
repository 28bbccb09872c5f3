"""Kernels in codes: packed into bytes with a scale per group (methods.md 4), and NF4.

**Packed codes** have 8, 4, 3, 2 or 1 bits. A kernel [i, o] is packed along its input axis. Byte j of column c holds the
n = 8 / bits codes of the rows from j * n on, the first of them in the lowest bits; with three bits, three bytes hold
eight codes, the lowest bits in the first byte. Groups lie along the same axis. If i is not a multiple, unneeded bytes
at the end are left out and the last group is shorter.

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

**NF4** has four-bit codes for quantiles of the normal distribution, and doubly quantised scales (Dettmers et al. 2023,
QLoRA, section 3, with the code books of its implementation, bitsandbytes). A kernel [i, o] is cut into blocks of 64
consecutive rows of a column; the last block of a column may be shorter. The scale of a block is its largest magnitude,
and an entry is stored as the code of the nearest of 16 levels, relative to that scale. The scales, less their mean, are
stored as eight-bit codes; 256 consecutive ones, row by row, share a scale in float32. This takes 4.13 bits per weight.

The arrays of a kernel are, by name (those of stacked kernels have the axes of the stack in front):

- `codes` uint8 [ceil(i / 2), o]: two rows in a byte, the first in its low bits.
- `scale_codes` uint8 [ceil(i / 64), o]: of the blocks' scales less `offset`.
- `scales` float32 [ceil(n / 256)]: of every 256 consecutive ones of the n scale codes.
- `offset` float32 []: the mean of the blocks' scales.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from moe_jax.functional.group_loops import over_columns, tile_width
from moe_jax.kernels.by_platform import PRODUCT

# Its eight bits of mantissa are finer than any code here; a float32 scale would take a quarter of the bytes of 128
# one-bit codes.
SCALE_DTYPE = jnp.bfloat16
_MOST = 127


def scale_dtype(scale_bits: int) -> jnp.dtype:
    """Returns the dtype of scales of 32 or 16 bits, or of the steps of those of 8."""
    return jnp.dtype(jnp.float32 if scale_bits == 32 else SCALE_DTYPE)


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
      scale_bits: 32, 16, or 8.
    """
    if scale_bits > 8:
        return {"scales": scales.astype(scale_dtype(scale_bits))}
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
    rows, per_word, word_bytes = codes.shape[0], *word(bits)
    fields = jnp.pad(codes.astype(jnp.uint32), ((0, -rows % per_word), (0, 0)))
    shifts = jnp.arange(per_word, dtype=jnp.uint32) * jnp.uint32(bits)
    # The fields do not overlap, so their sum is their bitwise or.
    words = jnp.sum(fields.reshape(-1, per_word, codes.shape[1]) << shifts[None, :, None], axis=1, dtype=jnp.uint32)
    packed = words[:, None, :] >> (8 * jnp.arange(word_bytes, dtype=jnp.uint32))[None, :, None]
    packed = (packed & jnp.uint32(255)).astype(jnp.uint8)
    return packed.reshape(-1, codes.shape[1])[: codes_shape((rows, codes.shape[1]), bits)[0]]


def unpack(packed: UInt8[Array, "b o"], rows: int, bits: int, dtype: DTypeLike) -> Float[Array, "i o"]:
    """Returns the codes of the first `rows` rows, as floats."""
    per_word, word_bytes = word(bits)
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


def select_levels(
    codes: UInt8[Array, "*s"] | Int[Array, "*s"], levels: Sequence[Float[Array, ""]], bits: int, shift: int = 0
) -> Float[Array, "*s"]:
    """Returns the levels of codes, chosen bit by bit: selections are vector operations, look-ups are not.

    Args:
      codes: unpacked, or words that hold them.
      levels: of all codes in their order.
      bits: of a code.
      shift: bits of a word below its code.
    """
    levels = list(levels)
    for bit in range(bits):
        is_set = codes & jnp.asarray(1 << (shift + bit), codes.dtype) != 0
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


def word(bits: int) -> tuple[int, int]:
    """Returns the smallest number of codes that fill whole bytes, and the number of these bytes."""
    return (8, 3) if bits == 3 else (8 // bits, 1)


BLOCK, SCALE_BLOCK = 64, 256

# fmt: off
# As published; the construction of section 3 gives them to 2e-7: quantiles of N(0, 1), zero among them.
LEVELS = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)
# fmt: on


def _dynamic_levels() -> np.ndarray:
    """The 256 levels of an eight-bit float with sign, dynamic exponent and fraction (Dettmers 2015, section 2)."""
    # From 1e-7 to 1, there are twice as many levels between two powers of ten as between the two below them.
    positive = []
    for exponent in range(7):
        edges = np.linspace(0.1, 1.0, 2**exponent + 1)
        positive.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6))
    positive = np.concatenate(positive)
    return np.sort(np.concatenate([-positive, [0.0], positive, [1.0]])).astype(np.float32)


SCALE_LEVELS = _dynamic_levels()

Leaves = dict[str, Array]


@jax.jit
def quantize_nf4(kernel: Float[Array, "... i o"]) -> Leaves:
    """Returns the arrays of a kernel, or of stacked kernels, of any floating-point dtype.

    Entries and scales are rounded to the nearest level. A block of zeros remains a block of zeros. Codes stand for
    finite numbers only, which the caller has to make sure of: a compiled program cannot raise an error.
    """
    if kernel.ndim > 2:
        return lax.map(quantize_nf4, kernel)
    rows, columns = kernel.shape
    blocks = _blocks(kernel.astype(jnp.float32), BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=1)
    # Fifteen comparisons compile to one loop over the kernel, a binary search to several.
    relative = blocks * _reciprocal(largest)[:, None, :]
    codes: Any = sum((relative > middle).astype(jnp.uint8) for middle in _middles(LEVELS))
    codes = _blocks(codes.reshape(-1, columns)[:rows], 2)

    offset = jnp.mean(largest)
    centred = _blocks((largest - offset).reshape(-1, 1), SCALE_BLOCK)[:, :, 0]
    scales = jnp.max(jnp.abs(centred), axis=1)
    relative = (centred * _reciprocal(scales)[:, None]).reshape(-1)[: largest.size]
    scale_codes = jnp.searchsorted(jnp.asarray(_middles(SCALE_LEVELS)), relative).astype(jnp.uint8)
    return {
        "codes": codes[:, 0] | (codes[:, 1] << jnp.uint8(4)),
        "scale_codes": scale_codes.reshape(largest.shape),
        "scales": scales,
        "offset": offset,
    }


@partial(jax.jit, static_argnames=("rows", "dtype"))
def dequantize_nf4(leaves: Leaves, rows: int, dtype: jnp.dtype) -> Float[Array, "... i o"]:
    """Returns the kernel that the arrays represent, or stacked kernels; computed in float32 and rounded once.

    Args:
      leaves: as `quantize_nf4` gives them.
      rows: i.
      dtype: of the result.
    """
    if leaves["codes"].ndim > 2:
        return lax.map(lambda one: dequantize_nf4(one, rows, dtype), dict(leaves))
    columns = leaves["codes"].shape[1]
    return nf4_tile(leaves, rows, columns, 0, columns).astype(dtype)


def nf4_tile(leaves: Leaves, rows: int, whole: int, start: Int[Array, ""] | int, width: int) -> Float[Array, "i w"]:
    """Returns columns start ... start + width of a kernel, or of the part of it that begins at `origin`; float32.

    Args:
      leaves: of one kernel. With an `origin` (row, column) among them, `codes` has the rows and columns of the part,
        which begins with an even row, and `scale_codes` has its columns; all else is of the whole kernel.
      rows: of the kernel, or of the part.
      whole: columns of the whole kernel.
      start: a column of the part.
      width: columns of the result.
    """
    codes, scales = columns_of(leaves["codes"], start, width), block_scales(leaves, whole, start, width)
    first_row = leaves["origin"][0] if "origin" in leaves else 0
    halves = (codes[:, None, :] >> jnp.array([0, 4], jnp.uint8)[None, :, None]) & jnp.uint8(15)
    levels = select_levels(halves.reshape(-1, width)[:rows], [jnp.float32(level) for level in LEVELS], 4)
    if "origin" in leaves:
        block = (first_row + jnp.arange(rows, dtype=jnp.int32)) // BLOCK
        return levels * jnp.take(scales, block, axis=0, mode="clip")
    per_row = jnp.broadcast_to(scales[:, None, :], (scales.shape[0], BLOCK, width))
    return levels * per_row.reshape(-1, width)[:rows]


def block_scales(leaves: Leaves, whole: int, start: Int[Array, ""] | int, width: int) -> Float[Array, "b w"]:
    """Returns the scale of every block of the whole kernel's rows in some columns, float32; see `nf4_tile`."""
    scale_codes = columns_of(leaves["scale_codes"], start, width)
    first_column = leaves["origin"][1] if "origin" in leaves else 0
    block = jnp.arange(scale_codes.shape[0], dtype=jnp.int32)[:, None]
    column = jnp.arange(width, dtype=jnp.int32)[None, :] + first_column + start
    group = (block * whole + column) // SCALE_BLOCK
    scales = jnp.take(jnp.asarray(SCALE_LEVELS), scale_codes.astype(jnp.int32), mode="clip")
    return scales * jnp.take(leaves["scales"], group, mode="clip") + leaves["offset"]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def nf4_matmul(x: Float[Array, "... i"], leaves: Leaves, rows: int, whole: int | None = None) -> Float[Array, "... o"]:
    """Returns `x W` with W in NF4, in the dtype of `x`; only one tile of columns of W exists at a time.

    Only `x` has a gradient. The backward pass dequantises W again and keeps nothing but the arguments.

    Args:
      x: activations.
      leaves: of one kernel, as `quantize_nf4` gives them; or with an `origin` of a part of it, see `nf4_tile`.
      rows: i, of the kernel or of the part.
      whole: columns of the whole kernel; None: `leaves` are those of the whole kernel.
    """
    columns = leaves["codes"].shape[1]
    flat = x.reshape(-1, rows)
    tile = tile_width((rows, columns), flat.shape[0])

    def multiply(start: Array, width: int, out: Array) -> Array:
        product = flat @ nf4_tile(leaves, rows, whole or columns, start, width).astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(out, product, start, 1)

    out = over_columns(tile, columns, multiply, jnp.zeros((flat.shape[0], columns), x.dtype))
    return out.reshape(*x.shape[:-1], columns)


def _forward(x: Array, leaves: Leaves, rows: int, whole: int | None) -> tuple[Array, Leaves]:
    return checkpoint_name(nf4_matmul(x, leaves, rows, whole), PRODUCT), leaves


def _backward(rows: int, whole: int | None, leaves: Leaves, dout: Array) -> tuple[Array, None]:
    columns = leaves["codes"].shape[1]
    flat = dout.reshape(-1, columns)
    tile = tile_width((rows, columns), flat.shape[0])

    def add(start: Array, width: int, total: Array) -> Array:
        kernel = nf4_tile(leaves, rows, whole or columns, start, width).astype(dout.dtype)
        part = lax.dynamic_slice_in_dim(flat, start, width, 1)
        contract = (((1,), (1,)), ((), ()))
        return total + lax.dot_general(part, kernel, contract, preferred_element_type=jnp.float32)

    dx = over_columns(tile, columns, add, jnp.zeros((flat.shape[0], rows), jnp.float32))
    return dx.astype(dout.dtype).reshape(*dout.shape[:-1], rows), None


nf4_matmul.defvjp(_forward, _backward)


def _blocks(array: Array, size: int) -> Array:
    """Reshapes [i, o] to [ceil(i / size), size, o], with zeros after the last row."""
    padded = jnp.pad(array, ((0, -array.shape[0] % size), (0, 0)))
    return padded.reshape(-1, size, array.shape[1])


def _reciprocal(x: Array) -> Array:
    """Returns 1 / x, and 0 for x = 0."""
    return jnp.where(x > 0, 1 / jnp.where(x > 0, x, jnp.ones_like(x)), jnp.zeros_like(x))


def _middles(levels: np.ndarray) -> np.ndarray:
    return (levels[:-1] + levels[1:]) / np.float32(2)


def columns_of(array: Array, start: Int[Array, ""] | int, width: int) -> Array:
    """Returns some columns of an array [i, o]."""
    return array if width == array.shape[1] else lax.dynamic_slice_in_dim(array, start, width, 1)
