"""`moe-jax demo`: every step from training to export on a small model, offline, in minutes."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Options:
    """Trains a small model on Python's own source, upcycles it, trains on, merges, exports, and compares."""

    dir: Path = Path("moe-jax-demo")
    """Where everything goes; a folder made by an earlier demo is replaced."""
    dense_steps: int = 180
    """Training steps of the dense model."""
    more_steps: int = 70
    """Training steps that every model gets after it."""


def run(options: Options) -> None:
    """Runs the demo.

    Raises:
      InputError: if the folder holds something else, or steps are below 1.
    """
    import rich.console

    from moe_jax.demo import run_demo
    from moe_jax.errors import InputError

    if options.dense_steps < 1 or options.more_steps < 1:
        raise InputError(f"steps must be at least 1, got {options.dense_steps} and {options.more_steps}")
    run_demo(
        options.dir,
        dense_steps=options.dense_steps,
        more_steps=options.more_steps,
        # The commands print on standard output; the console must not hold back lines between them.
        console=rich.console.Console(soft_wrap=True),
    )
