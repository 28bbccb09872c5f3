"""The hidden states of gated experts that are low-rank deltas over one base, as their down projection needs them.

For every expert j of a token, `h_j = act(gate + c_gate,j B_gate) * (up + c_up,j B_up)`, where `gate` and `up` are
products with the base, and `c_j` the products with the first factors of all experts, zero but for the chosen one. The
down projection needs the weighted sum of the `h_j` (methods.md 3), and the weighted sum of their products with its own
first factors. A TPU's kernel computes both while `h_j` is in fast memory, so that no array of k rows per token exists;
elsewhere, and where gradients are needed, they are computed one after the other.
"""

import functools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.functional.ffn import hidden
from moe_jax.functional.products.linear import linear
from moe_jax.functional.routing.decision import Routing
from moe_jax.functional.routing.dispatch import weighted_sum
from moe_jax.kernels.by_platform import Bound, by_platform


class Projection(NamedTuple):
    """A product into the hidden layer, before the deltas are added.

    Attributes:
      of_base: `x W`, the same for all experts; zero if there is no base.
      inner: `x A_e` of all experts; E r entries side by side.
      b: the second factors of all experts, one below the other.
    """

    of_base: Float[Array, "T f"]
    inner: Float[Array, "T n"]
    b: Float[Array, "n f"]


class Hidden(NamedTuple):
    """Sums over a token's experts, as the down projection needs them.

    Attributes:
      summed: the weighted sum of the hidden states of a token's experts.
      inner: the weighted sum of the products of each hidden state with the first factors of the down projection of its
        own expert, at the place of that expert's factors among all; zero elsewhere. float32.
    """

    summed: Float[Array, "T f"]
    inner: Float[Array, "T n"]


def low_rank_hidden(
    gate: Projection, up: Projection, a: Float[Array, "f n"], routing: Routing, num_experts: int, activation: str
) -> Hidden:
    """Returns the sums of hidden states that the down projection needs; see the top of the module.

    Args:
      gate, up: the products into the hidden layer; all of one dtype.
      a: first factors of the down projection, of all experts side by side; of the same dtype.
      routing: the chosen experts, and their weights. Where the hidden states are equal and the weights sum to 1, their
        sum is the hidden state to the last bit (see `weighted_sum`).
      num_experts: E.
      activation: a key of `kernels.activations.ACTIVATION_FUNCTIONS`.

    Returns:
      `summed` in the dtype of the projections, `inner` in float32; sums are in float32 and rounded once.
    """
    return _low_rank_hidden(gate, up, a, routing, num_experts, activation)


def hidden_products(projection: Projection, experts: Int[Array, "T k"], num_experts: int) -> Float[Array, "T k f"]:
    """Returns the products into the hidden layer, one for every choice."""
    inner = _of_own(projection.inner[:, None, :], experts, num_experts)
    return projection.of_base[:, None, :] + linear(inner, projection.b)


def down_projection_inputs(
    h: Float[Array, "T k f"], a: Float[Array, "f n"], routing: Routing, num_experts: int
) -> Hidden:
    """Returns the sums that the down projection needs, from hidden states."""
    inner = linear(h, a)
    # Choice by choice: converted as a whole, XLA:TPU would write them to memory in float32.
    terms = []
    for j in range(h.shape[1]):
        own = _of_own(inner[:, j, None], routing.experts[:, j, None], num_experts)[:, 0]
        terms.append(routing.weights[:, j, None] * own.astype(jnp.float32))
    return Hidden(weighted_sum(h, routing.weights), functools.reduce(jnp.add, terms))


def _of_own(inner: Float[Array, "T m n"], experts: Int[Array, "T k"], num_experts: int) -> Float[Array, "T k n"]:
    """Keeps the entries of every choice's own expert; sets those of other experts to zero."""
    # Compared without a reshape: for a shape that ends in r entries a TPU would write and read them once more.
    expert = jnp.arange(inner.shape[-1], dtype=experts.dtype) // (inner.shape[-1] // num_experts)
    return jnp.where(expert[None, None, :] == experts[..., None], inner, 0)


def _chosen(gate: Projection, up: Projection, a: Array, routing: Routing, num_experts: int, activation: str) -> Hidden:
    unfused = Bound(_unfused, num_experts=num_experts, activation=activation)
    fused = Bound(_fused, num_experts=num_experts, activation=activation)
    (tokens, features), dtype = gate.of_base.shape, gate.of_base.dtype
    shapes = ((tokens, features), dtype), ((tokens, a.shape[1]), jnp.float32)
    out = Hidden._make(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    return by_platform(unfused, dtype, out, tpu=fused)(gate, up, a, routing)


def _forward(gate: Projection, up: Projection, a: Array, routing: Routing, num_experts: int, activation: str) -> tuple:
    return jax.vjp(partial(_unfused, num_experts=num_experts, activation=activation), gate, up, a, routing)


def _backward(num_experts: int, activation: str, vjp: Any, dout: Hidden) -> tuple:
    return vjp(dout)


# `nondiff_argnums` loses the types of a decorated function.
_low_rank_hidden: Any = jax.custom_vjp(_chosen, nondiff_argnums=(4, 5))
_low_rank_hidden.defvjp(_forward, _backward)


def _unfused(
    gate: Projection, up: Projection, a: Array, routing: Routing, *, num_experts: int, activation: str
) -> Hidden:
    of_gate, of_up = (hidden_products(projection, routing.experts, num_experts) for projection in (gate, up))
    return down_projection_inputs(hidden(of_up, of_gate, activation), a, routing, num_experts)


def _fused(
    gate: Projection, up: Projection, a: Array, routing: Routing, *, num_experts: int, activation: str, **options: Any
) -> Hidden:
    from moe_jax.kernels.tpu.low_rank_hidden import fits
    from moe_jax.kernels.tpu.low_rank_hidden import low_rank_hidden as kernel

    features, size = a.shape
    one_size = gate.b.shape[0] == up.b.shape[0] == size
    if not one_size or not fits(features, size, gate.of_base.dtype, **options):
        return _unfused(gate, up, a, routing, num_experts=num_experts, activation=activation)
    return Hidden(*kernel(gate, up, a, routing, num_experts, activation, **options))
