"""Grouped products for Hopper by JAX's own kernel for it, written in Mosaic GPU.

It uses the hardware's asynchronous copies and products (TMA, WGMMA); in return, tiles must divide the shapes. JAX also
has such kernels for the gradient of the kernels and for Blackwell, but they ask JAX's default device for its number of
cores, so they cannot be lowered for a GPU that is not there.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.gpu.nvidia import Capability
from moe_jax.kernels.ragged_dot import zero_rows_beyond

ROWS, TERMS, COLUMNS = 128, 64, 128
# Tiles in flight (32 KiB each, of the 227 KiB of shared memory that a program may have), and the number of columns of
# tiles that concurrent programs traverse together.
_STAGES, _COLUMNS_TOGETHER = 4, 8


def fits(lhs: Array, rhs: Array, capability: Capability | None, *, transposed: bool = False) -> bool:
    """Whether the kernel can be used: its instructions are Hopper's alone, and tiles must divide the shapes."""
    terms, columns = lhs.shape[1], rhs.shape[1 if transposed else 2]
    return (
        capability is not None
        and capability[0] == 9
        and lhs.dtype == rhs.dtype
        and lhs.dtype in (jnp.bfloat16, jnp.float16)
        and lhs.shape[0] > 0
        and lhs.shape[0] % ROWS == terms % TERMS == columns % COLUMNS == 0
    )


def product(
    lhs: Float[Array, "M i"], rhs: Float[Array, "E i o"], group_sizes: Int[Array, " E"], *, transposed: bool = False
) -> Float[Array, "M o"]:
    """Returns `out[m] = lhs[m] @ rhs[group of row m]`; rows in no group are zero.

    Args:
      lhs: rows sorted by group; see `fits`.
      rhs: one kernel per group; [E, o, i] if `transposed`.
      group_sizes: rows per group.
      transposed: multiplies with the transposed kernels.
    """
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    out = ragged_dot_mgpu.ragged_dot(
        lhs,
        rhs,
        group_sizes=group_sizes.astype(jnp.int32),
        block_m=ROWS,
        block_n=COLUMNS,
        block_k=TERMS,
        max_concurrent_steps=_STAGES,
        grid_block_n=_COLUMNS_TOGETHER,
        transpose_rhs=transposed,
    )
    # The kernel leaves rows outside groups unwritten.
    return zero_rows_beyond(out, jnp.sum(group_sizes))
