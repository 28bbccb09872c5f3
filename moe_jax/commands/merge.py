"""`moe-jax merge ADAPTER OUT`: adds LoRA to its kernels, so that the model needs no base."""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from moe_jax.commands import BaseFlag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(BaseFlag):
    """Adds LoRA to the kernels (matrices) that it belongs to, and writes a model directory that needs no base.

    If the base was kept in 4 bits (NF4), LoRA is added to the dequantised kernels: the model computes what was trained.
    """

    in_buckets: ClassVar[tuple[str, ...]] = ("adapter", "out", "base")

    adapter: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="ADAPTER")]
    """An adapter directory, a model directory with LoRA or NF4 kernels, or RUN@STEP: a checkpoint of a run."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Where the model directory appears; must not exist."""
    partly: bool = False
    """Keeps adapters that cannot be merged (PESC, PERFT) as they are, instead of refusing."""
    allow_nonfinite: bool = False
    """Goes on where weights are NaN or infinite, instead of refusing."""


EXAMPLES = """
moe-jax merge lora-run/model merged-dir
"""


def run(options: Options) -> None:
    """Merges, and prints what was merged and what was kept.

    Raises:
      FileNotFoundError, InputError: bad input; see `moe_jax.peft.merge`.
    """
    from moe_jax.core.terminal import progress_bars
    from moe_jax.distributed.processes import first_decides, is_first_process, join_processes
    from moe_jax.files.staging import check_target
    from moe_jax.peft.merge import merge

    join_processes()
    # Check this before opening the source: fingerprinting a large base takes a while.
    first_decides(lambda: check_target(options.out, buckets=True))
    source = options.open(options.adapter)
    with progress_bars(shown=is_first_process()) as progress:
        merged = merge(
            source, options.out, partly=options.partly, allow_nonfinite=options.allow_nonfinite, progress=progress
        )
    print(f"wrote {options.out}: LoRA folded into {merged.folded} kernels")
    if merged.dequantized:
        print(f"{merged.dequantized} kernels are those that their NF4 codes stand for, as they were in training")
    for kind in merged.kept:
        print(f"kept: {kind}")
