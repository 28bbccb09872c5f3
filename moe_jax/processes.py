"""Runs with several processes: every process makes the same calls, and the first one writes files."""

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from moe_jax.errors import InputError

T = TypeVar("T")

VARIABLE = "MOE_JAX_DISTRIBUTED"


def join_processes() -> None:
    """Joins the other processes if `MOE_JAX_DISTRIBUTED` is set; call it before anything else uses JAX.

    This is an environment variable because it depends on the machine and not on the recipe. With the value `auto`, JAX
    detects TPU pods, Slurm, Open MPI and Kubernetes. Elsewhere it is `HOST:PORT,N,I`: the address of the first process,
    the number of processes, and the index of this one, from 0.

    Raises:
      InputError: if the variable is neither.
    """
    value = os.environ.get(VARIABLE)
    if not value:
        return
    if value == "auto":
        jax.distributed.initialize()
        return
    try:
        address, count, index = value.split(",")
        count, index = int(count), int(index)
    except ValueError:
        raise InputError(f"{VARIABLE}={value}: expected auto, or HOST:PORT,PROCESSES,INDEX") from None
    jax.distributed.initialize(address, count, index)


def has_joined() -> bool:
    """Whether there are other processes, which wait for this one."""
    return jax.process_count() > 1


def is_first_process() -> bool:
    """Whether this is the process that writes files."""
    return jax.process_index() == 0


def first_decides(action: Callable[[], T]) -> T:
    """Does something in the first process; all return what it returned, or raise what it raised.

    What a process sees of a disk may be another's yesterday, and one that stops alone leaves the others waiting. So
    the first process looks, decides and writes.

    Args:
      action: returns what JSON can hold. A tuple comes back as a list in the other processes.

    Raises:
      InputError, OSError: as the first process did.
      RuntimeError: in the other processes, for any other exception in the first.
    """
    if jax.process_count() == 1:
        return action()
    if not is_first_process():
        return _hear()
    try:
        result = action()
    except BaseException as error:
        number = error.errno if isinstance(error, OSError) else None
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
        _tell({"kind": kind, "message": str(error), "errno": number})
        raise
    _tell({"result": result})
    return result


_KINDS = {"InputError": InputError, "FileNotFoundError": FileNotFoundError, "OSError": OSError}


def _tell(said: Any) -> None:
    content = np.frombuffer(json.dumps(said).encode(), np.uint8)
    multihost_utils.broadcast_one_to_all(np.int64(content.size))
    multihost_utils.broadcast_one_to_all(content)


def _hear() -> Any:
    size = int(multihost_utils.broadcast_one_to_all(np.int64(0)))
    content = multihost_utils.broadcast_one_to_all(np.zeros(size, np.uint8))
    said = json.loads(np.asarray(content, np.uint8).tobytes())
    if "kind" not in said:
        return said["result"]
    message = f"the first process: {said['message']}"
    if said["errno"] is not None:
        raise OSError(said["errno"], message)
    raise _KINDS.get(said["kind"], RuntimeError)(message)


def wait_for_all(what: str) -> None:
    """Returns when every process has called this; `what` names the barrier in errors."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
