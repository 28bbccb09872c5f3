"""Gathers values, arrays and bytes from all processes to all processes."""

import io
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from moe_jax.distributed.processes import meet
from moe_jax.functional.buckets import bucket


def gathered(said: Any) -> list[Any]:
    """Returns the values of all processes, in the order of the processes. Every process makes the call.

    Args:
      said: this process's value, JSON-able.
    """
    if jax.process_count() == 1:
        return [said]
    return [json.loads(content) for content in gathered_bytes(json.dumps(said).encode())]


def gathered_arrays(said: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of all processes, each of which has its own names. Every process makes the call.

    Args:
      said: this process's arrays, by name, that NumPy can write without pickling.
    """
    if jax.process_count() == 1:
        return dict(said)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{f"{number}": array for number, array in enumerate(said.values())})
    found: dict[str, np.ndarray] = {}
    for names, content in zip(gathered(list(said)), gathered_bytes(file.getvalue()), strict=True):
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            found |= {name: arrays[f"{number}"] for number, name in enumerate(names)}
    return found


def gathered_bytes(said: bytes) -> list[bytes]:
    """Returns the bytes of all processes, in the order of the processes. Every process makes the call."""
    if jax.process_count() == 1:
        return [said]
    meet()
    content = np.frombuffer(said, np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(content.size))).reshape(-1)
    padded = np.zeros(bucket(int(sizes.max())), np.uint8)  # few sizes, and so few programs
    padded[: content.size] = content
    rows = np.asarray(multihost_utils.process_allgather(padded), np.uint8).reshape(len(sizes), -1)
    return [row[:size].tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]
