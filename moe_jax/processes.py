"""Runs of several processes: every process makes the same calls, the first one touches files."""

import jax
from jax.experimental import multihost_utils


def is_first_process() -> bool:
    """Whether this process writes what only one should."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when every process has come here; `what` names the place in errors."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
