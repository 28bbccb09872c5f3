"""Grouped products as XLA lowers them: dense products over all experts, except the forward product on TPU."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_OUTER = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def ragged_product(
    lhs: Float[Array, "M i"], rhs: Float[Array, "E i o"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M o"]:
    """Returns `out[m] = lhs[m] @ rhs[group of row m]`; rows in no group are zero."""
    return zero_rows_beyond(lax.ragged_dot(lhs, rhs, group_sizes), jnp.sum(group_sizes))


def ragged_outer(
    lhs: Float[Array, "M i"], dout: Float[Array, "M o"], group_sizes: Int[Array, " E"]
) -> Float[Array, "E i o"]:
    """Returns `out[e] = sum over the rows m of group e of lhs[m]^T dout[m]`."""
    return lax.ragged_dot_general(lhs, dout, group_sizes, _OUTER)


def zero_rows_beyond(rows: Float[Array, "M o"], count: Int[Array, ""]) -> Float[Array, "M o"]:
    """Returns the first `count` rows, and zeros in place of the others."""
    inside = lax.broadcasted_iota(jnp.int32, rows.shape, 0) < count
    return jnp.where(inside, rows, jnp.zeros((), rows.dtype))
