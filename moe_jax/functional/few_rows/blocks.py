"""Products of few rows as sums over blocks of rows of the kernel, whose terms are written out.

Of such a sum XLA:CPU makes one loop, in which numbers are read, converted, multiplied and added in registers. A product
(`dot`) it would hand to a library, for which kernels would have to be converted into memory first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from moe_jax.functional.grouped import over_columns

_TILE_BYTES, _TILE_BYTES_OF_SEVERAL = 1 << 20, 1 << 19  # of sums over blocks: they stay in the cache
_MOST_TERMS = 8


class Blocks(NamedTuple):
    """Rows to be multiplied, cut as the rows of the kernel are.

    Attributes:
      rows: [g, b] of a single row, or [g, M, b]: blocks come first, as XLA:CPU divides the first axis among threads.
    """

    rows: Float[Array, "g ... b"]

    @classmethod
    def of(cls, rows: Float[Array, "M i"], block: int) -> "Blocks":
        """Cuts rows into blocks of so many entries."""
        count = rows.shape[0]
        return cls(rows.reshape(-1, block) if count == 1 else jnp.moveaxis(rows.reshape(count, -1, block), 0, 1))

    @property
    def number(self) -> int:
        """The number of blocks."""
        return self.rows.shape[0]

    def for_all(self, values: Float[Array, "g w"]) -> Float[Array, "g ... w"]:
        """Returns values of blocks and columns, to be multiplied with those of all rows."""
        return values if self.rows.ndim == 2 else values[:, None]

    def times(self, factors: Float[np.ndarray, " b"]) -> "Blocks":
        """Multiplies the entries of every block."""
        return Blocks(self.rows * np.expand_dims(factors, tuple(range(self.rows.ndim - 1))))

    def sums(self, kernel: Sequence[Float[Array, "g w"]]) -> Float[Array, "g ... w"]:
        """Returns the sum of every block, given the first row of every block of the kernel, the second, and so on."""
        return _summed([self.rows[..., k, None] * self.for_all(row) for k, row in enumerate(kernel)])


def product_in_blocks(
    rows: Float[Array, "M i"], block: int, width: int, sums_of: Callable[[Blocks, Array, int], Array]
) -> Float[Array, "M o"]:
    """Returns the product of few rows with a kernel, of which a tile of columns is multiplied after the other; float32.

    Args:
      rows: float32.
      block: rows of the kernel in a block; divides i.
      width: o.
      sums_of: given the blocks, the first column of a tile and its width w, returns the sum of every block [g, ..., w].
    """
    count, blocks = rows.shape[0], Blocks.of(rows, block)

    def of_columns(start: Array, width: int, out: Array) -> Array:
        products = sum_of_blocks(sums_of(blocks, start, width))
        return lax.dynamic_update_slice_in_dim(out, products.reshape(count, -1), start, 1)

    most = _TILE_BYTES if count == 1 else _TILE_BYTES_OF_SEVERAL
    tile = min(width, max(1, most // (4 * blocks.number * count)))
    return over_columns(tile, width, of_columns, jnp.zeros((count, width), rows.dtype))


def sum_of_blocks(terms: Float[Array, "g ..."]) -> Float[Array, "..."]:
    """Returns the sum, as operations on elements: XLA:CPU has a sum made by a library, which begins too slowly."""
    while (count := terms.shape[0]) > 1:
        # One long sum would take as long as two short ones, and many times as long to compile.
        parts = max(number for number in range(1, _MOST_TERMS + 1) if count % number == 0)
        parts = count if parts == 1 else parts
        terms = _summed(jnp.split(terms, parts))
    return terms[0]


def _summed(terms: list[Array]) -> Array:
    return functools.reduce(jnp.add, terms)
