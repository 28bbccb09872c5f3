"""Values of groups of rows, such as scales, regrouped so that groups and pieces of a kernel share their boundaries."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def rows_that_share(group_size: int | None, height: int, step: int) -> int:
    """Returns the most rows that share a value, and divide groups, pieces of `step` rows, and a part of `height` rows.

    Args:
      group_size: rows of a group; None: all rows share one value.
      height: of a kernel, or of the equal parts of it.
      step: rows of a piece.
    """
    return math.gcd(height, step) if group_size is None else math.gcd(group_size, height, step)


def group_rows(
    values: Float[Array, "E g o"], group_size: int | None, shared: int, height: int, origin: Int[Array, ""] | None
) -> Float[Array, "E s o"]:
    """Returns the values of every `shared` rows of a kernel, or of a part of it.

    Args:
      values: of groups of the whole kernels; if all rows share one value, g is 1.
      group_size: rows of a group; None: all rows share one value.
      shared: see `rows_that_share`.
      height: of the kernels, or of the part.
      origin: row at which the part begins, a multiple of its height; None: it is the whole kernel.
    """
    experts, _, width = values.shape
    if group_size is None:
        return jnp.broadcast_to(values, (experts, height // shared, width))
    every = jnp.repeat(values, group_size // shared, axis=1)
    if origin is None:
        return every[:, : height // shared]
    return lax.dynamic_slice_in_dim(every, origin // shared, height // shared, 1)
