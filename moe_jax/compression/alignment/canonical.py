"""A canonical order of point clouds and of their points, independent of the order in which they are given."""

import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from moe_jax.compression.alignment.transport import row_blocks
from moe_jax.core.errors import InputError


def canonical_order(clouds: Sequence[Float[np.ndarray, "n D"]]) -> tuple[list[int], Int[np.ndarray, "E n"]]:
    """Sorts clouds by norm, the greatest first, and the points of each by norm, the least first.

    Points of equal norm are sorted by their coordinates. Whatever is computed from the sorted clouds is then the same,
    bit for bit, if the clouds or their points are given in another order.

    Returns:
      The order of the clouds, and int32[E, n], the order of the points of each, in that order.

    Raises:
      InputError: for values that are not finite.
    """
    orders, norms = [], []
    for k, cloud in enumerate(clouds):
        squares = squared_row_norms(cloud, k)
        order = np.argsort(squares)
        ascending = squares[order]
        equal = ascending[1:] == ascending[:-1]
        tied = np.flatnonzero(np.append(equal, False) | np.append(False, equal))
        if len(tied):
            rows = order[tied]
            # The last key of a lexicographic sort comes first.
            order[tied] = rows[np.lexsort((*cloud[rows].astype(np.float64).T, squares[rows]))]
        orders.append(order.astype(np.int32))
        norms.append(float(ascending.sum()))
    keys = [(-norm, _digest(clouds[k], orders[k]) if norms.count(norm) > 1 else b"") for k, norm in enumerate(norms)]
    by_norm = sorted(range(len(clouds)), key=keys.__getitem__)
    return by_norm, np.stack([orders[k] for k in by_norm])


def squared_row_norms(cloud: Float[np.ndarray, "n D"], index: int) -> Float[np.ndarray, " n"]:
    """Returns the squared norms of the points, float64.

    Raises:
      InputError: for values that are not finite; names the cloud by its index.
    """
    squares = np.empty(len(cloud))
    for rows in row_blocks(*cloud.shape):
        block = cloud[rows].astype(np.float64, copy=False)
        squares[rows] = np.einsum("id,id->i", block, block)
    if not np.isfinite(squares).all():
        raise InputError(f"cloud {index} holds values that are not finite")
    return squares


def _digest(cloud: Float[np.ndarray, "n D"], order: Int[np.ndarray, " n"]) -> bytes:
    digest = hashlib.blake2b()
    for rows in row_blocks(*cloud.shape):
        digest.update(cloud[order[rows]].tobytes())
    return digest.digest()
