"""The factored FFN: products with the base are computed once per token, not once per expert (methods.md 3).

`x W_gate` and `x W_up` do not depend on the expert. The down projection is linear, so that the hidden states of a
token's experts are summed before it. Only the activation and the products with the deltas remain per expert:

- `side-by-side`: the low-rank factors of all experts form one matrix `[in, E r]`, and coefficients of experts that were
  not chosen are set to zero. Tokens are not permuted, which is best for few or small experts.
- Otherwise, rows are sorted by expert and multiplied with the delta of their expert by `Factored.grouped_delta`.

Over a mesh every device does this with its own tokens and the deltas of all experts, so that no token is exchanged.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.experts.devices import current_mesh, token_axes
from moe_jax.experts.forms.optional import Factored, SideBySide
from moe_jax.experts.hidden_rows import Kernels
from moe_jax.experts.over_mesh import biases_once, num_experts, parts_of
from moe_jax.experts.shapes import Part
from moe_jax.functional.dense import Product, hidden, linear, product_of_float32
from moe_jax.functional.gated import (
    Projection,
    down_projection_inputs,
    hidden_products,
    low_rank_hidden,
)
from moe_jax.functional.routing import Routing
from moe_jax.functional.token_dispatch import combine, dispatch, row_biases, sort_by_expert, weighted_sum


def factored_ffn(
    x: Float[Array, "T d"],
    routing: Routing,
    bases: Mapping[str, Callable[..., Array] | None],
    deltas: Mapping[str, Kernels],
    biases: Mapping[str, Float[Array, "E o"]],
    activation: str,
    way: str,
) -> Float[Array, "T d"]:
    """The weighted sum of the outputs of the chosen experts.

    Args:
      x: tokens.
      routing: chosen experts and weights.
      bases: functions that multiply with the base kernel `up`, `down`, and `gate` if the FFN is gated, and add the
        product `more` to that; None for each if there is no base.
      deltas: the deltas, by the same names.
      biases: by the same names; may be empty.
      activation: of the FFN.
      way: how the deltas are applied; see the module.
    """
    biases = {name: bias.astype(x.dtype) for name, bias in biases.items()}
    base_down = bases["down"]
    of_base = {name: base(x) for name, base in bases.items() if name != "down" and base is not None}
    if way == "side-by-side":
        local = partial(_side_by_side, activation=activation)
    else:
        local = partial(_by_expert, activation=activation, way=way)
    mesh = current_mesh()
    if mesh is None and way == "side-by-side" and base_down is not None:
        h, product, bias = _before_down(deltas, x, routing, of_base, biases, _Place(), activation)
        y = base_down(h, more=product)
        return y if bias is None else y + bias
    if mesh is None:
        h, y = local(deltas, x, routing, of_base, biases, _Place())
    else:
        h, y = _of_own_tokens(mesh, local, deltas, x, routing, of_base, biases)
    return y if base_down is None else base_down(h) + y


class _Place(NamedTuple):
    """The place where the deltas are applied.

    Attributes:
      parts: of the kernels, those that a device of a mesh has; empty: they are whole.
      is_divided: whether sums over the hidden neurons are to be completed over the axis `tensor`.
    """

    parts: Mapping[str, Part] = MappingProxyType({})
    is_divided: bool = False

    def total(self, sums: Array) -> Array:
        """Completes sums over the neurons that this device has."""
        return lax.psum(sums, "tensor") if self.is_divided else sums


def _by_expert(
    deltas: Mapping[str, Kernels],
    x: Float[Array, "T d"],
    routing: Routing,
    of_base: Mapping[str, Float[Array, "T f"]],
    biases: Mapping[str, Float[Array, "E o"]],
    place: _Place,
    *,
    activation: str,
    way: str,
) -> tuple[Float[Array, "T f"], Float[Array, "T d"]]:
    """Rows sorted by expert.

    Args:
      deltas: of all experts; over a mesh, the part of their columns that this device has.
      x, routing, biases: of the FFN.
      of_base: the products of the tokens with the base of `up`, and of `gate` if gated; without a base, none.
      place: where this is.
      activation, way: see `factored_ffn`.

    Returns:
      The weighted sums of the hidden states of a token's experts, and of their products with the deltas of the down
      projection.
    """
    biases = biases_once(biases) if place.is_divided else biases
    top_k = routing.experts.shape[1]
    order = sort_by_expert(routing.experts, num_experts(deltas["up"]))
    rows = dispatch(x, order, top_k)

    def delta_product(rows: Array, name: str) -> Array:
        form, matrix, arrays, _ = deltas[name]
        part = place.parts.get(name)
        if isinstance(form, Factored):
            y = form.grouped_delta(rows, arrays, order.group_sizes, matrix, way, part)
        else:
            y = form.grouped(rows, arrays, order.group_sizes, matrix, part)
        return y + row_biases(biases[name], order.group_sizes, rows.shape[0]) if name in biases else y

    def into_hidden(name: str) -> Float[Array, "M f"]:
        own = delta_product(rows, name)
        return dispatch(of_base[name], order, top_k) + own if name in of_base else own

    gate = into_hidden("gate") if "gate" in deltas else None
    h = hidden(into_hidden("up"), gate, activation)
    y = combine(delta_product(h, "down"), order, routing.weights)
    return combine(h, order, routing.weights), place.total(y)


def _of_own_tokens(
    mesh: jax.sharding.AbstractMesh,
    local: Callable[..., tuple[Array, Array]],
    deltas: Mapping[str, Kernels],
    x: Float[Array, "T d"],
    routing: Routing,
    of_base: Mapping[str, Float[Array, "T f"]],
    biases: Mapping[str, Float[Array, "E o"]],
) -> tuple[Float[Array, "T f"], Float[Array, "T d"]]:
    """Over a mesh every device has the deltas of all experts, which are small, and applies them to its own tokens.

    No token travels. The compiler would gather all of them, to sort them, or because the deltas of different experts
    lie on different devices.
    """
    axes = token_axes(mesh, x.shape[0])
    tokens, neurons = P(axes, None), P(axes, "tensor")
    arrays = {name: kernel.arrays for name, kernel in deltas.items()}
    array_specs = {
        name: {path: _of_all(spec) for path, spec in kernel.specs().items()} for name, kernel in deltas.items()
    }
    bias_specs = {name: P(None, None if name == "down" else "tensor") for name in biases}

    def on_device(arrays: Any, x: Array, routing: Routing, of_base: Any, biases: dict[str, Array]) -> Any:
        own = {name: kernel._replace(arrays=arrays[name]) for name, kernel in deltas.items()}
        return local(own, x, routing, of_base, biases, _Place(parts_of(own), is_divided=True))

    return jax.shard_map(
        on_device,
        in_specs=(
            array_specs,
            tokens,
            Routing._make((tokens, tokens)),
            {name: neurons for name in of_base},
            bias_specs,
        ),
        out_specs=(neurons, tokens),
        # See `experts.over_mesh`.
        check_vma=False,
    )(arrays, x, routing, dict(of_base), dict(biases))


def _of_all(spec: P) -> P:
    """The arrays of all experts."""
    return P(*(None if axis == "expert" else axis for axis in spec))


def _side_by_side(
    deltas: Mapping[str, Kernels],
    x: Float[Array, "T d"],
    routing: Routing,
    of_base: Mapping[str, Float[Array, "T f"]],
    biases: Mapping[str, Float[Array, "E o"]],
    place: _Place,
    *,
    activation: str,
) -> tuple[Float[Array, "T f"], Float[Array, "T d"]]:
    """All factors as two matrices for each kernel; arguments and results are those of `_by_expert`."""
    summed, product, bias = _before_down(deltas, x, routing, of_base, biases, place, activation)
    y = linear(*product)
    return summed, y if bias is None else y + bias


def _before_down(
    deltas: Mapping[str, Kernels],
    x: Float[Array, "T d"],
    routing: Routing,
    of_base: Mapping[str, Float[Array, "T f"]],
    biases: Mapping[str, Float[Array, "E o"]],
    place: _Place,
    activation: str,
) -> tuple[Float[Array, "T f"], Product, Float[Array, "T d"] | None]:
    """Returns sums of hidden states, and the product with the deltas of `down` and its bias, still to be added."""
    experts = num_experts(deltas["up"])
    is_chosen = jax.nn.one_hot(routing.experts, experts, dtype=x.dtype)
    factors = {name: _beside(delta, x.dtype) for name, delta in deltas.items()}

    def bias_of(name: str) -> Float[Array, "T k o"] | float:
        return linear(is_chosen, biases[name]) if name in biases else 0.0

    def projection(name: str) -> Projection:
        a, b = factors[name]
        base = of_base[name] if name in of_base else jnp.zeros((x.shape[0], b.shape[1]), x.dtype)
        return Projection(base, linear(x, a), b)

    def into_hidden(name: str) -> Float[Array, "T k f"]:
        return hidden_products(projection(name), routing.experts, experts) + bias_of(name)

    a, b = factors["down"]
    if "gate" not in deltas or biases:
        h = hidden(into_hidden("up"), into_hidden("gate") if "gate" in deltas else None, activation)
        h = down_projection_inputs(h, a, routing, experts)
    else:
        h = low_rank_hidden(projection("gate"), projection("up"), a, routing, experts, activation)
    # The sum over the choices comes before the second product, which then is one of T rows; and so does what the
    # devices of a mesh add up, which is narrower there.
    bias = weighted_sum(linear(is_chosen, biases["down"]), routing.weights) if "down" in biases else None
    return h.summed, product_of_float32(place.total(h.inner), b, x.dtype), bias


def _beside(delta: Kernels, dtype: DTypeLike) -> tuple[Float[Array, "i n"], Float[Array, "n o"]]:
    """The first factors of all experts as columns of one matrix, and the second ones as rows of one."""
    assert isinstance(delta.form, SideBySide)
    a, b = (factor.astype(dtype) for factor in delta.form.factors(delta.arrays))
    return jnp.swapaxes(a, 0, 1).reshape(a.shape[1], -1), b.reshape(-1, b.shape[2])
