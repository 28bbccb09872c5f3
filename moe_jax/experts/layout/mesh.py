"""The mesh, as the hand-written parallel parts (`shard_map`) see it."""

from collections.abc import Mapping

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

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
    (`experts.parallel.over_mesh`). What `fsdp` splits is split over `sequence` as well, where that divides it.

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


def shard_cache(cache: Float[Array, "B *H S w"]) -> Float[Array, "B *H S w"]:
    """Over a mesh, a cache is split like the batch, and its heads, if it has any, over `tensor`; where they divide."""
    mesh = current_mesh()
    if mesh is None:
        return cache
    rows = BATCH_AXES if splits_batch(mesh, cache.shape[0]) else None
    heads = ["tensor" if size % mesh.shape["tensor"] == 0 else None for size in cache.shape[1:-2]]
    return jax.lax.with_sharding_constraint(cache, P(rows, *heads, None, None))


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
