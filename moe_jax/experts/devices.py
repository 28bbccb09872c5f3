"""The devices that a program is for: the mesh, as parts written by hand (`shard_map`) see it, and what a chip costs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.core.data_sheets import CHIPS, Chip, chip_of_kind
from moe_jax.experts.shapes import Arrays, Matrix, Part
from moe_jax.functional.attention import Placement

BATCH_AXES = ("data", "fsdp", "expert")
"""The axes that split the rows of a batch."""
TOKEN_AXES = (*BATCH_AXES, "sequence")
"""The axes that split the tokens of a batch."""


def current_mesh() -> jax.sharding.AbstractMesh | None:
    """The mesh in use; None if there is only one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def axes_size(mesh: jax.sharding.AbstractMesh, *axes: str) -> int:
    """The number of parts into which these axes of a mesh split an array."""
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def spec_on_mesh(spec: P, shape: tuple[int, ...], mesh: Mapping[str, int]) -> P:
    """How a parameter is split over a mesh whose axes have these sizes.

    Experts that `expert` does not divide are on every device, which computes with its share of them
    (`experts.over_mesh`). What `fsdp` splits is split over `sequence` as well, where that divides it.

    Args:
      spec: over a mesh that divides everything.
      shape: of the parameter.
      mesh: size of every axis; absent ones are 1.
    """

    def over(axis: str | None, size: int) -> str | tuple[str, ...] | None:
        if axis == "expert" and size % mesh.get("expert", 1):
            return None
        sequence = mesh.get("sequence", 1)
        if axis == "fsdp" and sequence > 1 and size % (mesh.get("fsdp", 1) * sequence) == 0:
            return ("fsdp", "sequence")
        return axis

    return P(*(over(axis, size) for axis, size in zip(spec, shape, strict=False)))


def splits_batch(mesh: jax.sharding.AbstractMesh, size: int) -> bool:
    """Whether `BATCH_AXES` divide a batch of this size."""
    return size % axes_size(mesh, *BATCH_AXES) == 0


def token_axes(mesh: jax.sharding.AbstractMesh, tokens: int) -> tuple[str, ...]:
    """The axes that split an array of so many tokens [T, d], the tokens of all rows of a batch; none: it is whole.

    Tokens of a batch with one row for each device along `BATCH_AXES` stay where they are. With more rows the compiler
    gathers those that `sequence` splits.
    """
    return next((axes for axes in (TOKEN_AXES, BATCH_AXES) if tokens % axes_size(mesh, *axes) == 0), ())


def sequence_axis(mesh: jax.sharding.AbstractMesh, length: int) -> str | None:
    """The axis that splits sequences of this length; None: every device has them as a whole."""
    size = mesh.shape["sequence"]
    return "sequence" if size > 1 and length % size == 0 else None


def shard_batch(x: Float[Array, "B T d"]) -> Float[Array, "B T d"]:
    """Over a mesh, rows and sequences are split over every axis but `tensor`, where that divides; the rest is whole."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    rows = BATCH_AXES if splits_batch(mesh, x.shape[0]) else None
    return jax.lax.with_sharding_constraint(x, P(rows, sequence_axis(mesh, x.shape[1]), None))


def shard_cache(cache: Float[Array, "... S w"], *, of_layers: bool = False) -> Float[Array, "... S w"]:
    """Over a mesh, a cache is split like the batch, and its heads, if it has any, over `tensor`; where they divide.

    Args:
      cache: to be split.
      of_layers: whether it has a leading axis of layers, which is not split.
    """
    mesh = current_mesh()
    if mesh is None:
        return cache
    layers, (batch, *heads) = [None] * of_layers, cache.shape[of_layers:-2]
    rows = BATCH_AXES if splits_batch(mesh, batch) else None
    split = ["tensor" if size % mesh.shape["tensor"] == 0 else None for size in heads]
    return jax.lax.with_sharding_constraint(cache, P(*layers, rows, *split, None, None))


def attention_placement(rows: int, length: int) -> Placement | None:
    """How attention of a batch runs on the mesh in use; None: there is none, and the platform is not known.

    Args:
      rows: of the batch.
      length: queries of a row.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    if mesh.empty or device is None:
        return None
    platform = "gpu" if device.platform == "cuda" else device.platform
    if mesh.size == 1:
        return Placement(platform)
    batch = BATCH_AXES if splits_batch(mesh, rows) else ()
    sequence = sequence_axis(mesh, length)
    heads = ("tensor",) if sequence is None else ("tensor", sequence)
    return Placement(platform, batch, heads, axes_size(mesh, *heads), mesh.size, sequence)


class Cost(NamedTuple):
    """Estimated seconds of a way to apply experts, at the peak of the chip.

    Attributes:
      products: in its matrix unit.
      reading: bytes that come from memory or go there.
      making: entries of kernels that are made of what is stored.
    """

    products: float
    reading: float = 0.0
    making: float = 0.0

    @property
    def total(self) -> float:
        """As if one part followed the other: a platform may do them at the same time, but what is less is better."""
        return sum(self)

    @property
    def bound(self) -> str:
        """The part that takes longest: `products`, `bytes`, or `making` of kernels."""
        return max(zip(self, ("products", "bytes", "making"), strict=True))[1]

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost(*(one + two for one, two in zip(self, other, strict=True)))


class Platform(NamedTuple):
    """A chip, the size of numbers on it, and the seconds that single entries take: a choice depends on these.

    Attributes:
      chip: with its peaks, from its maker.
      itemsize: bytes of a number, of activations and of parameters.
      sparse_entry: to multiply a row with one entry of a sparse kernel; None: nothing does this there, and such a
        product makes dense kernels (`functional.sparse.by_entry`).
      scatter: to write one entry of a sparse kernel into a tile.
      gather: to look up one entry of a kernel whose positions are a bitmap.
      unpack: to unpack one code.
    """

    chip: Chip
    itemsize: int
    sparse_entry: float | None
    scatter: float
    gather: float
    unpack: float

    @classmethod
    def of(cls, chip: Chip, itemsize: int) -> "Platform":
        """A chip that multiplies numbers of so many bytes."""
        return cls(chip, itemsize, *_PER_ENTRY[chip.platform](chip))

    @property
    def operations_per_byte(self) -> float:
        """Operations that are done in the time in which one byte is moved."""
        return self.chip.operations_per_second(self.itemsize) / self.chip.bandwidth

    def products(self, operations: float) -> Cost:
        """Returns the cost of so many operations in the matrix unit."""
        return Cost(operations / self.chip.operations_per_second(self.itemsize))

    def reading(self, moved: float) -> Cost:
        """Returns the cost of moving so many bytes."""
        return Cost(0.0, moved / self.chip.bandwidth)


# Seconds per entry: `sparse_entry`, `scatter`, `gather`, `unpack`. On CPU: measured. On accelerators: estimated, not
# measured; for a single entry a GPU moves a sector of 32 bytes, or a quarter of it where neighbours share one, and a
# TPU core takes some nanosecond, which is its vector unit's doing and much the same in all generations.
_PER_ENTRY = {
    "cpu": lambda chip: (3.2e-9, 6.8e-9, 1.05e-9, 0.53e-9),
    "gpu": lambda chip: (None, 32 / chip.bandwidth, 8 / chip.bandwidth, 1 / chip.bandwidth),
    "tpu": lambda chip: tuple(seconds / chip.cores for seconds in (1.2e-9, 1.2e-9, 1.2e-10, 1.2e-12)),
}
# What a device that the table of chips lacks is taken for.
_BY_PLATFORM = {"cpu": "cpu", "tpu": "v5e"}


def current_chip() -> Chip:
    """Returns the chip that the program being traced will run on: of the mesh in use, or else of JAX's default backend.

    A device that the table of chips lacks counts as a v5e if it is a TPU, and as an H100 if it is no CPU.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        kind, platform = device.device_kind, device.platform
    else:
        platform = jax.default_backend()
        kind = platform if platform == "cpu" else jax.local_devices()[0].device_kind
    return chip_of_kind(kind) or CHIPS[_BY_PLATFORM.get(platform, "h100")]


Multiply = Callable[[Array, dict[str, Array], Part | None], Array]
"""`multiply(x, arrays, part)`: x [..., i] -> [..., o]; `part` is what the arrays describe, None: the whole kernel."""


def sharded_product(
    x: Float[Array, "... i"], arrays: Arrays, matrix: Matrix, specs: Mapping[str, P], multiply: Multiply, *, unit: int
) -> Float[Array, "... o"]:
    """`x W`, in the dtype of `x`; on one device, or over a mesh with the part of the kernel that each device holds.

    Args:
      x: activations [T, i], or [B, ..., i].
      arrays: of the kernel, not stacked.
      matrix: the kernel.
      specs: how `tensor` splits each array.
      multiply: the product of one device.
      unit: rows whose codes fill whole bytes: a part begins with such a row.
    """
    mesh = current_mesh()
    if mesh is None:
        return multiply(x, dict(arrays), None)
    shards, (rows, columns) = mesh.shape["tensor"], matrix.shape
    # Whatever cannot be split so, every device multiplies with as a whole.
    is_split = shards > 1 and not (columns % shards if matrix.split == "out" else rows % (unit * shards))
    axis = "tensor" if is_split else None
    if x.ndim == 2:
        axes: list[Any] = [token_axes(mesh, x.shape[0])]
    else:
        rows_of_batch = BATCH_AXES if splits_batch(mesh, x.shape[0]) else None
        axes = [rows_of_batch, sequence_axis(mesh, x.shape[1]), *[None] * (x.ndim - 3)]
    array_specs = {name: specs[name] if is_split else P(*[None] * array.ndim) for name, array in arrays.items()}
    sums = is_split and matrix.split == "in"
    x_spec = P(*axes, axis if sums else None)
    y_spec = P(*axes, None if matrix.split == "in" else axis)

    def on_device(x: Array, arrays: dict[str, Array]) -> Array:
        y = multiply(x, arrays, part_here(matrix) if is_split else None)
        return lax.psum(y, "tensor") if sums else y

    # The loops over tiles carry values whose replication the checker cannot follow.
    return jax.shard_map(on_device, in_specs=(x_spec, array_specs), out_specs=y_spec, check_vma=False)(x, dict(arrays))


def part_here(matrix: Matrix) -> Part:
    """The part of a kernel that this device holds; inside `shard_map`."""
    shards, index = lax.axis_size("tensor"), lax.axis_index("tensor")
    fan_in, fan_out = matrix.shape
    if matrix.split == "in":
        return Part((fan_in // shards, fan_out), jnp.stack([index * (fan_in // shards), 0]))
    return Part((fan_in, fan_out // shards), jnp.stack([0, index * (fan_out // shards)]))
