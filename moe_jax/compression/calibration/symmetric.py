"""Products with symmetric matrices, as second moments are: of what is mirrored in the diagonal, half is computed."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Rows that are multiplied at once, of which what is left of their block on the diagonal is left out.
_ROWS = 1024


def add_squares(total: Float[Array, "i i"], x: Float[Array, "n i"]) -> Float[Array, "i i"]:
    """Adds X^T X, but for what `mirrored` fills in; float32."""
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


def weighed_squares(moment: Float[Array, "i i"], part: Float[Array, "i o"]) -> Float[Array, ""]:
    """Returns tr(P^T H P), float32, for a symmetric H."""
    total = jnp.zeros((), jnp.float32)
    for start in range(0, len(part), _ROWS):
        end = start + _ROWS
        own = jnp.matmul(moment[start:end, start:end], part[start:end], precision="highest")
        others = jnp.matmul(moment[start:end, end:], part[end:], precision="highest")
        total += jnp.sum(part[start:end] * (own + 2 * others))
    return total
