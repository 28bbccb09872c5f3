"""The factored FFN: base products once per token, not once per expert (METHODS 3).

`x W_gate` and `x W_up` do not depend on the expert, and the down projection is linear, so that the experts' hidden
states are combined before it. What is left per expert are the activation and the products with the deltas:

- `side-by-side`: low-rank factors of all experts as one matrix `[in, E r]`, with the coefficients of experts that were
  not chosen set to zero. No token is permuted or exchanged: the way over a mesh, and for few small experts.
- `grouped`: rows sorted by expert meet their own delta only.
- `entrywise`: the same, with sparse deltas applied entry by entry.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.functional.deltas import DeltaForm, LowRankForm, SparseForm
from moe_jax.functional.dispatch import combine, dispatch, row_biases, sort_by_expert, weighted_sum
from moe_jax.functional.ffn import hidden
from moe_jax.functional.grouped import grouped_matmul
from moe_jax.functional.linear import linear
from moe_jax.functional.routing import Routing
from moe_jax.functional.sparse_product import grouped_sparse_matmul
from moe_jax.functional.synthesis import synthesised_matmul


class Deltas(NamedTuple):
    """The deltas of one matrix: arrays stacked over the experts, and what they mean."""

    trained: dict[str, Array]
    fixed: dict[str, Array]
    form: DeltaForm


def factored_ffn(
    x: Float[Array, "T d"],
    routing: Routing,
    bases: Mapping[str, Callable[[Array], Array] | None],
    deltas: Mapping[str, Deltas],
    biases: Mapping[str, Float[Array, "E o"]],
    activation: str,
    how: str,
) -> Float[Array, "T d"]:
    """Sum over the chosen experts of weight times expert output.

    Args:
      x: tokens.
      routing: chosen experts and weights.
      bases: products with the base of `up`, `down`, and `gate` if gated; None each where the deltas are all there is.
      deltas: by the same names.
      biases: any of them by the same names.
      activation: of the FFN.
      how: `side-by-side`, `grouped` or `entrywise`.
    """
    biases = {name: bias.astype(x.dtype) for name, bias in biases.items()}
    if how == "side-by-side":
        return _side_by_side(x, routing, bases, deltas, biases, activation)
    top_k = routing.experts.shape[1]
    num_experts = jax.tree.leaves(deltas["up"].trained)[0].shape[0]
    order = sort_by_expert(routing.experts, num_experts)
    rows = dispatch(x, order, top_k)

    def delta_product(rows: Array, name: str) -> Array:
        y = _delta_matmul(rows, deltas[name], order.group_sizes, how == "entrywise")
        return y + row_biases(biases[name], order.group_sizes, rows.shape[0]) if name in biases else y

    def into_hidden(name: str) -> Float[Array, "M f"]:
        own, base = delta_product(rows, name), bases[name]
        return own if base is None else dispatch(base(x), order, top_k) + own

    gate = into_hidden("gate") if "gate" in bases else None
    h = hidden(into_hidden("up"), gate, activation)
    y = combine(delta_product(h, "down"), order, routing.weights)
    return y if bases["down"] is None else bases["down"](combine(h, order, routing.weights)) + y


def _delta_matmul(
    rows: Float[Array, "M i"], delta: Deltas, group_sizes: Int[Array, " E"], entrywise: bool
) -> Float[Array, "M o"]:
    if isinstance(delta.form, LowRankForm):
        a, b = delta.trained["a"].astype(rows.dtype), delta.trained["b"].astype(rows.dtype)
        return grouped_matmul(grouped_matmul(rows, a, group_sizes), b, group_sizes)
    if entrywise:
        assert isinstance(delta.form, SparseForm)
        values = jax.vmap(delta.form.values)(delta.trained | delta.fixed)
        places = {name: array for name, array in delta.fixed.items() if name != "value_codes"}
        return grouped_sparse_matmul(rows, values, places, group_sizes, delta.form)
    return synthesised_matmul(rows, None, delta.trained, delta.fixed, group_sizes, delta.form)


def _side_by_side(
    x: Float[Array, "T d"],
    routing: Routing,
    bases: Mapping[str, Callable[[Array], Array] | None],
    deltas: Mapping[str, Deltas],
    biases: Mapping[str, Array],
    activation: str,
) -> Float[Array, "T d"]:
    tokens, top_k = routing.experts.shape
    num_experts, _, rank = deltas["up"].trained["a"].shape
    chosen = jax.nn.one_hot(routing.experts, num_experts, dtype=x.dtype)
    weighted = chosen * routing.weights.astype(x.dtype)[:, :, None]

    def factors(name: str) -> tuple[Float[Array, "i e"], Float[Array, "e o"]]:
        """`a` of all experts as columns of one matrix, `b` as rows of one; e = E r."""
        a, b = deltas[name].trained["a"].astype(x.dtype), deltas[name].trained["b"].astype(x.dtype)
        return jnp.swapaxes(a, 0, 1).reshape(a.shape[1], -1), b.reshape(-1, b.shape[2])

    def masked(coefficients: Float[Array, "M e"], mask: Float[Array, "T k E"]) -> Float[Array, "T k e"]:
        """Zeroes the coefficients of experts that `mask` leaves out; M is T, or T k."""
        coefficients = coefficients.reshape(tokens, -1, num_experts, rank)
        return (coefficients * mask[..., None]).reshape(tokens, top_k, -1)

    def into_hidden(name: str) -> Float[Array, "T k f"]:
        a, b = factors(name)
        y = linear(masked(linear(x, a), chosen), b)
        base = bases[name]
        if base is not None:
            y = y + base(x)[:, None, :]
        return y + linear(chosen, biases[name]) if name in biases else y

    gate = into_hidden("gate") if "gate" in bases else None
    h = hidden(into_hidden("up"), gate, activation)
    a, b = factors("down")
    y = linear(jnp.sum(masked(linear(h.reshape(tokens * top_k, -1), a), weighted), axis=1), b)
    if bases["down"] is not None:
        y = bases["down"](weighted_sum(h, routing.weights)) + y
    return y + linear(jnp.sum(weighted, axis=1), biases["down"]) if "down" in biases else y
