"""The assignments of tokens to experts, as banks of experts take them."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Stands in place of an expert for padding, and for an assignment beyond the capacity: nothing is computed for it.
NO_EXPERT = -1


class Routing(NamedTuple):
    """The decision for T tokens.

    Attributes:
      experts: chosen experts, best first; `NO_EXPERT` for padding and for an assignment that is dropped.
      weights: their weights, float32; zero for `NO_EXPERT`.
    """

    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]


def renumbered(routing: Routing, numbers: Int[Array, " E"]) -> Routing:
    """Returns a routing to the same experts, by other numbers of theirs.

    Args:
      routing: to experts in [0, E), or others, which become `NO_EXPERT`.
      numbers: int32, the number of each of the E experts; `NO_EXPERT` leaves it out. Its weight stays.
    """
    is_one = (routing.experts >= 0) & (routing.experts < numbers.shape[0])
    experts = jnp.take(numbers, routing.experts, mode="clip").astype(routing.experts.dtype)
    return routing._replace(experts=jnp.where(is_one, experts, NO_EXPERT))


def weighted_inputs(x: Float[Array, "T d"], routing: Routing) -> tuple[Float[Array, "T*k d"], Routing]:
    """Returns the input of every assignment, times its weight, and its routing to one expert with weight 1.

    The sum over a token's k rows of what the experts return is that of experts whose inputs are weighted.
    """
    tokens, choices = routing.weights.shape
    rows = x.astype(jnp.float32)[:, None, :] * routing.weights[..., None]
    one = Routing(routing.experts.reshape(-1, 1), jnp.where(routing.experts == NO_EXPERT, 0.0, 1.0).reshape(-1, 1))
    return rows.astype(x.dtype).reshape(tokens * choices, -1), one


def add_choice(
    routing: Routing, expert: int, weight: Float[Array, " T"], valid: Bool[Array, " T"] | None = None
) -> Routing:
    """Adds a last choice to every token: `expert`, with the given weight.

    Args:
      routing: the choices so far.
      expert: index of the expert in its bank.
      weight: float32.
      valid: tokens that are not padding; the last choice of padding is `NO_EXPERT`. None: all.
    """
    last = jnp.full(weight.shape, expert, jnp.int32)
    if valid is not None:
        last, weight = jnp.where(valid, last, NO_EXPERT), jnp.where(valid, weight, 0.0)
    experts = jnp.concatenate([routing.experts, last[:, None]], axis=1)
    return Routing(experts, jnp.concatenate([routing.weights, weight[:, None]], axis=1))
