"""What each of several processes has found out, heard by all."""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def gathered(said: Any) -> list[Any]:
    """What every process says, in the order of the processes. All make the call.

    Args:
      said: what JSON can hold.
    """
    if jax.process_count() == 1:
        return [said]
    content = np.frombuffer(json.dumps(said).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int64(content.size))).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: content.size] = content
    rows = np.asarray(multihost_utils.process_allgather(padded), np.uint8).reshape(len(sizes), -1)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)]
