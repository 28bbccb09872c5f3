"""`moe-jax attach MODEL OUT --tower DIR`: an image encoder before a language model."""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from moe_jax.commands.options import command_options, given_to
from moe_jax.upcycling.attach_spec import AttachSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Command:
    """Puts an image encoder before a language model, with a fresh projector between them, and writes a model directory.

    The model then takes pictures; what they mean to it, its projector has still to learn.
    """

    models: ClassVar[tuple[str, ...]] = ("model",)
    made: ClassVar[tuple[str, ...]] = ("out",)

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """The language model."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Where the model that takes pictures appears; must not exist."""


Options = command_options(_Command, AttachSpec)
EXAMPLES = """
moe-jax attach smollm seeing --tower clip-vit-large-patch14-336 --placeholder "<filename>"
# 16 tokens for a picture
moe-jax attach smollm seeing --tower dinov2-small --projector pixel_shuffle:4,linear,gelu,linear --pictures DIR
"""


def run(options: _Command) -> None:
    """Attaches the encoder, and prints what was added."""
    import moe_jax
    from moe_jax.distributed.processes import join_processes

    join_processes()
    model = moe_jax.attach(options.model, options.out, given_to(AttachSpec, options))
    made = model.report
    print(f"wrote {options.out}: an image encoder of {made.tower:,} parameters, and a projector of {made.projector:,}")
    print(f"a picture becomes {made.tokens:,} tokens")
    if model.tokenizer is not None and model.tokenizer.bos is None and model.config.bos_id is not None:
        print(
            "note: the tokenizer puts no BOS before texts, and many models hardly see a picture that comes first; let "
            "the chat template begin with {{ bos_token }}"
        )
