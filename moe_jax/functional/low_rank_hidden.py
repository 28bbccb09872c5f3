"""What the down projection needs of the hidden states of gated experts that are low-rank deltas over one base.

Of every token's experts, `h_j = act(gate + c_gate,j B_gate) * (up + c_up,j B_up)`, where `gate` and `up` are products
with the base, and `c_j` those with the first factors of all experts, zero but for the chosen one. The down projection
needs the weighted sum of the `h_j` (methods.md 3), and their products with its own first factors. A TPU's kernel makes
both while `h_j` is in fast memory, so that no array [T, k, f] exists; elsewhere, and where gradients are asked for,
they are computed one after the other.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from moe_jax.functional.dispatch import weighted_sum
from moe_jax.functional.ffn import hidden
from moe_jax.functional.linear import linear
from moe_jax.kernels.by_platform import by_platform
from moe_jax.kernels.deferred import Bound


class Projection(NamedTuple):
    """A product into the hidden layer, before the deltas are added.

    Attributes:
      of_base: `x W`, the same for all experts; zero if there is no base.
      inner: `x A_e` of every choice where e is its expert, and zero where it is not; E r entries side by side.
      b: the second factors of all experts, one below the other.
    """

    of_base: Float[Array, "T f"]
    inner: Float[Array, "T k n"]
    b: Float[Array, "n f"]


class Hidden(NamedTuple):
    """What the down projection needs.

    Attributes:
      summed: the weighted sum of the hidden states of a token's experts.
      inner: the products of each with the first factors of the down projection of all experts.
    """

    summed: Float[Array, "T f"]
    inner: Float[Array, "T k n"]


def low_rank_hidden(
    gate: Projection, up: Projection, a: Float[Array, "f n"], weights: Float[Array, "T k"], activation: str
) -> Hidden:
    """See the module.

    Args:
      gate, up: the products into the hidden layer; all of one dtype.
      a: first factors of the down projection, of all experts side by side; of the same dtype.
      weights: of a token's experts, float32. Where the hidden states are equal and the weights sum to 1, their sum is
        the hidden state to the last bit (see `weighted_sum`).
      activation: a key of `functional.ffn.ACTIVATION_FUNCTIONS`.

    Returns:
      Both in the dtype of the projections; sums are in float32 and rounded once.
    """
    return _low_rank_hidden(gate, up, a, weights, activation)


def _chosen(gate: Projection, up: Projection, a: Array, weights: Array, activation: str) -> Hidden:
    apart = Bound(_apart, activation=activation)
    (tokens, features), top_k, size = gate.of_base.shape, weights.shape[1], a.shape[1]
    dtype = gate.of_base.dtype
    shapes = (tokens, features), (tokens, top_k, size)
    out = Hidden._make(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return by_platform(apart, dtype, out, tpu=Bound(_together, activation=activation))(gate, up, a, weights)


def _forward(gate: Projection, up: Projection, a: Array, weights: Array, activation: str) -> tuple:
    return jax.vjp(partial(_apart, activation=activation), gate, up, a, weights)


def _backward(activation: str, vjp: Any, dout: Hidden) -> tuple:
    return vjp(dout)


# `nondiff_argnums` loses the types of a decorated function.
_low_rank_hidden: Any = jax.custom_vjp(_chosen, nondiff_argnums=(4,))
_low_rank_hidden.defvjp(_forward, _backward)


def of_projection(projection: Projection) -> Float[Array, "T k f"]:
    """The products into the hidden layer, of every choice."""
    return projection.of_base[:, None, :] + linear(projection.inner, projection.b)


def _apart(gate: Projection, up: Projection, a: Array, weights: Array, *, activation: str) -> Hidden:
    h = hidden(of_projection(up), of_projection(gate), activation)
    return Hidden(weighted_sum(h, weights), linear(h, a))


def _together(gate: Projection, up: Projection, a: Array, weights: Array, *, activation: str, **options: Any) -> Hidden:
    from moe_jax.kernels.tpu.low_rank_hidden import fits
    from moe_jax.kernels.tpu.low_rank_hidden import low_rank_hidden as kernel

    features, size = a.shape
    # Of many experts side by side, what goes into the kernel and comes out is more than the hidden states are.
    worth = 2 * size <= features
    if not worth or not fits(features, weights.shape[1], size, gate.of_base.dtype, **options):
        return _apart(gate, up, a, weights, activation=activation)
    return Hidden(*kernel(gate, up, a, weights, activation, **options))
