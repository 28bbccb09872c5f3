"""The hidden states of gated experts as one operation, on TPUs; elsewhere, and for gradients, product by product.

`gated_product`, `act(rows W_gate) * (rows W_up)`: a TPU's kernel keeps both products in fast memory and writes only
what is made of them, a third of what is otherwise written and a fifth of what is moved.

`low_rank_hidden`, of experts that are low-rank deltas over one base: for every expert j of a token, it is
`h_j = act(gate + c_gate,j B_gate) * (up + c_up,j B_up)`, where `gate` and `up` are products with the base, and the
`c_j` are products with the first factors of all experts, zero but for the chosen one. The down projection needs the
weighted sum of the `h_j` (methods.md 3), and that of their products with its own first factors. A TPU's kernel computes
both while `h_j` is in fast memory, so that no array of k rows per token exists.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.functional.dense import hidden, linear
from moe_jax.functional.routing.token_choices import Routing
from moe_jax.functional.token_dispatch import weighted_sum
from moe_jax.kernels.by_platform import Bound, by_platform
from moe_jax.kernels.tpu.fused_tile import FusedTile

BASE = "base"
"""Name of the array that all groups share, among the arrays of a kernel."""
GATE, UP = "gate", "up"

Stacked = Mapping[str, Mapping[str, Array]]


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
      activation: a key of `kernels.plain.ACTIVATION_FUNCTIONS`.
    """
    out = jax.ShapeDtypeStruct((rows.shape[0], shape[1]), rows.dtype)
    fused = Bound(_fused_product, tiles=tiles, shape=shape, activation=activation)
    return _fused_on_tpu(unfused, fused, out, (rows, trained), (fixed, group_sizes))


def _chosen(unfused: Bound, fused: Bound, out: Any, trained: tuple, fixed: tuple) -> Any:
    """Returns `unfused(*trained, *fixed)`, computed by a TPU's kernel where no gradients are needed."""
    return _choose(unfused, jax.tree.leaves(out)[0].dtype, out, tpu=fused)(*trained, *fixed)


def _forward(unfused: Bound, fused: Bound, out: Any, trained: tuple, fixed: tuple) -> tuple:
    return jax.vjp(lambda trained: unfused(*trained, *fixed), trained)


def _backward(unfused: Bound, fused: Bound, out: Any, vjp: Any, cotangent: Any) -> tuple:
    return *vjp(cotangent), None


# `nondiff_argnums` loses the types of a decorated function.
_fused_on_tpu: Any = jax.custom_vjp(_chosen, nondiff_argnums=(0, 1, 2))
_fused_on_tpu.defvjp(_forward, _backward)

_choose = by_platform


def _fused_product(
    rows: Array, trained: Stacked, fixed: Stacked, group_sizes: Array, *, tiles: Any, shape: Any, **options: Any
) -> Array:
    from moe_jax.kernels.tpu.grouped_product import Kernels, grouped_product

    def kernels(name: str, tile: FusedTile) -> Kernels:
        arrays = {**trained[name], **fixed[name]}
        return Kernels(arrays.pop(BASE, None), arrays, tile)

    gate, up = map(kernels, (GATE, UP), tiles)
    return grouped_product(rows, (gate, up), group_sizes, shape, **options)


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
      activation: a key of `kernels.plain.ACTIVATION_FUNCTIONS`.

    Returns:
      `summed` in the dtype of the projections, `inner` in float32; sums are in float32 and rounded once.
    """
    options = {"num_experts": num_experts, "activation": activation}
    shapes = (gate.of_base.shape, gate.of_base.dtype), ((gate.of_base.shape[0], a.shape[1]), jnp.dtype(jnp.float32))
    out = Hidden._make(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    unfused, fused = Bound(_unfused_low_rank, **options), Bound(_fused_low_rank, **options)
    return _fused_on_tpu(unfused, fused, out, (gate, up, a, routing), ())


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


def _unfused_low_rank(
    gate: Projection, up: Projection, a: Array, routing: Routing, *, num_experts: int, activation: str
) -> Hidden:
    of_gate, of_up = (hidden_products(projection, routing.experts, num_experts) for projection in (gate, up))
    return down_projection_inputs(hidden(of_up, of_gate, activation), a, routing, num_experts)


def _fused_low_rank(
    gate: Projection, up: Projection, a: Array, routing: Routing, *, num_experts: int, activation: str, **options: Any
) -> Hidden:
    from moe_jax.kernels.tpu.low_rank_hidden import fits
    from moe_jax.kernels.tpu.low_rank_hidden import low_rank_hidden as kernel

    features, size = a.shape
    one_size = gate.b.shape[0] == up.b.shape[0] == size
    if not one_size or not fits(features, size, gate.of_base.dtype, **options):
        return _unfused_low_rank(gate, up, a, routing, num_experts=num_experts, activation=activation)
    return Hidden(*kernel(gate, up, a, routing, num_experts, activation, **options))
