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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.experts.devices import current_mesh, token_axes
from moe_jax.experts.forms.optional import Factored, SideBySide
from moe_jax.experts.hidden_rows import FFNs, Kernels
from moe_jax.experts.over_mesh import biases_once
from moe_jax.functional.dense import Product, hidden, linear, product_of_float32
from moe_jax.functional.gated import Projection, down_projection_inputs, hidden_products, low_rank_hidden
from moe_jax.functional.routing.token_choices import Routing
from moe_jax.functional.token_dispatch import combine, dispatch, row_biases, sort_by_expert, weighted_sum

OfBase = Mapping[str, Float[Array, "T f"]]
"""The products of the tokens with the base of `up`, and of `gate` if gated; without a base, none."""
Parts = tuple[Float[Array, "T f"], Float[Array, "T d"]]
"""Weighted sums of the hidden states of a token's experts, and of their products with the deltas of `down`."""


def factored_ffn(
    x: Float[Array, "T d"], routing: Routing, bases: Mapping[str, Callable[..., Array] | None], deltas: FFNs, way: str
) -> Float[Array, "T d"]:
    """The weighted sum of the outputs of the chosen experts.

    Args:
      x: tokens.
      routing: chosen experts and weights.
      bases: functions that multiply with the base kernel `up`, `down`, and `gate` if the FFN is gated, and add the
        product `more` to that; None for each if there is no base.
      deltas: the experts without the base.
      way: how the deltas are applied; see the module.
    """
    deltas = deltas._replace(biases={name: bias.astype(x.dtype) for name, bias in deltas.biases.items()})
    # The base is part of every choice: one of no expert has it, too, but for its weight.
    is_one = (routing.experts >= 0) & (routing.experts < deltas.num_experts)
    routing = routing._replace(weights=jnp.where(is_one, routing.weights, 0))
    base_down = bases["down"]
    of_base = {name: base(x) for name, base in bases.items() if name != "down" and base is not None}
    local = _side_by_side if way == "side-by-side" else partial(_by_expert, way=way)
    mesh = current_mesh()
    if mesh is None and way == "side-by-side" and base_down is not None:
        h, product, bias = _before_down(deltas, x, routing, of_base)
        y = base_down(h, more=product)
        return y if bias is None else y + bias
    if mesh is None:
        h, y = local(deltas, x, routing, of_base)
    else:
        h, y = _of_own_tokens(mesh, local, deltas, x, routing, of_base)
    return y if base_down is None else base_down(h) + y


def _total(deltas: FFNs, sums: Array) -> Array:
    """Completes sums over the neurons, of which a device of a mesh has a part."""
    return lax.psum(sums, "tensor") if deltas.parts else sums


def _by_expert(deltas: FFNs, x: Float[Array, "T d"], routing: Routing, of_base: OfBase, *, way: str) -> Parts:
    """Rows sorted by expert; over a mesh, with the part of the columns of all experts that this device has."""
    biases = biases_once(deltas.biases) if deltas.parts else deltas.biases
    top_k = routing.experts.shape[1]
    order = sort_by_expert(routing.experts, deltas.num_experts)
    rows: Any = dispatch(x, order, top_k)

    def delta_product(rows: Array, name: str) -> Array:
        form, matrix, arrays, _ = deltas.kernels[name]
        part = deltas.parts.get(name)
        if isinstance(form, Factored):
            y = form.grouped_delta(rows, arrays, order.group_sizes, matrix, way, part)
        else:
            y = form.grouped(rows, arrays, order.group_sizes, matrix, part)
        return y + row_biases(biases[name], order.group_sizes, rows.shape[0]) if name in biases else y

    def into_hidden(name: str) -> Float[Array, "M f"]:
        own = delta_product(rows, name)
        shared: Any = dispatch(of_base[name], order, top_k) if name in of_base else None
        return own if shared is None else shared + own

    gate = into_hidden("gate") if "gate" in deltas.kernels else None
    h = hidden(into_hidden("up"), gate, deltas.activation)
    y = combine(delta_product(h, "down"), order, routing.weights)
    return combine(h, order, routing.weights), _total(deltas, y)


def _of_own_tokens(
    mesh: Any, local: Callable[..., Parts], deltas: FFNs, x: Array, routing: Routing, of_base: OfBase
) -> Parts:
    """Over a mesh every device has the deltas of all experts, which are small, and applies them to its own tokens.

    No token travels. The compiler would gather all of them, to sort them, or because the deltas of different experts
    lie on different devices.
    """
    axes = token_axes(mesh, x.shape[0])
    tokens, neurons = P(axes, None), P(axes, "tensor")
    arrays = {name: kernel.arrays for name, kernel in deltas.kernels.items()}
    array_specs = {
        name: {path: _of_all(spec) for path, spec in kernel.specs().items()} for name, kernel in deltas.kernels.items()
    }
    bias_specs = {name: P(None, None if name == "down" else "tensor") for name in deltas.biases}

    def on_device(arrays: Any, x: Array, routing: Routing, of_base: Any, biases: dict[str, Array]) -> Any:
        return local(deltas.with_arrays(arrays, biases).in_parts(), x, routing, of_base)

    in_specs = (array_specs, tokens, Routing._make((tokens, tokens)), {name: neurons for name in of_base}, bias_specs)
    # Unchecked: see `experts.over_mesh`.
    divided = jax.shard_map(on_device, in_specs=in_specs, out_specs=(neurons, tokens), check_vma=False)
    return divided(arrays, x, routing, dict(of_base), dict(deltas.biases))


def _of_all(spec: P) -> P:
    """The arrays of all experts."""
    return P(*(None if axis == "expert" else axis for axis in spec))


def _side_by_side(deltas: FFNs, x: Float[Array, "T d"], routing: Routing, of_base: OfBase) -> Parts:
    """All factors as two matrices for each kernel."""
    summed, product, bias = _before_down(deltas, x, routing, of_base)
    y = linear(*product)
    return summed, y if bias is None else y + bias


def _before_down(
    deltas: FFNs, x: Float[Array, "T d"], routing: Routing, of_base: OfBase
) -> tuple[Float[Array, "T f"], Product, Float[Array, "T d"] | None]:
    """Returns sums of hidden states, and the product with the deltas of `down` and its bias, still to be added."""
    experts, biases = deltas.num_experts, deltas.biases
    is_chosen = jax.nn.one_hot(routing.experts, experts, dtype=x.dtype)
    factors = {name: _beside(delta, x.dtype) for name, delta in deltas.kernels.items()}

    def bias_of(name: str) -> Float[Array, "T k o"] | float:
        return linear(is_chosen, biases[name]) if name in biases else 0.0

    def projection(name: str) -> Projection:
        a, b = factors[name]
        base = of_base[name] if name in of_base else jnp.zeros((x.shape[0], b.shape[1]), x.dtype)
        return Projection(base, linear(x, a), b)

    def into_hidden(name: str) -> Float[Array, "T k f"]:
        return hidden_products(projection(name), routing.experts, experts) + bias_of(name)

    a, b = factors["down"]
    if "gate" not in deltas.kernels or biases:
        h = hidden(into_hidden("up"), into_hidden("gate") if "gate" in factors else None, deltas.activation)
        h = down_projection_inputs(h, a, routing, experts)
    else:
        h = low_rank_hidden(projection("gate"), projection("up"), a, routing, experts, deltas.activation)
    # The sum over the choices comes before the second product, which then is one of T rows; and so does what the
    # devices of a mesh add up, which is narrower there.
    bias = weighted_sum(linear(is_chosen, biases["down"]), routing.weights) if "down" in biases else None
    return h.summed, product_of_float32(_total(deltas, h.inner), b, x.dtype), bias


def _beside(delta: Kernels, dtype: DTypeLike) -> tuple[Float[Array, "i n"], Float[Array, "n o"]]:
    """The first factors of all experts as columns of one matrix, and the second ones as rows of one."""
    assert isinstance(delta.form, SideBySide)
    a, b = (factor.astype(dtype) for factor in delta.form.factors(delta.arrays))
    return jnp.swapaxes(a, 0, 1).reshape(a.shape[1], -1), b.reshape(-1, b.shape[2])
