"""The mesh, as the hand-written parallel parts (`shard_map`) see it."""

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.functional.attention import Placement

BATCH_AXES = ("data", "fsdp", "expert")
"""The axes that split the batch."""


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


def splits_batch(mesh: jax.sharding.AbstractMesh, size: int) -> bool:
    """Whether `BATCH_AXES` divide a batch of this size."""
    return size % axes_size(mesh, *BATCH_AXES) == 0


def shard_batch(x: Float[Array, "B T d"]) -> Float[Array, "B T d"]:
    """Over a mesh, the batch is split over every axis but `tensor`, where it divides, and the rest is whole."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    split = x.shape[0] % axes_size(mesh, *BATCH_AXES) == 0
    return jax.lax.with_sharding_constraint(x, P(BATCH_AXES if split else None, None, None))


def shard_cache(cache: Float[Array, "B *H S w"]) -> Float[Array, "B *H S w"]:
    """Over a mesh, a cache is split like the batch, and its heads, if it has any, over `tensor`; where they divide."""
    mesh = current_mesh()
    if mesh is None:
        return cache
    rows = BATCH_AXES if splits_batch(mesh, cache.shape[0]) else None
    heads = ["tensor" if size % mesh.shape["tensor"] == 0 else None for size in cache.shape[1:-2]]
    return jax.lax.with_sharding_constraint(cache, P(rows, *heads, None, None))


def attention_placement(rows: int) -> Placement | None:
    """How attention of so many rows runs on the mesh in use; None: there is none, and the platform is not known."""
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    if mesh.empty or device is None:
        return None
    platform = "gpu" if device.platform == "cuda" else device.platform
    if mesh.size == 1:
        return Placement(platform)
    batch = BATCH_AXES if splits_batch(mesh, rows) else ()
    return Placement(platform, batch, "tensor", mesh.shape["tensor"], mesh.size)
