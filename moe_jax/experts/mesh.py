"""The mesh, as the hand-written parallel parts (`shard_map`) see it."""

import jax

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
