"""What the hand-written parallel parts know of the mesh."""

import jax

BATCH_AXES = ("data", "fsdp", "expert")
"""Axes that split the batch."""


def current_mesh() -> jax.sharding.AbstractMesh | None:
    """The mesh in use; None if there is one device only."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def axes_size(mesh: jax.sharding.AbstractMesh, *axes: str) -> int:
    """Into how many parts these axes of a mesh split something."""
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def splits_batch(mesh: jax.sharding.AbstractMesh, size: int) -> bool:
    """Whether a batch of this size can be split over its axes."""
    return size % axes_size(mesh, *BATCH_AXES) == 0
