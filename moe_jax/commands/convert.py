"""`moe-jax convert SRC DST`: a Hugging Face checkpoint, or a GGUF file, becomes a model directory."""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from moe_jax.commands.options import command_options, given_to
from moe_jax.conversion.spec import ConvertSpec
from moe_jax.files.storage_path import nearest_path
from moe_jax.model_io.model_names import is_absent, why_a_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Command:
    """Reads a Hugging Face checkpoint or a GGUF file, tensor by tensor, and writes it as a model directory."""

    made: ClassVar[tuple[str, ...]] = ("dst",)

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """Hugging Face directory: config.json, and safetensors or PyTorch files. Or a GGUF file; or ORG/NAME[@REVISION], a
    model on the Hugging Face Hub."""
    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """Where the model directory appears; must not exist."""
    dry_run: bool = False
    """Prints the mapping and sizes, and writes nothing; SRC may then be a config.json without weights."""

    def check_places(self) -> None:
        """Raises an error if there is nothing to convert."""
        if is_absent(self.src):
            expected = "expected a Hugging Face directory or a GGUF file"
            hint = why_a_path(self.src) + nearest_path(self.src)
            raise FileNotFoundError(f"there is nothing at {self.src}; {expected}{hint}")


Options = command_options(_Command, ConvertSpec)
EXAMPLES = """
# keeps the dtypes of the checkpoint, bit for bit
moe-jax convert SmolLM2-135M-Instruct smollm
# a model whose config only names its image encoder
moe-jax convert MoE-LLaVA-Phi2-2.7B-4e moe-llava --vision-tower clip-vit-large-patch14-336
# what goes where, from a config alone
moe-jax convert mixtral-dir/config.json model-dir --dry-run
"""


def run(options: _Command) -> None:
    """Converts the checkpoint."""
    import moe_jax
    from moe_jax.conversion import convert
    from moe_jax.distributed.processes import join_processes

    join_processes()
    spec = given_to(ConvertSpec, options)
    if options.dry_run:
        convert(options.src, options.dst, spec, dry_run=True)
    else:
        moe_jax.convert(options.src, options.dst, spec)
