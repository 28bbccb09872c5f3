"""Grouped matrix product: consecutive groups of rows, each with its own kernel. One function, a backend per platform.

- CPU: `blocked`, tiles of rows in a loop of dynamic length. XLA:CPU lowers `ragged_dot` to E times the arithmetic.
- TPU: the kernels of `kernels.tpu`. XLA lowers only the forward direction of `ragged_dot` to a grouped kernel. For the
  gradient of the rows it first writes a transposed copy of all kernels to memory, and for the gradient of the kernels
  it multiplies all rows with those of every group, E times the arithmetic. The tiles of its kernel, 128 x 256, read the
  rows of a Mixtral layer 56 times; the tiles of JAX's own `megablox` must fit into 16 MiB. Ours take what the chip has.
  Where the compiler divides arrays between devices it is `ragged_dot` nevertheless: a kernel cannot be divided.
- NVIDIA GPUs: kernels in Mosaic GPU or Triton (`kernels.gpu.grouped`).

The backend is chosen when the program is lowered. So a step that is compiled for a TPU slice or a GPU on a machine
without one gets that platform's backend. All backends share one rule of differentiation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from moe_jax.functional.group_loops import (
    Groups,
    longest_tile,
    looped_product,
    of_this_turn,
    over_columns,
    over_numbers,
    over_tiles,
    tile_width,
)
from moe_jax.kernels.by_platform import PRODUCT, Bound, deferred, one_device
from moe_jax.kernels.hardware import Core, compute_capability, current_core
from moe_jax.kernels.plain import ragged_outer, ragged_product, zero_rows_beyond


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    lhs: Float[Array, "M i"], rhs: Float[Array, "E i o"], group_sizes: Int[Array, " E"], backend: str = "auto"
) -> Float[Array, "M o"]:
    """Returns `out[m] = lhs[m] @ rhs[group of row m]`.

    Args:
      lhs: rows sorted by group.
      rhs: one kernel per group, of the dtype of `lhs` or a narrower one, and then cast to it.
      group_sizes: rows per group, int32. Rows beyond their sum give zeros.
      backend: `auto`, or a key of `BACKENDS`.
    """
    return _choose("product", backend)(lhs, rhs, group_sizes)


def _forward(lhs: Array, rhs: Array, group_sizes: Array, backend: str) -> tuple[Array, tuple[Array, Array, Array]]:
    return checkpoint_name(grouped_matmul(lhs, rhs, group_sizes, backend), PRODUCT), (lhs, rhs, group_sizes)


def _backward(backend: str, residuals: tuple[Array, Array, Array], dout: Array) -> tuple[Array, Array, None]:
    lhs, rhs, group_sizes = residuals
    dlhs = _choose("transposed", backend)(dout, rhs, group_sizes)
    drhs = _choose("outer", backend)(lhs, dout, group_sizes)
    return dlhs, drhs.astype(rhs.dtype), None


grouped_matmul.defvjp(_forward, _backward)


# ---- blocked (CPU) ----------------------------------------------------------------------------------------------


def _blocked_product(lhs: Array, rhs: Array, group_sizes: Array, *, contract_out: bool = False) -> Array:
    def kernel_of(e: Array) -> Callable[[Array, int], Array]:
        def tile(start: Array, columns: int) -> Array:
            kernels, (at, first) = of_this_turn(rhs, (e, start))
            zero, size = jnp.zeros((), jnp.int32), list(rhs.shape)
            size[0], size[1 if contract_out else 2] = 1, columns
            tile = lax.dynamic_slice(kernels, (at, first, zero) if contract_out else (at, zero, first), size)[0]
            return tile.astype(lhs.dtype)

        return tile

    width = rhs.shape[1 if contract_out else 2]
    return looped_product(lhs, Groups.of(group_sizes), width, kernel_of, contract_out=contract_out)


def _blocked_outer(lhs: Array, dout: Array, group_sizes: Array) -> Array:
    rows, slack = lhs.shape[0], longest_tile(lhs.shape[0])
    starts = jnp.cumsum(group_sizes) - group_sizes
    lhs, dout = (jnp.pad(a, ((0, slack), (0, 0))) for a in (lhs, dout))

    def column_tile(e: Array, start: Array, width: int, grads: Array) -> Array:
        def add(tile: int, offset: Array, total: Array) -> Array:
            left = lax.dynamic_slice_in_dim(lhs, starts[e] + offset, tile, 0)
            right = lax.dynamic_slice(dout, (starts[e] + offset, start), (tile, width))
            # Both: zero times what is not finite, as padding may be, is not zero.
            left, right = (zero_rows_beyond(rows, group_sizes[e] - offset) for rows in (left, right))
            product = lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            return total + product

        total = over_tiles(group_sizes[e], rows, add, jnp.zeros((lhs.shape[1], width), jnp.float32))
        zero = jnp.zeros((), jnp.int32)
        return lax.dynamic_update_slice(grads, total.astype(grads.dtype)[None], (e, zero, start))

    def group(e: Array, grads: Array) -> Array:
        columns = tile_width((lhs.shape[1], dout.shape[1]), rows)
        return over_columns(columns, dout.shape[1], partial(column_tile, e), grads)

    grads = jnp.zeros((group_sizes.shape[0], lhs.shape[1], dout.shape[1]), lhs.dtype)
    return over_numbers(group_sizes.shape[0], group, grads)


# ---- kernels ----------------------------------------------------------------------------------------------------


def _out(operation: str, lhs: Array, rhs: Array, group_sizes: Array) -> jax.ShapeDtypeStruct:
    if operation == "outer":
        return jax.ShapeDtypeStruct((group_sizes.shape[0], lhs.shape[1], rhs.shape[1]), lhs.dtype)
    return jax.ShapeDtypeStruct((lhs.shape[0], rhs.shape[2 if operation == "product" else 1]), lhs.dtype)


def _on_gpu(operation: str, *arrays: Array) -> Array:
    options = {"operation": operation, "capability": compute_capability()}
    divided = Bound(_traced_gpu, one_device=False, **options)
    return deferred(
        _traced_gpu, *arrays, out=_out(operation, *arrays), divided=divided, one_device=one_device(), **options
    )


def _traced_gpu(*arrays: Array, operation: str, **options: Any) -> Array:
    from moe_jax.kernels.gpu import grouped as gpu_grouped

    if operation == "outer":
        return gpu_grouped.grouped_outer(*arrays, **options)
    return gpu_grouped.grouped_product(*arrays, transposed=operation == "transposed", **options)


def _on_tpu(operation: str, *arrays: Array) -> Array:
    options: Any = {"operation": operation, "core": current_core()}
    divided = BACKENDS["ragged_dot"][operation]
    return deferred(_traced_tpu, *arrays, out=_out(operation, *arrays), divided=divided, **options)


def _traced_tpu(lhs: Array, rhs: Array, group_sizes: Array, *, operation: str, core: Core) -> Array:
    from moe_jax.kernels.tpu.grouped_product import Kernels, grouped_product
    from moe_jax.kernels.tpu.kernel_gradients import grouped_outer
    from moe_jax.kernels.tpu.tiles import StoredTile

    if operation == "outer":
        return grouped_outer(lhs, rhs, group_sizes, lhs.dtype, core=core)
    kernels, shape = Kernels(None, {"kernel": rhs}, StoredTile()), (rhs.shape[1], rhs.shape[2])
    return grouped_product(lhs, kernels, group_sizes, shape, transposed=operation == "transposed", core=core)


# ---- the seam ---------------------------------------------------------------------------------------------------

# `product` and `transposed` take rows and kernels, `outer` takes rows and rows.
OPERATIONS = ("product", "transposed", "outer")
BACKENDS: dict[str, dict[str, Callable[..., Array]]] = {
    "blocked": {
        "product": _blocked_product,
        "transposed": partial(_blocked_product, contract_out=True),
        "outer": _blocked_outer,
    },
    "gpu": {operation: partial(_on_gpu, operation) for operation in OPERATIONS},
    "tpu": {operation: partial(_on_tpu, operation) for operation in OPERATIONS},
    "ragged_dot": {
        "product": ragged_product,
        "transposed": lambda dout, rhs, group_sizes: ragged_product(dout, jnp.swapaxes(rhs, 1, 2), group_sizes),
        "outer": ragged_outer,
    },
}


def _choose(operation: str, backend: str) -> Callable[..., Array]:
    if backend != "auto":
        return _backend(backend, operation)
    choose: Any = partial(
        lax.platform_dependent,
        cpu=_backend("blocked", operation),
        cuda=_backend("gpu", operation),
        tpu=_backend("tpu" if one_device() else "ragged_dot", operation),
        default=_backend("ragged_dot", operation),
    )
    # `ragged_dot` and most kernels cannot be batched; under `jax.vmap` one product comes after the other.
    return sequential_vmap(choose)


def _backend(name: str, operation: str) -> Callable[..., Array]:
    """Returns a function of `BACKENDS`; all but `blocked`, which casts its tiles, are given kernels that are cast."""
    function = BACKENDS[name][operation]
    if name == "blocked":
        return function
    return lambda lhs, rhs, group_sizes: function(lhs, rhs.astype(lhs.dtype), group_sizes)
