"""Stacked experts applied to routed tokens, on one device or over a mesh.

Over a mesh the layer is written by hand (`shard_map`): left to the compiler, sorting tokens that are
sharded over devices gathers all of them everywhere. Tokens travel to the experts by an all-gather over
the `expert` axis and return by a reduce-scatter, which exists on every platform and is exact without a
capacity; kernels are split over `expert` and, inside an expert, over `tensor`.
"""

import abc
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.functional.deltas import NF4Form
from moe_jax.functional.dispatch import combine, dispatch, row_biases, sort_by_expert
from moe_jax.functional.ffn import hidden
from moe_jax.functional.grouped import grouped_matmul
from moe_jax.functional.routing import Routing
from moe_jax.functional.synthesis import synthesised_matmul

if TYPE_CHECKING:
    from moe_jax.experts.deltas import Delta, JointLowRankDelta

BATCH_AXES = ("data", "fsdp", "expert")


class Part(NamedTuple):
    """What one device has of every kernel of a matrix: its shape, and the row and column at which it begins."""

    shape: tuple[int, int]
    origin: Int[Array, "2"]


class Kernels(abc.ABC):
    """One matrix of all experts, in whatever form: arrays, how they are split, and the grouped product with them.

    Attributes:
      shape: [in, out] of a kernel.
    """

    shape: tuple[int, int]

    @abc.abstractmethod
    def arrays(self) -> dict[str, Array]:
        """All arrays by name."""

    @abc.abstractmethod
    def specs(self, split: str) -> dict[str, P]:
        """How each lies on the mesh; `tensor` splits the axis `in` or `out` of the kernel."""

    @abc.abstractmethod
    def product(
        self, rows: Float[Array, "M i"], arrays: dict[str, Array], group_sizes: Int[Array, " E"], part: Part | None
    ) -> Float[Array, "M o"]:
        """Rows sorted by expert times the kernels that (a shard of) the arrays stand for.

        `part` is what the arrays are of the kernels; None: all.
        """


class FullKernels(Kernels):
    """Kernels stacked over the experts, [E, in, out]."""

    def __init__(self, kernel: Float[Array, "E i o"]):
        self._kernel = kernel
        self.shape = kernel.shape[1:]

    def arrays(self) -> dict[str, Array]:
        return {"kernel": self._kernel}

    def specs(self, split: str) -> dict[str, P]:
        return {"kernel": P("expert", "tensor", None) if split == "in" else P("expert", None, "tensor")}

    def product(self, rows: Array, arrays: dict[str, Array], group_sizes: Array, part: Part | None) -> Array:
        return grouped_matmul(rows, arrays["kernel"].astype(rows.dtype), group_sizes)


class SynthesisedKernels(Kernels):
    """A base [in, out], or none, and deltas; a kernel exists only while it is multiplied."""

    def __init__(self, base: Float[Array, "i o"] | None, delta: "Delta | JointLowRankDelta", shape: tuple[int, int]):
        self._base, self._delta, self.shape = base, delta, shape
        self._trained = frozenset(delta.trained())

    def arrays(self) -> dict[str, Array]:
        base = {} if self._base is None else {"base": self._base}
        return base | self._delta.trained() | self._delta.fixed()

    def specs(self, split: str) -> dict[str, P]:
        base = P("tensor", None) if split == "in" else P(None, "tensor")
        return ({} if self._base is None else {"base": base}) | self._delta.specs(split)

    def product(self, rows: Array, arrays: dict[str, Array], group_sizes: Array, part: Part | None) -> Array:
        trained = {name: array for name, array in arrays.items() if name in self._trained}
        fixed = {name: array for name, array in arrays.items() if name not in self._trained and name != "base"}
        if part is not None:
            fixed["origin"] = jnp.broadcast_to(part.origin[None, :], (group_sizes.shape[0], 2))
        form = self._delta.form(self.shape if part is None else part.shape)
        return synthesised_matmul(rows, arrays.get("base"), trained, fixed, group_sizes, form)


class NF4Kernels(Kernels):
    """Frozen kernels as NF4 leaves stacked over the experts; a kernel exists only while it is multiplied."""

    def __init__(self, leaves: dict[str, Array], shape: tuple[int, int]):
        self._leaves, self.shape = leaves, shape

    def arrays(self) -> dict[str, Array]:
        return self._leaves

    def specs(self, split: str) -> dict[str, P]:
        specs = {name: P("expert", *[None] * (leaf.ndim - 1)) for name, leaf in self._leaves.items()}
        if split == "in":
            return specs | {"codes": P("expert", "tensor", None)}
        return specs | {name: P("expert", None, "tensor") for name in ("codes", "scale_codes")}

    def product(self, rows: Array, arrays: dict[str, Array], group_sizes: Array, part: Part | None) -> Array:
        fixed, form = dict(arrays), NF4Form(self.shape, self.shape[1])
        if part is not None:
            fixed["origin"] = jnp.broadcast_to(part.origin[None, :], (group_sizes.shape[0], 2))
            form = NF4Form(part.shape, self.shape[1])
        return synthesised_matmul(rows, None, {}, fixed, group_sizes, form)


class KernelsWithLoRA(Kernels):
    """Any kernels, with `scale * a_e b_e` of every expert beside them: two thin grouped products more."""

    def __init__(self, kernels: Kernels, a: Float[Array, "E i r"], b: Float[Array, "E r o"], scale: float):
        self._kernels, self._factors, self._scale = kernels, {"lora_a": a, "lora_b": b}, scale
        self.shape = kernels.shape

    def arrays(self) -> dict[str, Array]:
        return self._kernels.arrays() | self._factors

    def specs(self, split: str) -> dict[str, P]:
        return self._kernels.specs(split) | {f"lora_{name}": spec for name, spec in low_rank_specs(split).items()}

    def product(self, rows: Array, arrays: dict[str, Array], group_sizes: Array, part: Part | None) -> Array:
        inner = {name: array for name, array in arrays.items() if name not in self._factors}
        a, b = arrays["lora_a"].astype(rows.dtype), arrays["lora_b"].astype(rows.dtype)
        thin = grouped_matmul(grouped_matmul(rows, a, group_sizes), b, group_sizes)
        return self._kernels.product(rows, inner, group_sizes, part) + thin * jnp.asarray(self._scale, rows.dtype)


def low_rank_specs(split: str) -> dict[str, P]:
    """How stacked low-rank factors lie on the mesh; see `Kernels.specs`."""
    if split == "in":
        return {"a": P("expert", "tensor", None), "b": P("expert", None, None)}
    return {"a": P("expert", None, None), "b": P("expert", None, "tensor")}


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
    mesh = jax.sharding.get_abstract_mesh()
    arrays = {name: kernel.arrays() for name, kernel in kernels.items()}
    biases = {name: bias.astype(x.dtype) for name, bias in biases.items()}
    if mesh.empty or mesh.size == 1:
        return grouped_ffn(x, routing, kernels, arrays, biases, activation, {})

    split_tokens = x.shape[0] % axes_size(mesh, *BATCH_AXES) == 0
    tokens = P(BATCH_AXES, None) if split_tokens else P(None, None)
    array_specs = {name: kernel.specs("in" if name == "down" else "out") for name, kernel in kernels.items()}
    bias_specs = {n: P("expert", None) if n == "down" else P("expert", "tensor") for n in biases}
    return jax.shard_map(
        partial(_local_experts, kernels, activation=activation, split_tokens=split_tokens),
        in_specs=(tokens, Routing(tokens, tokens), array_specs, bias_specs),
        out_specs=tokens,
        # The loops of the blocked product carry values whose replication the checker cannot follow.
        check_vma=False,
    )(x, routing, arrays, biases)


def axes_size(mesh: jax.sharding.AbstractMesh, *axes: str) -> int:
    """Into how many parts these axes of a mesh split something."""
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


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
    """What one device does: gather tokens, apply its own experts, give back its share of the sums."""
    if split_tokens:
        x, routing = jax.tree.map(lambda a: lax.all_gather(a, "expert", axis=0, tiled=True), (x, routing))
    mine = _num_experts(arrays)
    parts = {name: _part(kernel.shape, "in" if name == "down" else "out") for name, kernel in kernels.items()}
    local = routing._replace(experts=routing.experts - lax.axis_index("expert") * mine)
    if "down" in biases:
        # The down projection is summed over `tensor`: its bias must be counted once.
        biases = {**biases, "down": jnp.where(lax.axis_index("tensor") == 0, biases["down"], 0)}
    y = lax.psum(grouped_ffn(x, local, kernels, arrays, biases, activation, parts), "tensor")
    return lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True) if split_tokens else lax.psum(y, "expert")


def grouped_ffn(
    x: Float[Array, "T d"],
    routing: Routing,
    kernels: Mapping[str, Kernels],
    arrays: Mapping[str, dict[str, Array]],
    biases: Mapping[str, Float[Array, "E o"]],
    activation: str,
    parts: Mapping[str, Part],
) -> Float[Array, "T d"]:
    """Sorts tokens by expert, applies every expert to its group, and adds up the weighted outputs.

    Assignments to experts outside [0, E) contribute nothing. `arrays` are those of `kernels`, or of `parts` of them.
    """
    num_experts, top_k = _num_experts(arrays), routing.experts.shape[1]
    order = sort_by_expert(routing.experts, num_experts)
    rows = dispatch(x, order, top_k)

    def project(rows: Array, name: str) -> Array:
        y = kernels[name].product(rows, arrays[name], order.group_sizes, parts.get(name))
        return y + row_biases(biases[name], order.group_sizes, rows.shape[0]) if name in biases else y

    gate = project(rows, "gate") if "gate" in kernels else None
    h = hidden(project(rows, "up"), gate, activation)
    return combine(project(h, "down"), order, routing.weights)


def _part(shape: tuple[int, int], split: str) -> Part:
    """What this device has of a kernel that `tensor` splits along `in` or `out`."""
    shards, index = lax.axis_size("tensor"), lax.axis_index("tensor")
    if split == "in":
        rows = shape[0] // shards
        return Part((rows, shape[1]), jnp.stack([index * rows, 0]))
    columns = shape[1] // shards
    return Part((shape[0], columns), jnp.stack([0, index * columns]))


def _num_experts(arrays: Mapping[str, dict[str, Array]]) -> int:
    return next(array for name, array in arrays["up"].items() if name != "base").shape[0]
