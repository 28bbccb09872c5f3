"""Experts applied to the tokens that are routed to them, on one device or over a mesh.

Over a mesh the layer is written by hand (`shard_map`): the compiler would gather all tokens on every device to sort
them. Kernels are split over `expert` and, inside an expert, over `tensor`. Tokens come to the experts in one of two
ways, both exact:

- `all-to-all`: every row goes to the device of its expert, and the output comes back (`exchange`). What a
  device sends does not grow with the number of devices.
- `all-gather`: all devices along `expert` get all tokens, and a reduce-scatter brings the results back. For few devices
  that is less. Only the rows of its own experts are sorted and multiplied on a device.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.experts.devices import current_chip, current_mesh, spec_on_mesh, token_axes
from moe_jax.experts.exchange import (
    DEFAULT,
    Buffer,
    Exchange,
    ceil_div,
    gathered,
    make_plan,
    rounds_needed,
    send,
    send_back,
)
from moe_jax.experts.hidden_rows import FFNs, Kernels, hidden_rows
from moe_jax.functional.routing.token_choices import Routing
from moe_jax.functional.token_dispatch import Order, combine, dispatch, part_of, sort_by_expert

FURTHER_ROUNDS = "further_rounds"
"""The scope, in the compiled program, of the loop over rounds after the first."""

Number = Int[Array, ""] | int


def apply_experts(
    x: Float[Array, "T d"], routing: Routing, experts: FFNs, exchange: Exchange = DEFAULT
) -> Float[Array, "T d"]:
    """Applies FFN experts to the tokens routed to them.

    Args:
      x: tokens.
      routing: chosen experts and weights.
      experts: all of the layer.
      exchange: how tokens come to the experts over a mesh.
    """
    mesh, kernels = current_mesh(), experts.kernels
    biases: Any = {name: bias.astype(x.dtype) for name, bias in experts.biases.items()}
    if mesh is None:
        return _grouped_ffn(x, routing, experts._replace(biases=biases))

    axes = token_axes(mesh, x.shape[0])
    tokens = P(axes, None)
    whole_specs = {name: kernel.specs() for name, kernel in kernels.items()}
    array_specs = {name: whole_specs[name] | _split_specs(kernel, mesh) for name, kernel in kernels.items()}
    bias_specs = {n: P("expert", None) if n == "down" else P("expert", "tensor") for n in biases}
    arrays = {name: kernel.arrays for name, kernel in kernels.items()}
    arrays, biases = _even((arrays, biases), (array_specs, bias_specs), mesh.shape["expert"])
    if not axes:
        local = _whole
    elif exchange.chosen(mesh.shape["expert"], routing.experts.shape[1]) == "all-to-all":
        local = partial(_all_to_all, capacity=exchange.capacity)
    else:
        local = partial(_all_gather, capacity=exchange.capacity)

    def on_device(x: Array, routing: Routing, arrays: Any, biases: Any) -> Array:
        arrays = {
            name: {path: gathered(array, array_specs[name][path], whole_specs[name][path], x.dtype)
                   for path, array in own.items()}
            for name, own in arrays.items()
        }  # fmt: skip
        return local(x, routing, experts.with_arrays(arrays, biases))

    return jax.shard_map(
        on_device,
        in_specs=(tokens, Routing._make((tokens, tokens)), array_specs, bias_specs),
        out_specs=tokens,
        # The loops of the blocked product carry values whose replication the checker cannot follow.
        check_vma=False,
    )(x, routing, arrays, biases)


def _split_specs(kernel: Kernels, mesh: jax.sharding.AbstractMesh) -> dict[str, P]:
    """Returns how the arrays are stored that are rounded before devices gather them."""
    specs = kernel.stored_rounded_specs()
    # An axis that splits nothing leaves it to the product to round what it reads.
    split = {path: spec_on_mesh(spec, kernel.arrays[path].shape, mesh.shape) for path, spec in specs.items()}
    # Experts that the axis does not divide are made even before (`_even`).
    of_experts = {path: P("expert", *spec[1:]) if specs[path][0] == "expert" else spec for path, spec in split.items()}
    return {path: spec for path, spec in of_experts.items() if _gathered_along(spec, mesh)}


def _gathered_along(spec: P, mesh: jax.sharding.AbstractMesh) -> bool:
    return "fsdp" in spec and mesh.shape["fsdp"] > 1 or ("fsdp", "sequence") in spec


def _even(trees: Any, specs: Any, devices: int) -> Any:
    """Adds experts of zeros, which no token is routed to, until the axis `expert` divides their number."""

    def pad(array: Array, spec: P) -> Array:
        if not spec or spec[0] != "expert" or array.shape[0] % devices == 0:
            return array
        return jnp.pad(array, [(0, -array.shape[0] % devices), *[(0, 0)] * (array.ndim - 1)])

    return jax.tree.map(pad, trees, specs)


def _all_to_all(x: Float[Array, "t d"], routing: Routing, experts: FFNs, *, capacity: float) -> Float[Array, "t d"]:
    """The work of one device: rows of its tokens go where their experts are, and it applies its own to what comes."""
    (tokens, top_k), devices = routing.experts.shape, lax.axis_size("expert")
    mine = experts.num_experts
    order = sort_by_expert(routing.experts, devices * mine)
    counts = lax.all_gather(order.group_sizes.reshape(devices, mine), "expert")
    buffer = Buffer.of(tokens * top_k, devices, capacity, ragged=current_chip().platform != "cpu")

    def one_round(number: Number, trained: Any, fixed: Any) -> Float[Array, "M d"]:
        (rows, *own), (others, counts) = trained, fixed
        plan = make_plan(counts, buffer, number)
        at_expert = Routing(plan.experts[:, None], jnp.ones((buffer.rows, 1), jnp.float32))
        y = _grouped_ffn(send(rows, plan, buffer), at_expert, _joined(experts, own, others).in_parts())
        return send_back(y, plan, buffer, rows.shape[0])

    rows, (trained, others) = dispatch(x, order, top_k), _apart(experts)
    y = in_rounds(one_round, (rows, *trained), (others, counts), rounds_needed(counts, buffer))
    return lax.psum(combine(y, order, routing.weights), "tensor")


def _apart(experts: FFNs) -> tuple[tuple[Any, Any], Any]:
    """The arrays and biases that have gradients, and the other arrays."""

    def arrays(trained: bool) -> dict[str, dict[str, Array]]:
        return {
            name: {path: array for path, array in kernel.arrays.items() if kernel.is_trained(path) == trained}
            for name, kernel in experts.kernels.items()
        }

    return (arrays(True), biases_once(experts.biases)), arrays(False)


def _joined(experts: FFNs, trained: Any, others: Any) -> FFNs:
    """The same experts with the arrays and biases that `_apart` gave."""
    own, biases = trained
    return experts.with_arrays({name: own[name] | others[name] for name in own}, biases)


def _all_gather(x: Float[Array, "t d"], routing: Routing, experts: FFNs, *, capacity: float) -> Float[Array, "t d"]:
    """The work of one device: gathers tokens, applies its own experts, with room for as many rows as by all-to-all."""
    room = max(1, math.ceil(capacity * routing.experts.size))
    x, routing = jax.tree.map(lambda a: lax.all_gather(a, "expert", axis=0, tiled=True), (x, routing))
    if room >= routing.experts.size:
        y = _of_own_experts(x, routing, experts)
    else:
        y = _of_own_experts_in_rounds(x, routing, experts, room)
    # Scattered first, the sum over `tensor` is one of fewer rows.
    return lax.psum(lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True), "tensor")


def _of_own_experts_in_rounds(
    x: Float[Array, "T d"], routing: Routing, experts: FFNs, room: int
) -> Float[Array, "T d"]:
    """Does what `_of_own_experts` does, `room` rows at a time."""
    order = sort_by_expert(_at_own(routing, experts).experts, experts.num_experts)

    def one_round(number: Number, trained: Any, fixed: Any) -> Float[Array, "T d"]:
        (x, weights, *own), (others, order) = trained, fixed
        part = part_of(order, number * room, room)
        return _sorted_ffn(x, part, weights, _joined(experts, own, others).in_parts())

    trained, others = _apart(experts)
    needed = ceil_div(jnp.sum(order.group_sizes, dtype=jnp.int32), room)
    return in_rounds(one_round, (x, routing.weights, *trained), (others, order), needed)


def _whole(x: Float[Array, "T d"], routing: Routing, experts: FFNs) -> Float[Array, "T d"]:
    """The work of one device where all have all tokens: too few to be divided."""
    return lax.psum(_of_own_experts(x, routing, experts), ("expert", "tensor"))


def _of_own_experts(x: Float[Array, "T d"], routing: Routing, experts: FFNs) -> Float[Array, "T d"]:
    once = experts._replace(biases=biases_once(experts.biases))
    return _grouped_ffn(x, _at_own(routing, experts), once.in_parts())


def _at_own(routing: Routing, experts: FFNs) -> Routing:
    """Experts as this device numbers its own; those of others are outside [0, e)."""
    return routing._replace(experts=routing.experts - lax.axis_index("expert") * experts.num_experts)


def biases_once(biases: Mapping[str, Array]) -> Mapping[str, Array]:
    """The down projection is summed over `tensor`: its bias must be counted once."""
    if "down" not in biases:
        return biases
    return {**biases, "down": jnp.where(lax.axis_index("tensor") == 0, biases["down"], 0)}


def _grouped_ffn(x: Float[Array, "T d"], routing: Routing, experts: FFNs) -> Float[Array, "T d"]:
    """Sorts tokens by expert, applies every expert to its rows, and sums the outputs; none outside [0, E) has any."""
    return _sorted_ffn(x, sort_by_expert(routing.experts, experts.num_experts), routing.weights, experts)


def _sorted_ffn(
    x: Float[Array, "T d"], order: Order, weights: Float[Array, "T k"], experts: FFNs
) -> Float[Array, "T d"]:
    """Does what `_grouped_ffn` does for assignments that are sorted, all or a part of them (`part_of`)."""
    h = hidden_rows(dispatch(x, order, weights.shape[1]), experts, order.group_sizes)
    return combine(experts.project("down", h, order.group_sizes), order, weights)


def in_rounds(
    one_round: Callable[[Number, Any, Any], Float[Array, "M d"]], trained: Any, fixed: Any, needed: Int[Array, ""]
) -> Float[Array, "M d"]:
    """The sum of all rounds: a device has room for so many rows, and what is more waits for the next round.

    So memory does not depend on the routing, and nothing is dropped. Usually there is one round; what further ones do
    is computed again for the gradient.

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
