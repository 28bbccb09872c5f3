"""Stacked experts applied to routed tokens, on one device or over a mesh.

Over a mesh the layer is written by hand (`shard_map`): left to the compiler, sorting tokens that are
sharded over devices gathers all of them everywhere. Tokens travel to the experts by an all-gather over
the `expert` axis and return by a reduce-scatter, which exists on every platform and is exact without a
capacity; kernels are split over `expert` and, inside an expert, over `tensor`.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.functional.dispatch import combine, dispatch, sort_by_expert
from moe_jax.functional.ffn import hidden
from moe_jax.functional.grouped import grouped_matmul
from moe_jax.functional.routing import Routing

BATCH_AXES = ("data", "fsdp", "expert")


def apply_experts(
    x: Float[Array, "T d"],
    routing: Routing,
    kernels: Mapping[str, Float[Array, "E i o"]],
    biases: Mapping[str, Float[Array, "E o"]],
    activation: str,
) -> Float[Array, "T d"]:
    """Applies stacked FFN experts.

    Args:
      x: tokens.
      routing: chosen experts and weights.
      kernels: `up` [E, d, f], `down` [E, f, d], and `gate` [E, d, f] if gated.
      biases: any of them by the same names.
      activation: of the FFN.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kernels = {name: kernel.astype(x.dtype) for name, kernel in kernels.items()}
    biases = {name: bias.astype(x.dtype) for name, bias in biases.items()}
    if mesh.empty or mesh.size == 1:
        return grouped_ffn(x, routing, kernels, biases, activation)

    split_tokens = x.shape[0] % _size(mesh, *BATCH_AXES) == 0
    tokens = P(BATCH_AXES, None) if split_tokens else P(None, None)
    kernel_specs = {n: P("expert", "tensor", None) if n == "down" else P("expert", None, "tensor") for n in kernels}
    bias_specs = {n: P("expert", None) if n == "down" else P("expert", "tensor") for n in biases}
    return jax.shard_map(
        partial(_local_experts, activation=activation, split_tokens=split_tokens),
        in_specs=(tokens, Routing(tokens, tokens), kernel_specs, bias_specs),
        out_specs=tokens,
        # The loops of the blocked product carry values whose replication the checker cannot follow.
        check_vma=False,
    )(x, routing, kernels, biases)


def _size(mesh: jax.sharding.AbstractMesh, *axes: str) -> int:
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def _local_experts(
    x: Float[Array, "t d"],
    routing: Routing,
    kernels: dict[str, Array],
    biases: dict[str, Array],
    *,
    activation: str,
    split_tokens: bool,
) -> Float[Array, "t d"]:
    """What one device does: gather tokens, apply its own experts, give back its share of the sums."""
    if split_tokens:
        x, routing = jax.tree.map(lambda a: lax.all_gather(a, "expert", axis=0, tiled=True), (x, routing))
    mine = kernels["up"].shape[0]
    local = routing._replace(experts=routing.experts - lax.axis_index("expert") * mine)
    if "down" in biases:
        # The down projection is summed over `tensor`: its bias must be counted once.
        biases = {**biases, "down": jnp.where(lax.axis_index("tensor") == 0, biases["down"], 0)}
    y = lax.psum(grouped_ffn(x, local, kernels, biases, activation), "tensor")
    return lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True) if split_tokens else lax.psum(y, "expert")


def grouped_ffn(
    x: Float[Array, "T d"],
    routing: Routing,
    kernels: Mapping[str, Float[Array, "E i o"]],
    biases: Mapping[str, Float[Array, "E o"]],
    activation: str,
) -> Float[Array, "T d"]:
    """Sorts tokens by expert, applies every expert to its group, and adds up the weighted outputs.

    Assignments to experts outside [0, E) contribute nothing.
    """
    num_experts, top_k = kernels["up"].shape[0], routing.experts.shape[1]
    order = sort_by_expert(routing.experts, num_experts)
    rows = dispatch(x, order, top_k)

    def project(rows: Array, name: str) -> Array:
        y = grouped_matmul(rows, kernels[name], order.group_sizes)
        return y + _row_biases(biases[name], order.group_sizes, rows.shape[0]) if name in biases else y

    gate = project(rows, "gate") if "gate" in kernels else None
    h = hidden(project(rows, "up"), gate, activation)
    return combine(project(h, "down"), order, routing.weights)


def _row_biases(biases: Float[Array, "E o"], group_sizes: Int[Array, " E"], rows: int) -> Float[Array, "M o"]:
    """The bias of every sorted row; rows in no group get zeros."""
    ends = jnp.cumsum(group_sizes)
    group = jnp.searchsorted(ends, jnp.arange(rows, dtype=ends.dtype), side="right")
    return jnp.take(biases, group, axis=0, mode="fill", fill_value=0)
