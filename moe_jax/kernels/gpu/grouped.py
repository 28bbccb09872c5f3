"""Grouped products on NVIDIA GPUs: chooses the kernel that fits the GPU, the shapes and the dtype.

- Hopper, bfloat16 or float16, and tiles that divide the shapes: JAX's Mosaic-GPU kernel, forward and d-rows.
- Otherwise, and for d-kernels: Triton, on GPUs from Ampere on, for dtypes of at most 32 bits.
- Otherwise XLA's `ragged_dot`, which it lowers to a dense product over all experts, with a warning.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.kernels.gpu import triton_grouped
from moe_jax.kernels.gpu.triton_grouped import Maker, Tile
from moe_jax.kernels.gpu.triton_makers import OverBase
from moe_jax.kernels.hardware import TRITON_FROM, Capability, triton_fits
from moe_jax.kernels.plain import ragged_outer, ragged_product, zero_rows_beyond

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


logger = logging.getLogger(__name__)


def grouped_product(
    lhs: Float[Array, "M i"],
    rhs: Float[Array, "E i o"],
    group_sizes: Int[Array, " E"],
    *,
    capability: Capability | None,
    one_device: bool = True,
    transposed: bool = False,
) -> Float[Array, "M o"]:
    """Returns `out[m] = lhs[m] @ rhs[group of row m]`; rows in no group are zero.

    Args:
      lhs: rows sorted by group.
      rhs: one kernel per group; [E, o, i] if `transposed`.
      group_sizes: rows per group.
      capability: of the GPU; None: unknown.
      one_device: whether a kernel can be called; see `kernels.by_platform`.
      transposed: multiplies with the transposed kernels.
    """
    if one_device and fits(lhs, rhs, capability, transposed=transposed):
        return product(lhs, rhs, group_sizes, transposed=transposed)
    if one_device and triton_fits(lhs.dtype, capability):
        return TritonProducts(capability).product(lhs, rhs, group_sizes, transposed=transposed)
    _warn_of_dense(group_sizes.shape[0], lhs.dtype.name, capability, one_device)
    return ragged_product(lhs, jnp.swapaxes(rhs, 1, 2) if transposed else rhs, group_sizes)


def grouped_outer(
    lhs: Float[Array, "M i"],
    dout: Float[Array, "M o"],
    group_sizes: Int[Array, " E"],
    *,
    capability: Capability | None,
    one_device: bool = True,
) -> Float[Array, "E i o"]:
    """Returns `out[e] = sum over the rows m of group e of lhs[m]^T dout[m]`; empty groups give zeros.

    Args:
      lhs, dout: rows sorted by group.
      group_sizes: rows per group.
      capability: of the GPU; None: unknown.
      one_device: whether a kernel can be called; see `kernels.by_platform`.
    """
    if one_device and triton_fits(lhs.dtype, capability):
        return TritonProducts(capability).outer(lhs, dout, group_sizes)
    _warn_of_dense(group_sizes.shape[0], lhs.dtype.name, capability, one_device)
    return ragged_outer(lhs, dout, group_sizes)


class TritonProducts(NamedTuple):
    """Triton's grouped products for a GPU.

    Attributes:
      capability: of the GPU; None: unknown.
      interpret: run the kernels on any platform, slowly.
    """

    capability: Capability | None
    interpret: bool = False

    def product(
        self,
        lhs: Float[Array, "M i"],
        rhs: Float[Array, "E i o"],
        group_sizes: Int[Array, " E"],
        *,
        transposed: bool = False,
        origin: Int[Array, ""] | None = None,
        into: Float[Array, "M o"] | None = None,
    ) -> Float[Array, "M o"]:
        """Returns `out[m] = lhs[m] @ rhs[group of row m]`; arguments as for `triton_grouped.product`."""
        terms, columns = lhs.shape[1], rhs.shape[1 if transposed else 2]
        tile = product_tile(lhs.shape[0], rhs.shape[0], terms, columns, lhs.dtype, self.capability)
        options = {"transposed": transposed, "origin": origin, "into": into, "interpret": self.interpret}
        return triton_grouped.product(lhs, rhs, group_sizes, tile=tile, **options)

    def made_product(
        self,
        lhs: Float[Array, "M i"],
        base: Float[Array, "i o"] | None,
        arrays: Sequence[Array],
        group_sizes: Int[Array, " E"],
        maker: Maker,
        shape: tuple[int, int],
        *,
        transposed: bool = False,
    ) -> Float[Array, "M o"]:
        """Multiplies with kernels: the base, if any, plus what `maker` makes; see `triton_grouped.made_product`."""
        terms, columns = (shape[1], shape[0]) if transposed else shape
        tile = product_tile(lhs.shape[0], group_sizes.shape[0], terms, columns, lhs.dtype, self.capability)
        # The arrays that a tile is made from take registers and shared memory, too.
        tile = tile._replace(columns=min(tile.columns, 128), stages=min(tile.stages, 3))
        if base is not None:
            arrays, maker = [base, *arrays], OverBase(maker)
        arguments = lhs, arrays, group_sizes, maker, shape
        return triton_grouped.made_product(*arguments, tile=tile, transposed=transposed, interpret=self.interpret)

    def outer(
        self,
        lhs: Float[Array, "M i"],
        dout: Float[Array, "M o"],
        group_sizes: Int[Array, " E"],
        *,
        origin: Int[Array, ""] | None = None,
        dtype: DTypeLike | None = None,
    ) -> Float[Array, "E i o"]:
        """Returns the sums of outer products of the rows of every group; arguments as for `triton_grouped.outer`."""
        shape = lhs.shape[0], group_sizes.shape[0], lhs.shape[1], dout.shape[1]
        tile = outer_tile(*shape, lhs.dtype, self.capability)
        options = {"origin": origin, "dtype": dtype, "interpret": self.interpret}
        return triton_grouped.outer(lhs, dout, group_sizes, tile=tile, **options)


def product_tile(
    rows: int, groups: int, terms: int, columns: int, dtype: DTypeLike, capability: Capability | None
) -> Tile:
    """Returns the tile of a product of `rows` rows in `groups` groups: as high as a group is on average."""
    widest = _widest_tile(dtype, capability)
    high = _fitting(-(-rows // groups), widest.rows)
    if high < widest.rows:
        # A low tile is soon done: with narrow ones more programs run at a time.
        widest = widest._replace(columns=min(widest.columns, 128), warps=4)
    return widest._replace(rows=high, terms=_fitting(terms, widest.terms), columns=_fitting(columns, widest.columns))


def outer_tile(
    rows: int, groups: int, fan_in: int, fan_out: int, dtype: DTypeLike, capability: Capability | None
) -> Tile:
    """Returns the tile for sums of outer products [fan_in, fan_out] over the rows of a group."""
    widest = _widest_tile(dtype, capability)
    return widest._replace(
        rows=_fitting(fan_in, widest.rows),
        terms=_fitting(-(-rows // groups), widest.terms),
        columns=_fitting(fan_out, widest.columns),
    )


def _widest_tile(dtype: DTypeLike, capability: Capability | None) -> Tile:
    """Returns tiles that fill a core's shared memory: 227 KiB on Hopper, 163 on A100, 99 on desktop GPUs."""
    if jnp.dtype(dtype).itemsize > 2:
        return Tile(rows=64, terms=32, columns=128, warps=4, stages=3)
    if capability is not None and capability[0] in (9, 10):
        return Tile(rows=128, terms=64, columns=256, warps=8, stages=4)
    if capability == (8, 0):
        return Tile(rows=128, terms=64, columns=256, warps=8, stages=3)
    return Tile(rows=128, terms=32, columns=128, warps=4, stages=4)


def _fitting(size: int, limit: int) -> int:
    """Returns the smallest power of two from 16 to `limit` that is at least `size`; without one, the largest."""
    return max(triton_grouped.MIN_TILE, min(limit, 1 << (size - 1).bit_length()))


@lru_cache
def _warn_of_dense(groups: int, dtype: str, capability: Capability | None, one_device: bool) -> None:
    """Warns once: the function is cached."""
    reason = "the compiler cannot divide one between devices"
    if one_device:
        gpu = "" if capability is None else f", and this one has {capability[0]}.{capability[1]}"
        needs = "bfloat16, float16 or float32, and a GPU of compute capability {}.{}".format(*TRITON_FROM)
        reason = f"it needs {needs}{gpu}"
    logger.warning(
        "no grouped kernel for a product of %s rows with %d experts: %s. XLA multiplies every row with all experts: "
        "%d times the arithmetic, and as much more memory",
        dtype, groups, reason, groups,
    )  # fmt: skip
