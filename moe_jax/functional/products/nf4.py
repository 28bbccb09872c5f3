"""NF4 kernels: four-bit codes for quantiles of the normal distribution, and doubly quantised scales.

Dettmers et al. 2023 (QLoRA), section 3, with the code books of its implementation, bitsandbytes. A kernel [i, o] is cut
into blocks of 64 consecutive rows of a column; the last block of a column may be shorter. The scale of a block is its
largest magnitude, and an entry is stored as the code of the nearest of 16 levels, relative to that scale. The scales,
less their mean, are stored as eight-bit codes; 256 consecutive ones, row by row, share a scale in float32. This takes
4.13 bits per weight.

The arrays of a kernel are, by name (those of stacked kernels have the axes of the stack in front):

- `codes` uint8 [ceil(i / 2), o]: two rows in a byte, the first in its low bits.
- `scale_codes` uint8 [ceil(i / 64), o]: of the blocks' scales less `offset`.
- `scales` float32 [ceil(n / 256)]: of every 256 consecutive ones of the n scale codes.
- `offset` float32 []: the mean of the blocks' scales.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe_jax.functional.products.grouped import over_columns, tile_width
from moe_jax.functional.products.packing import select_levels
from moe_jax.kernels.by_platform import PRODUCT

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
    """The 256 levels of an eight-bit float with a sign, a dynamic exponent and a fraction (Dettmers 2015, section 2).

    From 1e-7 to 1, there are twice as many levels between two powers of ten as between the two below them.
    """
    positive = []
    for exponent in range(7):
        edges = np.linspace(0.1, 1.0, 2**exponent + 1)
        positive.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6))
    positive = np.concatenate(positive)
    return np.sort(np.concatenate([-positive, [0.0], positive, [1.0]])).astype(np.float32)


SCALE_LEVELS = _dynamic_levels()

Leaves = dict[str, Array]


def nf4_shapes(shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the arrays of a kernel, or of stacked ones.

    Args:
      shape: [..., i, o].
    """
    *stack, rows, columns = shape
    blocks = math.ceil(rows / BLOCK)
    return {
        "codes": jax.ShapeDtypeStruct((*stack, math.ceil(rows / 2), columns), jnp.uint8),
        "scale_codes": jax.ShapeDtypeStruct((*stack, blocks, columns), jnp.uint8),
        "scales": jax.ShapeDtypeStruct((*stack, math.ceil(blocks * columns / SCALE_BLOCK)), jnp.float32),
        "offset": jax.ShapeDtypeStruct(tuple(stack), jnp.float32),
    }


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
    codes, scales = _columns(leaves["codes"], start, width), block_scales(leaves, whole, start, width)
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
    scale_codes = _columns(leaves["scale_codes"], start, width)
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


def _columns(array: Array, start: Int[Array, ""] | int, width: int) -> Array:
    return array if width == array.shape[1] else lax.dynamic_slice_in_dim(array, start, width, 1)
