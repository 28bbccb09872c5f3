"""Products of few rows as sums over blocks of rows of the kernel, whose terms are written out.

Of such a sum XLA:CPU makes one loop, in which numbers are read, converted, multiplied and added in registers. A product
(`dot`) it would hand to a library, for which kernels would have to be converted into memory first.
"""

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moe_jax.functional.group_loops import over_columns

_TILE_BYTES = 1 << 20
"""Size of the sums over the blocks of a tile: they stay in the cache."""


def product_in_blocks(
    rows: Float[Array, "M i"], block: int, width: int, sums_of: Callable[[Array, Array, int], Array]
) -> Float[Array, "M o"]:
    """Returns the product of few rows with a kernel, of which a tile of columns is multiplied after the other; float32.

    A tile is multiplied with one row after the other, as if there were no other: it stays in the cache meanwhile.

    Args:
      rows: float32.
      block: rows of the kernel in a block; divides i.
      width: o.
      sums_of: given a row as blocks [g, b], the first column of a tile and its width w, returns the sum of every block
        [g, w].
    """
    if not len(rows):
        return jnp.zeros((0, width), rows.dtype)
    number = rows.shape[1] // block
    in_blocks = rows.reshape(-1, number, block)

    def of_columns(start: Array, width: int, out: Array) -> Array:
        products = [sum_of_blocks(sums_of(row, start, width)) for row in in_blocks]
        return lax.dynamic_update_slice_in_dim(out, jnp.stack(products), start, 1)

    tile = min(width, max(1, _TILE_BYTES // (4 * number)))
    return over_columns(tile, width, of_columns, jnp.zeros((rows.shape[0], width), rows.dtype))


def sum_of_terms(terms: Sequence[Float[Array, "g w"]]) -> Float[Array, "g w"]:
    """Returns the sum of one term of every block, the next one, and so on.

    A processor waits for one addition before it begins the next one to the same sum; so two are added up side by side.
    """
    return functools.reduce(jnp.add, [functools.reduce(jnp.add, half) for half in (terms[::2], terms[1::2]) if half])


def sum_of_blocks(sums: Float[Array, "g w"]) -> Float[Array, " w"]:
    """Returns the sum of the sums of all blocks.

    It is the product with a vector of ones, of which XLA:CPU makes a loop of its own. Additions would become part of
    the loop that makes the terms, as far as these still fit in: from some hundred blocks on, what the terms are made of
    would be written into memory first, which takes ten times as long. A library's sum begins too slowly.
    """
    return jnp.ones((sums.shape[0],), sums.dtype) @ sums
