"""The operations of the kernels in plain JAX, float32, with whole kernels."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def product(
    rows: Float[Array, "M k"], kernels: Float[Array, "E i o"], group_sizes: Int[Array, " E"], transposed: bool = False
) -> Float[Array, "M n"]:
    """Returns `rows[m] @ kernels[group of m]`."""
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows.shape[0], dtype=jnp.int32), side="right")
    member = jax.nn.one_hot(group, kernels.shape[0], dtype=jnp.float32)
    wide, kernels = rows.astype(jnp.float32), kernels.astype(jnp.float32)
    equation = "mo,eio,me->mi" if transposed else "mi,eio,me->mo"
    return jnp.einsum(equation, wide, kernels, member, precision=lax.Precision.HIGHEST)


def outer(rows: Float[Array, "M i"], dout: Float[Array, "M o"], group_sizes: Int[Array, " E"]) -> Float[Array, "E i o"]:
    """Returns the sums over the rows of every group."""
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows.shape[0], dtype=jnp.int32), side="right")
    member = jax.nn.one_hot(group, group_sizes.shape[0], dtype=jnp.float32)
    wide = rows.astype(jnp.float32), dout.astype(jnp.float32)
    return jnp.einsum("mi,mo,me->eio", *wide, member, precision=lax.Precision.HIGHEST)


def low_rank_gradients(
    rows: Float[Array, "M i"],
    dout: Float[Array, "M o"],
    a: Float[Array, "E i r"],
    b: Float[Array, "E r o"],
    group_sizes: Int[Array, " E"],
) -> tuple[Float[Array, "E i r"], Float[Array, "E r o"]]:
    """Returns the gradients of `a` and `b`."""
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows.shape[0], dtype=jnp.int32), side="right")
    member = jax.nn.one_hot(group, a.shape[0], dtype=jnp.float32)
    rows, dout, a, b = (array.astype(jnp.float32) for array in (rows, dout, a, b))
    exact = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    da = exact("mi,mr->mir", rows, exact("mo,ero,me->mr", dout, b, member))
    db = exact("mr,mo->mro", exact("mi,eir,me->mr", rows, a, member), dout)
    return exact("mir,me->eir", da, member), exact("mro,me->ero", db, member)
