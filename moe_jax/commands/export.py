"""`moe-jax export SRC DST`: writes a model as a Hugging Face checkpoint or a GGUF file, or its LoRA for PEFT."""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from moe_jax.commands.options import check_sources, command_options, given_to
from moe_jax.conversion.spec import ExportSpec, check_gguf_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Command:
    """Writes a model as a Hugging Face checkpoint, which Transformers and others load, or as a GGUF file.

    Experts that share a base are written as full experts, because no such checkpoint knows a shared base.
    """

    models: ClassVar[tuple[str, ...]] = ("src", "base")
    made: ClassVar[tuple[str, ...]] = ("dst",)

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """The model: a model directory, an adapter directory, a Hugging Face directory, a GGUF file, RUN@STEP (a checkpoint
    of a training run), or org/name on the Hugging Face Hub."""
    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """Where the Hugging Face directory, or with --format gguf the file NAME.gguf, appears; must not exist."""
    dry_run: bool = False
    """Prints the mapping and sizes, and writes nothing."""

    @property
    def makes_file(self) -> bool:
        """Whether `dst` is a file, and no directory."""
        return getattr(self, "format", "checkpoint") == "gguf"

    def check(self) -> None:
        """Raises `InputError` for a name that a GGUF file cannot have."""
        if self.makes_file:
            check_gguf_name(self.dst)

    def check_places(self) -> None:
        """Raises an error for a source of a calibration that is not there."""
        check_sources(getattr(self, "calibrate", None))


Options = command_options(_Command, ExportSpec)
GROUPS = {
    "what is written": (
        "format",
        "gguf_type",
        "imatrix",
        "bits",
        "parts",
        "attention_bits",
        "dense_bits",
        "head_bits",
        "group_size",
        "zero_points",
        "calibrate",
        "save_imatrix",
        "samples",
        "seq_len",
        "calibration_seed",
        "dtype",
        "expert_layout",
        "dense_layers",
        "max_shard_size",
    ),
}
EXAMPLES = """
moe-jax export run/model hf-dir
# experts in 4 bits, for vLLM
moe-jax export moe-dir packed-dir --format compressed-tensors --bits 4
# the whole model in 4 bits, chosen by what a text gives it
moe-jax export moe-dir packed-dir --format compressed-tensors --parts model --calibrate text.txt
# experts in 3 bits, for GPTQModel and vLLM
moe-jax export moe-dir gptq-dir --format gptq --bits 3
# in about 5 bits, for llama.cpp
moe-jax export run/model model.gguf --format gguf --gguf-type Q4_K_M
# LoRA, for the PEFT library
moe-jax export lora-run/model peft-dir --format peft
"""


def run(options: _Command) -> None:
    """Exports the model."""
    from moe_jax.api.transforms import export, print_export

    (print_export if options.dry_run else export)(options.src, options.dst, given_to(ExportSpec, options))
