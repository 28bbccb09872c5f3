"""Joining a run of several processes. The environment says so: it is a matter of the machine, not of the recipe."""

import os

import jax

from moe_jax.errors import InputError

VARIABLE = "MOE_JAX_DISTRIBUTED"


def join_processes() -> None:
    """Joins the other processes if `MOE_JAX_DISTRIBUTED` is set; before anything else uses JAX.

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
