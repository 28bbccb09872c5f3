"""Rows in rounds: a device has room for so many, and usually there are no more; what is more waits for the next round.

So memory does not depend on the routing, and nothing is dropped.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

FURTHER_ROUNDS = "further_rounds"
"""The scope, in the compiled program, of the loop over rounds after the first."""

Number = Int[Array, ""] | int


def in_rounds(
    one_round: Callable[[Number, Any, Any], Float[Array, "M d"]], trained: Any, fixed: Any, needed: Int[Array, ""]
) -> Float[Array, "M d"]:
    """The sum of all rounds. Rounds after the first, which are rare, are computed again for the gradient.

    Args:
      one_round: makes the rows of a round, and zeros elsewhere, of its number, `trained` and `fixed`. It holds no
        traced array of its own.
      trained: a tree of arrays that have gradients.
      fixed: a tree of others.
      needed: how many rounds there are; the first is always done.
    """

    def further(needed: Array, step: Callable[[Array, Any], Any], start: Any) -> Any:
        """Folds `step` over the numbers of the rounds after the first."""
        begin = jnp.ones((), needed.dtype)
        with jax.named_scope(FURTHER_ROUNDS):
            return lax.while_loop(
                lambda state: state[0] < needed, lambda state: (state[0] + 1, step(state[0], state[1])), (begin, start)
            )[1]

    @jax.custom_vjp
    def rest(y: Array, trained: Any, fixed: Any, needed: Array) -> Array:
        return further(needed, lambda number, sums: sums + one_round(number, trained, fixed), y)

    def rest_fwd(y: Array, trained: Any, fixed: Any, needed: Array) -> tuple[Array, Any]:
        return rest(y, trained, fixed, needed), (trained, fixed, needed)

    def rest_bwd(saved: Any, dy: Array) -> tuple[Array, Any, None, None]:
        trained, fixed, needed = saved

        def add(number: Array, sums: Any) -> Any:
            _, vjp = jax.vjp(lambda trained: one_round(number, trained, fixed), trained)
            return jax.tree.map(lambda total, one: total + one.astype(total.dtype), sums, vjp(dy)[0])

        # Summed in float32 whatever the dtype.
        sums = further(needed, add, jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), trained))
        return dy, jax.tree.map(lambda total, array: total.astype(array.dtype), sums, trained), None, None

    rest.defvjp(rest_fwd, rest_bwd)
    return rest(one_round(0, trained, fixed), trained, fixed, needed)


def ceil_div(value: Int[Array, ""], divisor: int) -> Int[Array, ""]:
    """The least whole number that is at least the quotient."""
    return -(-value // divisor)
