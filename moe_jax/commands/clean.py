"""`moe-jax clean DIR`: removes files that interrupted commands left."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True)
class Options:
    """Removes files of commands that were killed, or found a full disk, and that will not be given again."""

    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The target of the command, or the folder in which it was to make its target, such as a run directory."""


EXAMPLES = """
moe-jax clean moe-dir
moe-jax clean run
"""


def run(options: Options) -> None:
    """Removes the files, and prints which."""
    from moe_jax.core.formatting import show_bytes
    from moe_jax.files.staging import leftovers, remove_leftover

    found = leftovers(options.target)
    for folder in found:
        freed = remove_leftover(folder)
        print(f"removed what was written of {folder}" if freed is None else f"removed {folder}: {show_bytes(freed)}")
    if not found:
        print(f"nothing to remove: no interrupted command has left anything of {options.target}, or in it")
