"""What is said before training starts."""

import rich.console

from moe_jax.loading import disk_paths
from moe_jax.peft.report import print_trained
from moe_jax.train.program import Program


def print_partition(console: rich.console.Console, program: Program) -> None:
    """Prints the parameters that the program trains; see `print_trained`."""
    trained = {leaf for path in program.trainable for leaf in disk_paths(program.config, path)}
    print_trained(console, program.config, trained)
