"""Batches on the devices of a mesh, and their communication between processes."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import batch_spec


def batch_sharding(mesh: Mesh, length: int) -> NamedSharding:
    """Returns the sharding of an array [B, length] of a batch; rows are whole if `sequence` does not divide them."""
    rows, tokens = batch_spec()
    return NamedSharding(mesh, P(rows, None if length % mesh.shape["sequence"] else tokens))


def batch_shards(mesh: Mesh) -> int:
    """Returns the number of parts into which the rows of a batch are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]


def check_batch_divides(mesh: Mesh, batch_size: int, accumulation: int) -> None:
    """Raises `InputError` unless every device gets the same number of rows of every microbatch."""
    shards = batch_shards(mesh)
    if batch_size // accumulation % shards:
        raise InputError(
            f"train.batch_size = {batch_size} in {accumulation} microbatches leaves {batch_size // accumulation} "
            f"sequences for the {shards} parts of the mesh (data x fsdp x expert); make it a multiple of "
            f"{shards * accumulation}"
        )


def local_rows(mesh: Mesh, batch_size: int) -> list[int]:
    """Returns the rows of the global batch that the devices of this process hold, sorted."""
    rows = np.zeros(batch_size, bool)
    for index in batch_sharding(mesh, 1).addressable_devices_indices_map((batch_size, 1)).values():
        assert index is not None
        rows[index[0]] = True
    return np.flatnonzero(rows).tolist()


def place(batch: Mapping[str, np.ndarray], rows: list[int], mesh: Mesh, batch_size: int) -> dict[str, jax.Array]:
    """Makes global arrays [B, ...] from the rows that this process holds.

    Args:
      batch: arrays [R, T], the given rows of the global batch.
      rows: their numbers, from `local_rows`.
      mesh: the mesh to put them on.
      batch_size: B.
    """
    place_of = {row: i for i, row in enumerate(rows)}

    def one(local: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            return local[[place_of[row] for row in range(*index[0].indices(batch_size))], index[1]]

        sharding = batch_sharding(mesh, local.shape[1])
        return jax.make_array_from_callback((batch_size, *local.shape[1:]), sharding, shard)

    return {key: one(array) for key, array in batch.items()}


def merge_positions(state: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """Returns the data position of the whole batch, from those of each process's rows (see `PackedBatches`)."""
    if jax.process_count() == 1:
        return dict(state)
    table = np.full((batch_size, 2), -1, np.int64)
    for row, position in state["rows"].items():
        table[int(row)] = position
    # As int32 pairs: JAX would truncate int64.
    gathered = np.asarray(multihost_utils.process_allgather(table.view(np.int32)))
    rows = gathered.view(np.int64).max(axis=0)
    return {**state, "rows": {str(row): position for row, position in enumerate(rows.tolist())}}
