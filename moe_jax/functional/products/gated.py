"""The hidden states of gated experts, `act(rows W_gate) * (rows W_up)`, as one operation.

A TPU's kernel keeps both products in fast memory and writes only what is made of them: a third of what is otherwise
written and a fifth of what is moved. Elsewhere, and where gradients are needed, which take the two products, they are
computed one after the other.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from moe_jax.kernels.by_platform import Bound, by_platform
from moe_jax.kernels.tpu.tiles.fused_tile import FusedTile

BASE = "base"
"""Name of the array that all groups share, among the arrays of a kernel."""
GATE, UP = "gate", "up"

Stacked = Mapping[str, Mapping[str, Array]]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def gated_product(
    rows: Float[Array, "M i"],
    trained: Stacked,
    fixed: Stacked,
    group_sizes: Int[Array, " E"],
    unfused: Bound,
    tiles: tuple[FusedTile, FusedTile],
    shape: tuple[int, int],
    activation: str,
) -> Float[Array, "M o"]:
    """Returns `act(rows[m] @ gate) * (rows[m] @ up)`, with the kernels of the group of row m.

    Args:
      rows: sorted by group.
      trained: for `gate` and for `up`, the arrays that have a gradient, by name, stacked over the groups; and `BASE`
        [i, o].
      fixed: the same for the arrays without a gradient.
      group_sizes: rows per group, int32. Rows beyond their sum give zeros.
      unfused: computes the same from the first four arguments, product by product; differentiable.
      tiles: of `gate` and of `up`; make their kernels inside a TPU kernel.
      shape: [i, o] of the kernels.
      activation: a key of `kernels.activations.ACTIVATION_FUNCTIONS`.
    """
    out = jax.ShapeDtypeStruct((rows.shape[0], shape[1]), rows.dtype)
    fused = Bound(_fused, tiles=tiles, shape=shape, activation=activation)
    return _choose(unfused, rows.dtype, out, tpu=fused)(rows, trained, fixed, group_sizes)


def _forward(rows: Array, trained: Stacked, fixed: Stacked, group_sizes: Array, unfused: Bound, *_: Any) -> tuple:
    return jax.vjp(lambda rows, trained: unfused(rows, trained, fixed, group_sizes), rows, trained)


def _backward(unfused: Bound, tiles: Any, shape: Any, activation: Any, vjp: Any, dout: Array) -> tuple:
    return *vjp(dout), None, None


gated_product.defvjp(_forward, _backward)

_choose = by_platform


def _fused(
    rows: Array, trained: Stacked, fixed: Stacked, group_sizes: Array, *, tiles: Any, shape: Any, **options: Any
) -> Array:
    from moe_jax.kernels.tpu.grouped_product import Kernels
    from moe_jax.kernels.tpu.grouped_product import gated_product as kernel

    def kernels(name: str, tile: FusedTile) -> Kernels:
        arrays = {**trained[name], **fixed[name]}
        return Kernels(arrays.pop(BASE, None), arrays, tile)

    gate, up = map(kernels, (GATE, UP), tiles)
    return kernel(rows, gate, up, group_sizes, shape, **options)
