"""Runs with several processes: every process makes the same calls, and the first one writes files."""

import os

import jax
from jax.experimental import multihost_utils

from moe_jax.errors import InputError

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


def is_first_process() -> bool:
    """Whether this is the process that writes files."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when every process has called this; `what` names the barrier in errors."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
