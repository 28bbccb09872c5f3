"""The batches of a run on the devices of a mesh, up to the end of the data.

Apart from `placement` because it imports Grain, which commands that do not train should not load.
"""

from collections.abc import Mapping
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.distributed.sharding import local_rows, merge_positions, place


class BatchesOnDevices:
    """The batches of the data as global arrays, up to the end of the data.

    With several processes, only all of them together know whether any has data left. They find out one batch ahead, by
    a program of its own that the devices run before the step, so that no process waits for the answer before a step.

    Args:
      data: local rows of endless batches, padding after the last record.
      mesh: the batches are put on its devices.
      batch_size: B.
      ends: whether the batches end with the data; False: it is repeated for ever.
    """

    def __init__(self, data: grain.DatasetIterator, mesh: Mesh, batch_size: int, *, ends: bool):
        self._data, self._mesh, self._batch_size, self._ends = data, mesh, batch_size, ends
        self._rows = local_rows(mesh, batch_size)
        self._asks = ends and jax.process_count() > 1
        # The batch after the last one returned, with the answer, and the position before it.
        self._ahead: tuple[dict[str, jax.Array], jax.Array] | None = None
        self._before: dict[str, Any] | None = None
        self._any = jax.jit(lambda ids: jnp.any(ids > 0), out_shardings=NamedSharding(mesh, P()))

    def next(self) -> dict[str, jax.Array] | None:
        """Returns the next batch; None: the data has ended. Every process makes this call."""
        if not self._asks:
            batch = next(self._data)
            return None if self._ends and not batch["segment_ids"].any() else self._placed(batch)
        batch, holds_some = self._ahead or self._read()
        self._before = self._data.get_state()
        self._ahead = self._read()
        return batch if bool(holds_some) else None

    def position(self) -> dict[str, Any]:
        """Returns the data position after the batches returned so far, for all rows. Every process makes this call."""
        return merge_positions(self._before or self._data.get_state(), self._batch_size)

    def _read(self) -> tuple[dict[str, jax.Array], jax.Array]:
        batch = self._placed(next(self._data))
        return batch, self._any(batch["segment_ids"])

    def _placed(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        return place(batch, self._rows, self._mesh, self._batch_size)
