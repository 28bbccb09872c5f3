"""Dispatch and combine: from tokens to rows sorted by expert, and back.

An *assignment* is one of the k choices of one token; there are M = T * k of them, numbered token by token. Sorting them
is a permutation, so dispatch and combine are gathers, and so are their gradients. Autodiff would turn the gradient of a
gather into a scatter, which is serial on CPU and slow on accelerators.
"""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.functional.dense import take_rows
from moe_jax.kernels.by_platform import Bound, by_platform
from moe_jax.kernels.hardware import LANES, Core, round_up

MOST_PARTS, MOST_GATHERS = 8, 32
"""Most parts that a sum over choices is divided into, and most gathers: each takes the compiler some time."""


class Order(NamedTuple):
    """Assignments sorted by expert.

    Attributes:
      sorted_to_flat: number of the assignment (token * k + choice) in every sorted row.
      flat_to_sorted: the inverse permutation: the row of every assignment.
      group_sizes: number of assignments per expert. The rows of expert 0 come first, then those of expert 1, and so on;
        the rows of no expert come last.
    """

    sorted_to_flat: Int[Array, " M"]
    flat_to_sorted: Int[Array, " M"]
    group_sizes: Int[Array, " E"]


def sort_by_expert(experts: Int[Array, "T k"], num_experts: int) -> Order:
    """Sorts assignments by expert, stably.

    Args:
      experts: of every assignment. Those outside [0, num_experts) are in no group: `routing.NO_EXPERT`, or over a mesh
        the experts of other devices.
      num_experts: E.
    """
    flat = experts.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    sorted_to_flat = jnp.argsort(flat, stable=True).astype(jnp.int32)
    rows = jnp.arange(flat.size, dtype=jnp.int32)
    flat_to_sorted = jnp.zeros_like(rows).at[sorted_to_flat].set(rows, unique_indices=True)
    group_sizes = jnp.sum(flat[:, None] == jnp.arange(num_experts, dtype=flat.dtype)[None, :], axis=0, dtype=jnp.int32)
    return Order(sorted_to_flat, flat_to_sorted, group_sizes)


def part_of(order: Order, first: Int[Array, ""] | int, rows: int) -> Order:
    """Returns the order of the sorted rows [first, first + rows), for `dispatch` and `combine` of these rows alone.

    For assignments of other rows, `flat_to_sorted` is outside [0, rows): they add nothing to a sum.
    """
    ends = jnp.cumsum(order.group_sizes, dtype=jnp.int32)
    within = [jnp.clip(edges - first, 0, rows) for edges in (ends - order.group_sizes, ends)]
    # Rows beyond the last may be any: they are in no group.
    sorted_to_flat = jnp.take(order.sorted_to_flat, first + jnp.arange(rows, dtype=jnp.int32), mode="clip")
    return Order(sorted_to_flat, order.flat_to_sorted - first, within[1] - within[0])


def _rows(x: Float[Array, "n d"], indices: Int[Array, " m"]) -> Float[Array, "m d"]:
    """Returns the rows with these indices, which must exist: filling with NaN would read and write all again."""
    return jnp.take(x, indices, axis=0, mode="clip")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dispatch(x: Float[Array, "T d"], order: Order, top_k: int) -> Float[Array, "M d"]:
    """Returns the sorted rows: the token of every assignment, for all M of them or for a part (`part_of`)."""
    return _rows(x, order.sorted_to_flat // top_k)


dispatch.defvjp(
    lambda x, order, top_k: (dispatch(x, order, top_k), order),
    lambda top_k, order, dy: (_sum_of_choices(dy, order, None, top_k), None),
)


def _sum(terms: Iterable[Float[Array, "T d"]]) -> Float[Array, "T d"]:
    """Adds the terms one by one: XLA:TPU would write the operand of a sum over several axes to memory in float32."""
    return functools.reduce(jnp.add, terms)


def _per_choice(y: Float[Array, "M d"], order: Order, top_k: int) -> Float[Array, "k T d"]:
    """Returns the rows of the first choices of all tokens, then those of the second, and so on; see `_all_at_once`."""
    rows = order.flat_to_sorted.reshape(-1, top_k).T
    return _rows(y, rows.reshape(-1)).reshape(*rows.shape, y.shape[-1])


def _sum_of_choices(
    y: Float[Array, "M d"], order: Order, weights: Float[Array, "T k"] | None, top_k: int
) -> Float[Array, "T d"]:
    """Returns the sum over the choices of every token, weighted if there are weights, in float32 and rounded once."""
    if not _is_whole(y, order):
        ones = jnp.ones((), jnp.float32) if weights is None else weights
        weights = jnp.where(_have_rows(y, order).reshape(-1, top_k), ones, 0.0)
    out = jax.ShapeDtypeStruct((order.flat_to_sorted.shape[0] // top_k, y.shape[1]), y.dtype)
    ways = (Bound(way, top_k=top_k) for way in (_all_at_once, _in_parts))
    return by_platform(next(ways), y.dtype, out, tpu=next(ways))(y, order.flat_to_sorted, weights)


def _is_whole(y: Float[Array, "m d"], order: Order) -> bool:
    """Whether these are all sorted rows, and not those of a part."""
    return y.shape[0] == order.flat_to_sorted.shape[0]


def _have_rows(y: Float[Array, "m d"], order: Order) -> Bool[Array, " M"]:
    """Whether each assignment has a row in this part."""
    return (order.flat_to_sorted >= 0) & (order.flat_to_sorted < y.shape[0])


def _all_at_once(y: Array, flat_to_sorted: Array, weights: Array | None, *, top_k: int) -> Array:
    # This order needs no copy: if the k rows of a token lay side by side, a TPU would pad them to eight.
    rows = flat_to_sorted.reshape(-1, top_k).T
    per_choice = _rows(y, rows.reshape(-1)).reshape(*rows.shape, y.shape[-1])
    return _sum(_weighted(per_choice[i], weights, i) for i in range(top_k)).astype(y.dtype)


def _in_parts(y: Array, flat_to_sorted: Array, weights: Array | None, *, top_k: int, core: Core) -> Array:
    """Sums tokens part by part, so that the gathered rows stay in the fast memory of a TPU until they are summed."""
    tokens = flat_to_sorted.shape[0] // top_k
    gathered = tokens * top_k * y.shape[1] * y.dtype.itemsize
    # The rows of a part are gathered one choice at a time if there are few choices, and all at once if there are many:
    # so the compiler leaves most of them in fast memory (`benchmarks/hot_path.py`).
    at_once = top_k > 4
    parts = min(math.ceil(8 * gathered / core.vmem), MOST_PARTS if at_once else MOST_GATHERS // top_k)
    if parts <= 1:
        return _all_at_once(y, flat_to_sorted, weights, top_k=top_k)
    # Parts are whole registers: the compiler would write others to memory.
    rows, size, sums = flat_to_sorted.reshape(-1, top_k), round_up(-(-tokens // parts), LANES), []
    for start in range(0, tokens, size):
        own = None if weights is None else weights[start : start + size]
        if at_once:
            sums.append(_all_at_once(y, rows[start : start + size].reshape(-1), own, top_k=top_k))
            continue
        terms = (_weighted(_rows(y, rows[start : start + size, i]), own, i) for i in range(top_k))
        sums.append(_sum(terms).astype(y.dtype))
    return jnp.concatenate(sums)


def _weighted(rows: Float[Array, "n d"], weights: Float[Array, "n k"] | None, choice: int) -> Float[Array, "n d"]:
    rows = rows.astype(jnp.float32)
    return rows if weights is None else rows * weights[:, choice, None]


@jax.custom_vjp
def combine(y: Float[Array, "M d"], order: Order, weights: Float[Array, "T k"]) -> Float[Array, "T d"]:
    """Undoes the sorting and sums over the choices of every token.

    Args:
      y: outputs of the experts, sorted rows.
      order: from `sort_by_expert`, or a part of it.
      weights: of the choices, float32.

    Returns:
      The weighted sums, accumulated in float32 and rounded once to the dtype of `y`.
    """
    return _sum_of_choices(y, order, weights, weights.shape[1])


def _combine_fwd(y: Array, order: Order, weights: Array) -> tuple[Array, tuple[Array, Order, Array]]:
    return combine(y, order, weights), (y, order, weights)


def _combine_bwd(saved: tuple[Array, Order, Array], dz: Array) -> tuple[Array, None, Array]:
    y, order, weights = saved
    top_k = weights.shape[1]
    of_rows = jnp.take(weights.reshape(-1), order.sorted_to_flat, mode="clip")
    dy = _rows(dz, order.sorted_to_flat // top_k).astype(jnp.float32) * of_rows[:, None]
    products = (dz.astype(jnp.float32) * row.astype(jnp.float32) for row in _per_choice(y, order, top_k))
    dw = jnp.stack([jnp.sum(product, axis=1) for product in products], axis=1)
    dw = dw if _is_whole(y, order) else jnp.where(_have_rows(y, order).reshape(dw.shape), dw, 0)
    return dy.astype(y.dtype), None, dw


combine.defvjp(_combine_fwd, _combine_bwd)


@jax.custom_vjp
def weighted_sum(choices: Float[Array, "T k f"], weights: Float[Array, "T k"]) -> Float[Array, "T f"]:
    """Returns the weighted sum over the choices, computed in float32 and rounded once to the dtype of the choices.

    It is computed as `(sum_i w_i) x_0 + sum_i w_i (x_i - x_0)`. Where the choices are equal and the weights sum to 1,
    the result therefore is that choice to the last bit, however a compiler rounds products, and an upcycled model
    starts as its dense model (methods.md 2.5). The gradient is that of the plain sum.
    """
    # Choice by choice: converted as a whole, XLA:TPU would write them to memory in float32.
    first = choices[:, 0].astype(jnp.float32)
    total = jnp.sum(weights, axis=1)[:, None] * first
    for i in range(1, choices.shape[1]):
        total = total + weights[:, i, None] * (choices[:, i].astype(jnp.float32) - first)
    return total.astype(choices.dtype)


def _weighted_sum_fwd(choices: Array, weights: Array) -> tuple[Array, tuple[Array, Array]]:
    return weighted_sum(choices, weights), (choices, weights)


def _weighted_sum_bwd(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    choices, weights = saved
    dy = dy.astype(jnp.float32)[:, None, :]
    return (weights[:, :, None] * dy).astype(choices.dtype), jnp.sum(choices.astype(jnp.float32) * dy, axis=-1)


weighted_sum.defvjp(_weighted_sum_fwd, _weighted_sum_bwd)


def row_biases(biases: Float[Array, "E o"], group_sizes: Int[Array, " E"], rows: int) -> Float[Array, "M o"]:
    """Returns the bias of every sorted row, which is that of its expert; zeros for rows in no group."""
    ends = jnp.cumsum(group_sizes)
    group = jnp.searchsorted(ends, jnp.arange(rows, dtype=ends.dtype), side="right")
    return take_rows(biases, group, fill_value=0.0)
