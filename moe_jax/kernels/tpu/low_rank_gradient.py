"""Gradients of low-rank kernels `a b` of a grouped product, without the gradient of any whole kernel.

For the rows x and the output gradients y of a group: `da = x^T (y b^T)` and `db = (x a)^T y`. Each row is read once.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from moe_jax.kernels.tpu.chip import ANY_CORE, RESERVED, Core, block_bytes, round_up
from moe_jax.kernels.tpu.group_visits import Visits, group_visits
from moe_jax.kernels.tpu.pieces import COLUMNS, changed, dot, over_strips, split

ROW_BLOCKS, STRIP = (512, 256, 128), 128


def reference(
    rows: Float[Array, "M i"],
    dout: Float[Array, "M o"],
    a: Float[Array, "E i r"],
    b: Float[Array, "E r o"],
    group_sizes: Int[Array, " E"],
) -> tuple[Float[Array, "E i r"], Float[Array, "E r o"]]:
    """Returns the same in plain JAX, float32; for tests."""
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows.shape[0], dtype=jnp.int32), side="right")
    member = jax.nn.one_hot(group, a.shape[0], dtype=jnp.float32)
    rows, dout, a, b = (array.astype(jnp.float32) for array in (rows, dout, a, b))
    exact = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    da = exact("mi,mr->mir", rows, exact("mo,ero,me->mr", dout, b, member))
    db = exact("mr,mo->mro", exact("mi,eir,me->mr", rows, a, member), dout)
    return exact("mir,me->eir", da, member), exact("mro,me->ero", db, member)


def low_rank_gradients(
    rows: Float[Array, "M i"],
    dout: Float[Array, "M o"],
    a: Float[Array, "E i r"],
    b: Float[Array, "E r o"],
    group_sizes: Int[Array, " E"],
    *,
    core: Core = ANY_CORE,
    interpret: bool = False,
) -> tuple[Float[Array, "E i r"], Float[Array, "E r o"]]:
    """Returns the gradients of `a` and `b`, float32; zero for groups without rows.

    Arrays that must be in the dtype of the rows are split into two terms of it, so that the only loss is the rounding
    of sums in float32.

    Args:
      rows: sorted by group, as they were multiplied.
      dout: gradient of the product, in the dtype of the rows.
      a, b: factors of every group.
      group_sizes: rows per group, int32.
      core: the core for which the sizes of blocks are chosen.
      interpret: run the kernel in interpret mode.

    Raises:
      ValueError: if the factors are too large for the kernel (see `fits`).
    """
    (groups, fan_in, rank), fan_out = a.shape, b.shape[2]
    block = _block(rows.shape[0], (fan_in, fan_out), rank, rows.dtype, core)
    if block is None:
        raise ValueError(f"factors of rank {rank} of kernels {(fan_in, fan_out)} do not fit into fast memory")
    pad = max(0, block.rows - rows.shape[0])
    rows, dout = (jnp.pad(array, ((0, pad), (0, 0))) for array in (rows, dout))
    visits, count = group_visits(group_sizes, rows.shape[0], block.rows, every_group=True)
    factors = _terms(jnp.swapaxes(a, 1, 2), rows.dtype), _terms(b, rows.dtype)

    def of_rows(v: Any, visits: Any) -> tuple:
        return visits.block[v], 0

    def of_group(v: Any, visits: Any) -> tuple:
        return visits.group[v], 0, 0

    sides = (fan_in, fan_out)
    da, db = pl.pallas_call(
        partial(_kernel, block=block, terms=len(factors[0])),
        out_shape=[jax.ShapeDtypeStruct((groups, rank, side), jnp.float32) for side in sides],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(count,),
            in_specs=[pl.BlockSpec((block.rows, side), of_rows) for side in sides]
            + [pl.BlockSpec((None, rank, side), of_group) for side in sides for _ in factors[0]],
            out_specs=[pl.BlockSpec((None, rank, side), of_group) for side in sides],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=block.vmem + RESERVED
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * rows.shape[0] * rank * sum(sides),
            bytes_accessed=rows.nbytes + dout.nbytes + groups * rank * sum(sides) * (4 + 2 * rows.dtype.itemsize),
            transcendentals=0,
        ),
        interpret=interpret,
        name="low_rank_gradients",
    )(visits, rows, dout, *factors[0], *factors[1])
    return jnp.swapaxes(da, 1, 2), db


def fits(rows: int, shape: tuple[int, int], rank: int, dtype: Any, core: Core) -> bool:
    """Whether the kernel takes factors of this rank, for kernels of shape [i, o]."""
    return _block(rows, shape, rank, dtype, core) is not None


class _Block(NamedTuple):
    """Rows of a block and of a strip, and the fast memory that all blocks take together."""

    rows: int
    strip: int
    vmem: int


def _block(rows: int, shape: tuple[int, int], rank: int, dtype: Any, core: Core) -> _Block | None:
    """Returns the longest block of rows that fits; None: none does."""
    for most in ROW_BLOCKS:
        size = min(most, round_up(rows, 32 // jnp.dtype(dtype).itemsize))
        of_rows = sum(block_bytes((size, side), dtype) for side in shape)
        of_group = sum(2 * block_bytes((rank, side), dtype) + block_bytes((rank, side), jnp.float32) for side in shape)
        # Masked strips, and pieces in float32.
        inside = sum(3 * block_bytes((STRIP, side), dtype) for side in shape) + 4 * 4 * COLUMNS * max(rank, STRIP)
        vmem = 2 * (of_rows + of_group) + inside
        if vmem + RESERVED <= core.vmem and size % min(size, STRIP) == 0:
            return _Block(size, min(size, STRIP), vmem)
    return None


def _terms(factor: Array, dtype: Any) -> tuple[Array, ...]:
    """Returns the factor as a sum of arrays of the dtype."""
    return (factor,) if factor.dtype == dtype else (factor.astype(dtype),) if dtype == jnp.float32 else split(factor)


def _kernel(visits: Visits, rows_ref: Any, dout_ref: Any, *refs: Any, block: _Block, terms: int) -> None:
    a_refs, b_refs, (da_ref, db_ref) = refs[:terms], refs[terms : 2 * terms], refs[2 * terms :]
    v = pl.program_id(0)

    @pl.when(changed(visits.group, v))
    def _clear() -> None:
        da_ref[...] = jnp.zeros_like(da_ref)
        db_ref[...] = jnp.zeros_like(db_ref)

    def strip(at: Any, inside: Array) -> None:
        own = pl.ds(at, block.strip)
        # Zeros in place of rows of other groups, and of rows beyond the last, which may be anything.
        left, right = (jnp.where(inside, ref[own, :], jnp.zeros((), ref.dtype)) for ref in (rows_ref, dout_ref))
        _add(db_ref, a_refs, left, right)
        _add(da_ref, b_refs, right, left)

    over_strips(visits, v, block.rows, block.strip, strip)


def _add(total_ref: Any, factor_refs: Any, inner: Array, outer: Array) -> None:
    """Adds `(factor inner^T) outer` to the sum, [r, side]."""
    thin = sum((dot(ref[...], inner, (1, 1)) for ref in factor_refs[1:]), dot(factor_refs[0][...], inner, (1, 1)))
    thin_terms = (thin,) if outer.dtype == jnp.float32 else split(thin)

    def piece(start: int, width: int) -> None:
        columns = outer[:, start : start + width]
        products = [dot(term, columns, (1, 0)) for term in thin_terms]
        total_ref[:, start : start + width] += sum(products[1:], products[0])

    for start in range(0, outer.shape[1], 4 * COLUMNS):
        piece(start, min(4 * COLUMNS, outer.shape[1] - start))
