"""Grouped product with kernels that exist only while they are multiplied: `lhs[m] @ (base + delta of the group of m)`.

One expert after another, and of an expert one tile of columns after another, is made from the base and the delta in
its stored form, multiplied with the rows of its group, and forgotten; the gradient makes it once more. What is held at
a time is one tile, never an [E, i, o] array (METHODS 3). Plain XLA on every platform.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe_jax.functional.deltas import DeltaForm
from moe_jax.functional.grouped import (
    PRODUCT,
    longest_tile,
    over_columns,
    over_tiles,
    tile_width,
    when,
    zero_rows_beyond,
)

Stacked = dict[str, Array]


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def synthesised_matmul(
    lhs: Float[Array, "M i"],
    base: Float[Array, "i o"] | None,
    trained: Stacked,
    fixed: Stacked,
    group_sizes: Int[Array, " E"],
    form: DeltaForm,
) -> Float[Array, "M o"]:
    """`out[m] = lhs[m] @ (base + delta[group of row m])`.

    Kernels are added up in float32 and rounded to the dtype of `lhs` for the product.

    Args:
      lhs: rows sorted by group.
      base: shared by all groups; None: zero.
      trained: floating-point arrays of the deltas by name, stacked over the groups.
      fixed: arrays of the deltas without a gradient by name, integer or frozen ones, stacked over the groups.
      group_sizes: rows per group, int32. Rows beyond their sum give zeros.
      form: what the arrays mean.
    """
    rows, slack = lhs.shape[0], longest_tile(lhs.shape[0])
    starts, columns = jnp.cumsum(group_sizes) - group_sizes, tile_width(form.shape, rows)
    padded = jnp.pad(lhs, ((0, slack), (0, 0)))

    def multiply(e: Array, start: Array, kernel: Array, out: Array) -> Array:
        def rows_of_group(tile: int, offset: Array, out: Array) -> Array:
            block = lax.dynamic_slice_in_dim(padded, starts[e] + offset, tile, 0)
            # Rows beyond the group are overwritten by the groups they belong to, which come later.
            return lax.dynamic_update_slice(out, block @ kernel, (starts[e] + offset, start))

        return over_tiles(group_sizes[e], rows, rows_of_group, out)

    def group(e: Array, out: Array) -> Array:
        leaves = _expert(trained, e) | _expert(fixed, e)

        def column_tile(start: Array, width: int, out: Array) -> Array:
            return multiply(e, start, _kernel(base, leaves, form, start, width, lhs.dtype), out)

        return when(group_sizes[e] > 0, partial(over_columns, columns, form.shape[1], column_tile), out)

    out = lax.fori_loop(0, group_sizes.shape[0], group, jnp.zeros((rows + slack, form.shape[1]), lhs.dtype))
    return zero_rows_beyond(out[:rows], jnp.sum(group_sizes))


def _forward(lhs: Array, base: Any, trained: Stacked, fixed: Stacked, group_sizes: Array, form: DeltaForm) -> tuple:
    arguments = lhs, base, trained, fixed, group_sizes
    return checkpoint_name(synthesised_matmul(*arguments, form), PRODUCT), arguments


def _backward(form: DeltaForm, residuals: tuple, dout: Array) -> tuple:
    lhs, base, trained, fixed, group_sizes = residuals
    rows, slack = lhs.shape[0], longest_tile(lhs.shape[0])
    starts, columns = jnp.cumsum(group_sizes) - group_sizes, tile_width(form.shape, rows)
    lhs_padded, dout_padded = (jnp.pad(a, ((0, slack), (0, 0))) for a in (lhs, dout))

    def group(e: Array, sums: tuple) -> tuple:
        # In float32, so that their gradients are: a tile is float32 whatever it is made from.
        mine, others = jax.tree.map(_float32, _expert(trained, e)), _expert(fixed, e)

        def column_tile(start: Array, width: int, sums: tuple) -> tuple:
            dlhs, dbase, dtrained = sums
            tile, tile_vjp = jax.vjp(lambda leaves: form.tile(leaves | others, start, width), mine)
            kernel = _plus_base(base, tile, start, lhs.dtype)

            def rows_of_group(count: int, offset: Array, sums: tuple) -> tuple:
                dlhs, dkernel = sums
                at = starts[e] + offset
                left = lax.dynamic_slice_in_dim(lhs_padded, at, count, 0)
                right = lax.dynamic_slice(dout_padded, (at, start), (count, width))
                right = zero_rows_beyond(right, group_sizes[e] - offset)
                before = lax.dynamic_slice_in_dim(dlhs, at, count, 0)
                product = lax.dot_general(right, kernel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
                dlhs = lax.dynamic_update_slice_in_dim(dlhs, before + product, at, 0)
                if base is None and not trained:
                    return dlhs, dkernel
                outer = lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
                return dlhs, dkernel + outer

            zeros = jnp.zeros((form.shape[0], width), jnp.float32)
            dlhs, dkernel = over_tiles(group_sizes[e], rows, rows_of_group, (dlhs, zeros))
            (dmine,) = tile_vjp(dkernel)
            dtrained = jax.tree.map(lambda total, new: total.at[e].add(new), dtrained, dmine)
            if dbase is not None:
                columns = lax.dynamic_slice_in_dim(dbase, start, width, 1) + dkernel
                dbase = lax.dynamic_update_slice_in_dim(dbase, columns, start, 1)
            return dlhs, dbase, dtrained

        return when(group_sizes[e] > 0, partial(over_columns, columns, form.shape[1], column_tile), sums)

    dbase = None if base is None else jnp.zeros(form.shape, jnp.float32)
    # Sums over tiles of columns and of rows: float32 whatever the dtype of the rows and of the parameters.
    zeros = jnp.zeros(lhs_padded.shape, jnp.float32), dbase, jax.tree.map(_float32_zeros, trained)
    dlhs, dbase, dtrained = lax.fori_loop(0, group_sizes.shape[0], group, zeros)
    dtrained = jax.tree.map(lambda total, array: total.astype(array.dtype), dtrained, trained)
    return dlhs[:rows].astype(lhs.dtype), None if base is None else dbase.astype(base.dtype), dtrained, None, None


synthesised_matmul.defvjp(_forward, _backward)


def _kernel(base: Array | None, leaves: Stacked, form: DeltaForm, start: Any, width: int, dtype: jnp.dtype) -> Array:
    return _plus_base(base, form.tile(leaves, start, width), start, dtype)


def _plus_base(base: Array | None, tile: Float[Array, "i w"], start: Array, dtype: jnp.dtype) -> Array:
    if base is not None:
        tile = lax.dynamic_slice_in_dim(base, start, tile.shape[1], 1).astype(jnp.float32) + tile
    return tile.astype(dtype)


def _float32(array: Array) -> Array:
    return array.astype(jnp.float32)


def _float32_zeros(array: Array) -> Array:
    return jnp.zeros(array.shape, jnp.float32)


def _expert(stacked: Stacked, e: Array) -> Stacked:
    return {name: lax.dynamic_index_in_dim(array, e, 0, keepdims=False) for name, array in stacked.items()}
