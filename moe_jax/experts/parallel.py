"""Experts applied to the tokens that are routed to them, on one device or over a mesh.

Over a mesh the layer is written by hand (`shard_map`): the compiler would gather all tokens on every device to sort
them. An all-gather over the axis `expert` brings tokens to the experts, and a reduce-scatter brings the results back;
both exist on every platform and are exact without a capacity. Kernels are split over `expert` and, inside an expert,
over `tensor`.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.experts.forms.matrix import BASE, Matrix, Part
from moe_jax.experts.hidden_rows import Kernels, hidden_rows
from moe_jax.experts.mesh import BATCH_AXES, current_mesh, splits_batch
from moe_jax.functional.dispatch import combine, dispatch, sort_by_expert
from moe_jax.functional.routing import Routing


def apply_experts(
    x: Float[Array, "T d"],
    routing: Routing,
    kernels: Mapping[str, Kernels],
    biases: Mapping[str, Float[Array, "E o"]],
    activation: str,
) -> Float[Array, "T d"]:
    """Applies FFN experts to the tokens routed to them.

    Args:
      x: tokens.
      routing: chosen experts and weights.
      kernels: `up`, `down`, and `gate` if gated.
      biases: any of them by the same names.
      activation: of the FFN.
    """
    mesh = current_mesh()
    biases = {name: bias.astype(x.dtype) for name, bias in biases.items()}
    if mesh is None:
        return _grouped_ffn(x, routing, kernels, biases, activation, {})

    split_tokens = splits_batch(mesh, x.shape[0])
    tokens = P(BATCH_AXES, None) if split_tokens else P(None, None)
    arrays = {name: kernel.arrays for name, kernel in kernels.items()}
    array_specs = {name: kernel.specs() for name, kernel in kernels.items()}
    bias_specs = {n: P("expert", None) if n == "down" else P("expert", "tensor") for n in biases}
    without_arrays = {name: kernel._replace(arrays={}) for name, kernel in kernels.items()}
    return jax.shard_map(
        partial(_local_experts, without_arrays, activation=activation, split_tokens=split_tokens),
        in_specs=(tokens, Routing._make((tokens, tokens)), array_specs, bias_specs),
        out_specs=tokens,
        # The loops of the blocked product carry values whose replication the checker cannot follow.
        check_vma=False,
    )(x, routing, arrays, biases)


def _local_experts(
    kernels: Mapping[str, Kernels],
    x: Float[Array, "t d"],
    routing: Routing,
    arrays: dict[str, dict[str, Array]],
    biases: dict[str, Array],
    *,
    activation: str,
    split_tokens: bool,
) -> Float[Array, "t d"]:
    """The work of one device: gathers tokens, applies its own experts, and returns its part of the sums."""
    if split_tokens:
        x, routing = jax.tree.map(lambda a: lax.all_gather(a, "expert", axis=0, tiled=True), (x, routing))
    kernels = {name: kernel._replace(arrays=arrays[name]) for name, kernel in kernels.items()}
    mine = num_experts(kernels["up"])
    parts = {name: _part(kernel.matrix) for name, kernel in kernels.items()}
    local = routing._replace(experts=routing.experts - lax.axis_index("expert") * mine)
    if "down" in biases:
        # The down projection is summed over `tensor`: its bias must be counted once.
        biases = {**biases, "down": jnp.where(lax.axis_index("tensor") == 0, biases["down"], 0)}
    y = lax.psum(_grouped_ffn(x, local, kernels, biases, activation, parts), "tensor")
    return lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True) if split_tokens else lax.psum(y, "expert")


def _grouped_ffn(
    x: Float[Array, "T d"],
    routing: Routing,
    kernels: Mapping[str, Kernels],
    biases: Mapping[str, Float[Array, "E o"]],
    activation: str,
    parts: Mapping[str, Part],
) -> Float[Array, "T d"]:
    """Sorts tokens by expert, applies every expert to its rows, and sums the weighted outputs.

    Experts outside [0, E) contribute nothing. The arrays describe `parts` of the kernels.
    """
    order = sort_by_expert(routing.experts, num_experts(kernels["up"]))
    rows = dispatch(x, order, routing.experts.shape[1])
    h = hidden_rows(rows, kernels, biases, order.group_sizes, parts, activation)
    y = kernels["down"].project(h, biases.get("down"), order.group_sizes, parts.get("down"))
    return combine(y, order, routing.weights)


def num_experts(kernels: Kernels) -> int:
    """The number of experts in the arrays: all, or those of this device."""
    return next(array for name, array in kernels.arrays.items() if name != BASE).shape[0]


def _part(matrix: Matrix) -> Part:
    """The part of the kernels that this device holds."""
    shards, index = lax.axis_size("tensor"), lax.axis_index("tensor")
    fan_in, fan_out = matrix.shape
    if matrix.split == "in":
        return Part((fan_in // shards, fan_out), jnp.stack([index * (fan_in // shards), 0]))
    return Part((fan_in, fan_out // shards), jnp.stack([0, index * (fan_out // shards)]))
