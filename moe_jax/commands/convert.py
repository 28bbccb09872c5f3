"""`moe-jax convert SRC DST`: a Hugging Face checkpoint, or a GGUF file, becomes a model directory."""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from moe_jax.commands import optional


@dataclasses.dataclass(frozen=True)
class Options:
    """Reads a Hugging Face checkpoint or a GGUF file, tensor by tensor, and writes it as a model directory."""

    in_buckets: ClassVar[tuple[str, ...]] = ("src", "dst")

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """Hugging Face directory: config.json, and safetensors or PyTorch files. Or a GGUF file; or ORG/NAME[@REVISION], a
    model on the Hugging Face Hub."""
    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """Where the model directory appears; must not exist."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of all parameters; by default each keeps its own, bit for bit, and quantised ones become float32."""
    ignore_keys: Annotated[str | None, optional("KEY,KEY,...")] = None
    """Keys of config.json that this library does not know, and that you know to change nothing; by default they are
    refused."""
    allow_nonfinite: bool = False
    """Goes on where weights are NaN or infinite, instead of refusing."""
    dry_run: bool = False
    """Prints the mapping and sizes, and writes nothing; SRC may then be a config.json without weights."""


EXAMPLES = """
# keeps the dtypes of the checkpoint, bit for bit
moe-jax convert SmolLM2-135M-Instruct smollm
# what goes where, from a config alone
moe-jax convert mixtral-dir/config.json model-dir --dry-run
"""


def run(options: Options) -> None:
    """Converts the checkpoint.

    Raises:
      InputError: if the checkpoint is damaged or does not fit its config, weights are not finite, or DST exists.
    """
    from moe_jax.conversion import convert
    from moe_jax.distributed.processes import join_processes

    join_processes()
    convert(
        options.src,
        options.dst,
        dtype=options.dtype,
        ignore_keys=options.ignore_keys.split(",") if options.ignore_keys else (),
        allow_nonfinite=options.allow_nonfinite,
        dry_run=options.dry_run,
    )
