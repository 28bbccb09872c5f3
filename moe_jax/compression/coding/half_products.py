"""Products with second moments and their factors, float32: half of what is mirrored or zero is left out."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Rows that are multiplied at once; of the block on the diagonal all is.
_ROWS = 1024


def add_squares(total: Float[Array, "i i"], x: Float[Array, "n i"]) -> Float[Array, "i i"]:
    """Adds X^T X, but for what `mirrored` fills in."""
    for start in range(0, len(total), _ROWS):
        more = jnp.matmul(x[:, start : start + _ROWS].T, x[:, start:], precision="highest")
        total = total.at[start : start + _ROWS, start:].add(more)
    return total


@partial(jax.jit, donate_argnums=0)
def mirrored(total: Float[Array, "i i"]) -> Float[Array, "i i"]:
    """Fills in what `add_squares` left out."""
    for start in range(0, len(total), _ROWS):
        end = start + _ROWS
        total = total.at[end:, start:end].set(total[start:end, end:].T)
    return total


@jax.jit
def weighed_squares(moment: Float[Array, "i i"], part: Float[Array, "i o"]) -> Float[Array, " o"]:
    """Returns p^T H p for every column p and a symmetric H; their sum is tr(P^T H P)."""
    total = jnp.zeros(part.shape[1], jnp.float32)
    for start in range(0, len(part), _ROWS):
        end = start + _ROWS
        own = jnp.matmul(moment[start:end, start:end], part[start:end], precision="highest")
        others = jnp.matmul(moment[start:end, end:], part[end:], precision="highest")
        total += jnp.sum(part[start:end] * (own + 2 * others), axis=0)
    return total


@jax.jit
def whitened(factor: Float[Array, "i i"], matrix: Float[Array, "i w"]) -> Float[Array, "i w"]:
    """Returns R^T W for an upper triangular R."""
    parts = []
    for start in range(0, len(factor), _ROWS):
        end = start + _ROWS
        parts.append(jnp.matmul(factor[:end, start:end].T, matrix[:end], precision="highest"))
    return jnp.concatenate(parts)
