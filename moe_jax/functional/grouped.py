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

from moe_jax.kernels.by_platform import PRODUCT, Bound, deferred, one_device
from moe_jax.kernels.hardware import Core, compute_capability, current_core
from moe_jax.kernels.plain import ragged_outer, ragged_product, zero_rows_beyond

# Rows of a tile on CPU: long tiles make fast matrix products, short ones at the end of a group waste little.
TILES = (256, 64)
# By the most rows of all groups together. Of one token, groups have a single row; up to four take hardly longer than
# one, and up to 16 hardly longer than eight (measured).
TILES_OF_FEW = {2: 1, 16: 4, 64: 16}
# Most entries of a tile of a kernel. With many rows a tile is used often and may be large; with few rows it should stay
# in the cache (measured on kernels of 4096 x 11008 and 11008 x 4096: 100 to 300 columns are fastest, and a whole kernel
# takes three times as long).
TILE_ENTRIES = 1 << 22
FEW_ROWS, TILE_ENTRIES_FOR_FEW = 64, 3 << 19


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


def over_tiles(size: Array, rows: int, body: Callable[[int, Array, Any], Any], carry: Any) -> Any:
    """Folds `body(tile, offset, carry)` over tiles of a group of rows: long tiles while they fit, then short ones.

    Args:
      size: rows of the group. The last tile may reach beyond them.
      rows: of all groups together, at most.
      body: called with the number of rows of a tile and its first row in the group.
      carry: initial value.
    """
    longest = longest_tile(rows)
    if rows <= max(TILES_OF_FEW):
        # Of one size: what XLA moves in front of a loop over them, it would move in front of each of two.
        return lax.fori_loop(
            0, (size + longest - 1) // longest, lambda t, carry: body(longest, t * longest, carry), carry
        )
    long, short = (min(tile, longest) for tile in TILES)
    full = size // long
    carry = lax.fori_loop(0, full, lambda t, carry: body(long, t * long, carry), carry)
    remainder = size - full * long
    return lax.fori_loop(
        0, (remainder + short - 1) // short, lambda t, carry: body(short, full * long + t * short, carry), carry
    )


def over_columns(tile: int, columns: int, body: Callable[[Array, int, Any], Any], carry: Any) -> Any:
    """Folds `body(start, width, carry)` over tiles of columns; the last is narrower where `tile` does not divide."""
    full, remainder = divmod(columns, tile)
    if full == 1:
        carry = body(jnp.zeros((), jnp.int32), tile, carry)
    else:
        carry = lax.fori_loop(0, full, lambda t, carry: body(t * tile, tile, carry), carry)
    return body(jnp.full((), full * tile, jnp.int32), remainder, carry) if remainder else carry


def tile_width(shape: tuple[int, int], rows: int) -> int:
    """Returns the number of columns of a tile of a kernel [i, o] that meets `rows` rows: at least one.

    A divisor of o is preferred where one is nearly as wide: all tiles then run the same program.
    """
    limit = TILE_ENTRIES_FOR_FEW if rows <= FEW_ROWS else TILE_ENTRIES
    widest = min(shape[1], max(1, limit // shape[0]))
    divisor = max(width for width in range(1, widest + 1) if shape[1] % width == 0)
    if 4 * divisor >= 3 * widest:
        return divisor
    return widest - widest % 16 if widest > 16 else widest


def when(condition: Array, body: Callable[[Any], Any], carry: Any) -> Any:
    """Returns `body(carry)` if the condition holds, else `carry`; as a loop, so that XLA updates in place."""
    return lax.fori_loop(0, condition.astype(jnp.int32), lambda _, carry: body(carry), carry)


def over_groups_with_rows(group_sizes: Int[Array, " E"], body: Callable[[Array, Any], Any], carry: Any) -> Any:
    """Folds `body(group, carry)` over the groups that have rows, in their order.

    The others are left out of the loop: inside of it, behind a condition, XLA would make their kernels all the same,
    since these do not depend on the loop that stands for the condition, and would be moved in front of it.
    """
    has_rows = group_sizes > 0
    (with_rows,) = jnp.nonzero(has_rows, size=group_sizes.shape[0], fill_value=0)
    count = jnp.sum(has_rows, dtype=jnp.int32)
    return lax.fori_loop(0, count, lambda n, carry: body(with_rows[n].astype(jnp.int32), carry), carry)


def of_this_turn(arrays: Any, turn: Any) -> tuple[Any, Any]:
    """Returns arrays, and the numbers of a turn of loops, so that XLA converts nothing of the arrays outside of these.

    XLA:CPU has no operations on bfloat16, not even one that takes a slice: it converts the whole array, and because
    that is the same in every turn, it does so in front of all loops, and keeps the copy in float32: of the experts of
    all layers, while tokens are generated. Behind the barrier the array is another one in every turn, as far as the
    compiler knows; the conversion then becomes part of the slice.
    """
    return lax.optimization_barrier((arrays, turn))


def longest_tile(rows: int) -> int:
    """Returns the rows of the longest tile of `over_tiles`: padding by this many keeps every tile inside the array."""
    few = next((tile for most, tile in TILES_OF_FEW.items() if rows <= most), None)
    return min(max(TILES), max(8, 1 << (rows - 1).bit_length())) if few is None else few


def looped_product(
    lhs: Float[Array, "M k"],
    group_sizes: Int[Array, " E"],
    width: int,
    kernel_of: Callable[[Array], Callable[[Array, int], Array]],
    *,
    contract_out: bool = False,
) -> Float[Array, "M n"]:
    """Returns the product of rows sorted by group with their kernels, of which one tile of columns exists at a time.

    Args:
      lhs: rows.
      group_sizes: rows per group. Rows beyond their sum give zeros.
      width: n.
      kernel_of: given a group, returns a function of the first column of a tile and its width to the tile.
      contract_out: tiles are rows [w, k] of the kernels, which are multiplied transposed.
    """
    rows, slack = lhs.shape[0], longest_tile(lhs.shape[0])
    starts, columns = jnp.cumsum(group_sizes) - group_sizes, tile_width((lhs.shape[1], width), rows)
    padded = jnp.pad(lhs, ((0, slack), (0, 0)))
    contract = (((1,), (1 if contract_out else 0,)), ((), ()))

    def group(e: Array, out: Array) -> Array:
        tile_of = kernel_of(e)

        def column_tile(start: Array, columns: int, out: Array) -> Array:
            kernel = tile_of(start, columns)

            def multiply(tile: int, offset: Array, out: Array) -> Array:
                block = lax.dynamic_slice_in_dim(padded, starts[e] + offset, tile, 0)
                # Rows beyond the group are overwritten by the groups that they belong to, which come later.
                return lax.dynamic_update_slice(
                    out, lax.dot_general(block, kernel, contract), (starts[e] + offset, start)
                )

            return over_tiles(group_sizes[e], rows, multiply, out)

        return over_columns(columns, width, column_tile, out)

    out = over_groups_with_rows(group_sizes, group, jnp.zeros((rows + slack, width), lhs.dtype))
    return zero_rows_beyond(out[:rows], jnp.sum(group_sizes))


def group_by_group(
    lhs: Float[Array, "M k"],
    group_sizes: Int[Array, " E"],
    width: int,
    product_of: Callable[[Int[Array, ""]], Callable[[Float[Array, "m k"]], Float[Array, "m n"]]],
) -> Float[Array, "M n"]:
    """Does what `looped_product` does with a product of one's own of the rows of a group, a tile of rows at a time.

    Args:
      lhs, group_sizes, width: see there.
      product_of: given a group, returns what multiplies rows with its kernel.
    """
    rows, slack = lhs.shape[0], longest_tile(lhs.shape[0])
    starts = jnp.cumsum(group_sizes) - group_sizes
    padded = jnp.pad(lhs, ((0, slack), (0, 0)))

    def group(e: Array, out: Array) -> Array:
        product = product_of(e)

        def multiply(tile: int, offset: Array, out: Array) -> Array:
            # Rows beyond the group are overwritten by the groups that they belong to, which come later.
            at = starts[e] + offset
            own = product(lax.dynamic_slice_in_dim(padded, at, tile, 0)).astype(out.dtype)
            return lax.dynamic_update_slice_in_dim(out, own, at, 0)

        return over_tiles(group_sizes[e], rows, multiply, out)

    out = over_groups_with_rows(group_sizes, group, jnp.zeros((rows + slack, width), lhs.dtype))
    return zero_rows_beyond(out[:rows], jnp.sum(group_sizes))


def row_by_row(
    lhs: Float[Array, "M k"],
    group_sizes: Int[Array, " E"],
    width: int,
    product: Callable[[Float[Array, "m k"], Int[Array, ""]], Float[Array, "m n"]],
) -> Float[Array, "M n"]:
    """Does what `looped_product` does without making kernels, for few rows: each is multiplied by itself; float32.

    Where there is a single group, all rows are multiplied together.

    Args:
      lhs, group_sizes, width: see there. Rows beyond their sum give anything.
      product: of rows with the kernel of a group.
    """
    if group_sizes.shape[0] == 1:  # a loop would take longer than what is in it
        return product(lhs, jnp.zeros((), jnp.int32))
    ends = jnp.cumsum(group_sizes)
    groups = jnp.searchsorted(ends, jnp.arange(lhs.shape[0], dtype=ends.dtype), side="right", method="compare_all")

    def multiply(row: Array, out: Array) -> Array:
        own = product(lax.dynamic_slice_in_dim(lhs, row, 1, 0), groups[row].astype(jnp.int32))
        return lax.dynamic_update_slice_in_dim(out, own, row, 0)

    rows = jnp.minimum(ends[-1], lhs.shape[0]).astype(jnp.int32)
    return lax.fori_loop(jnp.zeros((), jnp.int32), rows, multiply, jnp.zeros((lhs.shape[0], width), jnp.float32))


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
    return looped_product(lhs, group_sizes, width, kernel_of, contract_out=contract_out)


def _blocked_outer(lhs: Array, dout: Array, group_sizes: Array) -> Array:
    rows, slack = lhs.shape[0], longest_tile(lhs.shape[0])
    starts = jnp.cumsum(group_sizes) - group_sizes
    lhs, dout = (jnp.pad(a, ((0, slack), (0, 0))) for a in (lhs, dout))

    def column_tile(e: Array, start: Array, width: int, grads: Array) -> Array:
        def add(tile: int, offset: Array, total: Array) -> Array:
            left = lax.dynamic_slice_in_dim(lhs, starts[e] + offset, tile, 0)
            right = lax.dynamic_slice(dout, (starts[e] + offset, start), (tile, width))
            right = zero_rows_beyond(right, group_sizes[e] - offset)
            product = lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            return total + product

        total = over_tiles(group_sizes[e], rows, add, jnp.zeros((lhs.shape[1], width), jnp.float32))
        zero = jnp.zeros((), jnp.int32)
        return lax.dynamic_update_slice(grads, total.astype(grads.dtype)[None], (e, zero, start))

    def group(e: Array, grads: Array) -> Array:
        columns = tile_width((lhs.shape[1], dout.shape[1]), rows)
        return over_columns(columns, dout.shape[1], partial(column_tile, e), grads)

    grads = jnp.zeros((group_sizes.shape[0], lhs.shape[1], dout.shape[1]), lhs.dtype)
    return lax.fori_loop(0, group_sizes.shape[0], group, grads)


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
