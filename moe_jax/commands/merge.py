"""`moe-jax merge ADAPTER OUT`: adds LoRA to its kernels, so that the model needs no base."""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from moe_jax.commands.options import command_options, given_to
from moe_jax.peft.spec import MergeSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Command:
    """Adds LoRA to the kernels (matrices) that it belongs to, and writes a model directory that needs no base.

    If the base was kept in 4 bits (NF4), LoRA is added to the dequantised kernels: the model computes what was trained.
    """

    models: ClassVar[tuple[str, ...]] = ("adapter", "base")
    made: ClassVar[tuple[str, ...]] = ("out",)

    adapter: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="ADAPTER")]
    """An adapter directory, a model directory with LoRA or NF4 kernels, or RUN@STEP: a checkpoint of a run."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Where the model directory appears; must not exist."""


Options = command_options(_Command, MergeSpec)
EXAMPLES = """
moe-jax merge lora-run/model merged-dir
"""


def run(options: _Command) -> None:
    """Merges, and prints what was merged and what was kept."""
    import moe_jax
    from moe_jax.distributed.processes import join_processes

    join_processes()
    merged = moe_jax.merge(options.adapter, options.out, given_to(MergeSpec, options)).report
    print(f"wrote {options.out}: LoRA folded into {merged.folded} kernels")
    if merged.dequantized:
        print(f"{merged.dequantized} kernels are those that their NF4 codes stand for, as they were in training")
    for kind in merged.kept:
        print(f"kept: {kind}")
