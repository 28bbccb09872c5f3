"""`moe-jax export SRC DST`: writes a model as a Hugging Face checkpoint, or its LoRA for the PEFT library."""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from moe_jax.commands import BaseFlag, optional
from moe_jax.core.errors import InputError, flag_of


@dataclasses.dataclass(frozen=True)
class Options(BaseFlag):
    """Writes a model as a Hugging Face checkpoint, which Transformers and others load.

    Experts that share a base are written as full experts, because no such checkpoint knows a shared base.
    """

    in_buckets: ClassVar[tuple[str, ...]] = ("src", "dst", "base")

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """The model: a model directory, an adapter directory, a Hugging Face directory, a GGUF file, RUN@STEP (a checkpoint
    of a training run), or org/name on the Hugging Face Hub."""
    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """Where the Hugging Face directory appears; must not exist."""
    max_shard_size: Annotated[str | None, optional("SIZE", "5GB, in a bucket 500MB")] = None
    """Largest size of a file, such as 5GB, 500MB or 2GiB. In a bucket, a few of them are in memory at a time."""
    expert_layout: Literal["per-expert", "fused"] = "per-expert"
    """One tensor per expert, as on the hub; or fused tensors, which only Transformers 5 and later read."""
    dense_layers: Literal["replicate", "refuse"] = "replicate"
    """What to do with dense layers if a format needs an MoE in every layer: store equal experts; or take another format
    that holds the model, or stop."""
    format: Literal["checkpoint", "compressed-tensors", "peft"] = "checkpoint"
    """A checkpoint of the whole model; the same with experts in codes, which Transformers and vLLM load; or the LoRA of
    an adapter directory, for the PEFT library."""
    bits: Annotated[Literal[4, 8] | None, optional("4|8", "those that the experts have, or 4")] = None
    """With --format compressed-tensors: of the codes. Experts that are such codes already keep them; others are
    rounded."""
    group_size: Annotated[int | None, optional("INT", "that of the experts, or 128")] = None
    """With --format compressed-tensors: inputs that share a scale."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of all tensors; by default each keeps its own, bit for bit."""
    allow_nonfinite: bool = False
    """Goes on where weights are NaN or infinite, instead of refusing."""
    dry_run: bool = False
    """Prints the mapping and sizes, and writes nothing."""


GROUPS = {
    "what is written": (
        "format",
        "bits",
        "group_size",
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
# LoRA, for the PEFT library
moe-jax export lora-run/model peft-dir --format peft
"""


def run(options: Options) -> None:
    """Exports the model.

    Raises:
      InputError: if no Hugging Face format can hold the model, weights are not finite, or DST exists.
    """
    from moe_jax.conversion import export, export_peft

    if options.format == "peft":
        _check_only_format(options)
        export_peft(options.open(options.src), options.dst, allow_nonfinite=options.allow_nonfinite)
        return
    packed = None
    if options.format == "compressed-tensors":
        from moe_jax.api.packed import packed_experts

        packed = packed_experts(options.bits, options.group_size)
    elif options.bits is not None or options.group_size is not None:
        raise InputError("--bits and --group-size: only with --format compressed-tensors")
    export(
        options.open(options.src),
        options.dst,
        packed=packed,
        max_shard_size=options.max_shard_size,
        expert_layout=options.expert_layout,
        dense_layers=options.dense_layers,
        dtype=options.dtype,
        allow_nonfinite=options.allow_nonfinite,
        dry_run=options.dry_run,
    )


def _check_only_format(options: Options) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(options)}
    known = ("src", "dst", "base", "format", "allow_nonfinite")
    given = [name for name, default in fields.items() if name not in known and getattr(options, name) != default]
    if given:
        names = ", ".join(map(flag_of, given))
        raise InputError(f"{names}: does not go with --format peft, which writes LoRA as it is stored")
