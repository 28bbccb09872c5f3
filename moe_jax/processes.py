"""Runs of several processes: every process makes the same calls, the first one touches files."""

import os

import jax
from jax.experimental import multihost_utils

from moe_jax.errors import InputError

VARIABLE = "MOE_JAX_DISTRIBUTED"


def join_processes() -> None:
    """Joins the other processes if `MOE_JAX_DISTRIBUTED` is set; call it before anything else uses JAX.

    An environment variable says so, because it is a matter of the machine and not of the recipe.

    `auto` leaves it to JAX, which knows TPU pods, Slurm, Open MPI and Kubernetes. Elsewhere it is
    `HOST:PORT,N,I`: where the first process listens, the number of processes, and which of them (from 0) this is.

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
    """Whether this process writes what only one should."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when every process has come here; `what` names the place in errors."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
