"""Adapters, `scale * act(x Down) Up`: one for all tokens, or several, which each token weights (methods.md 6, 7).

The cost is that of the two thin products: `Down Up`, which is as large as the kernels beside it, is never computed.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.functional.dense import linear
from moe_jax.functional.grouped import grouped_matmul
from moe_jax.functional.routing.token_choices import Routing
from moe_jax.functional.token_dispatch import combine, dispatch, sort_by_expert
from moe_jax.kernels.plain import ACTIVATION_FUNCTIONS

WAYS = ("side-by-side", "grouped")

# Sorting reads and writes every entry of a row about eight times, four bytes each.
_BYTES_PER_SORTED_ENTRY = 8 * 4


def activate(h: Float[Array, "..."], activation: str) -> Float[Array, "..."]:
    """Applies the activation function of this name: a key of `ACTIVATION_FUNCTIONS`, or `none` for the identity."""
    return h if activation == "none" else ACTIVATION_FUNCTIONS[activation](h)


def adapter(
    x: Float[Array, "... d"], down: Float[Array, "d r"], up: Float[Array, "r o"], activation: str, scale: float
) -> Float[Array, "... o"]:
    """Applies one adapter, or LoRA: returns `scale * act(x Down) Up` in the dtype of `x`."""
    return linear(activate(linear(x, down), activation), up) * jnp.asarray(scale, x.dtype)


def all_adapters(
    x: Float[Array, "T d"], down: Float[Array, "M d r"], up: Float[Array, "M r d"], activation: str, scale: float
) -> Float[Array, "T d"]:
    """Returns the sum of M adapters with weight 1 (PERFT-D, PERFT-S), computed as one adapter of M times the rank."""
    return adapter(x, _side_by_side(down), up.reshape(-1, up.shape[2]), activation, scale)


def cheaper_way(num_adapters: int, rank: int, top_k: int, operations_per_byte: float) -> str:
    """Returns the cheaper one of `WAYS` (see `routed_adapters`), by a count of operations per entry of a token.

    Args:
      num_adapters, rank, top_k: M, r and k.
      operations_per_byte: the operations that a platform does in the time that it takes to move one byte.
    """
    saved = 4 * rank * (num_adapters - top_k)
    return "grouped" if saved > operations_per_byte * _BYTES_PER_SORTED_ENTRY * top_k else "side-by-side"


def routed_adapters(
    x: Float[Array, "T d"],
    routing: Routing,
    down: Float[Array, "M d r"],
    up: Float[Array, "M r d"],
    activation: str,
    scale: float,
    way: str,
) -> Float[Array, "T d"]:
    """Returns `sum_j w_j * scale * act(x Down_j) Up_j` over the adapters that each token chose.

    Args:
      x: tokens.
      routing: chosen adapters and weights.
      down, up: kernels of all adapters.
      activation: a key of `ACTIVATION_FUNCTIONS`, or `none`.
      scale: s.
      way: `side-by-side` applies all adapters to every token, with weight zero for those that the token did not choose;
        `grouped` sorts the tokens by adapter and applies to each token only the adapters that it chose.
    """
    assert way in WAYS, way
    apply = _weighted if way == "side-by-side" else _grouped
    return apply(x, routing, down, up, activation, scale)


def _weighted(x: Array, routing: Routing, down: Array, up: Array, activation: str, scale: float) -> Array:
    num_adapters, _, rank = down.shape
    chosen = jax.nn.one_hot(routing.experts, num_adapters, dtype=jnp.float32)
    weights = jnp.sum(chosen * routing.weights[:, :, None], axis=1)
    h = activate(linear(x, _side_by_side(down)), activation).reshape(-1, num_adapters, rank)
    h = (h.astype(jnp.float32) * (scale * weights)[:, :, None]).astype(x.dtype)
    return linear(h.reshape(-1, num_adapters * rank), up.reshape(-1, up.shape[2]))


def _grouped(x: Array, routing: Routing, down: Array, up: Array, activation: str, scale: float) -> Array:
    order = sort_by_expert(routing.experts, down.shape[0])
    rows = dispatch(x, order, routing.experts.shape[1])
    h = activate(grouped_matmul(rows, down.astype(x.dtype), order.group_sizes), activation)
    return combine(grouped_matmul(h, up.astype(x.dtype), order.group_sizes), order, scale * routing.weights)


def _side_by_side(down: Float[Array, "M d r"]) -> Float[Array, "d Mr"]:
    return jnp.swapaxes(down, 0, 1).reshape(down.shape[1], -1)
