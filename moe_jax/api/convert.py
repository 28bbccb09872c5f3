"""Conversion from and to other libraries' formats."""

import os
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from moe_jax.api.model import Model, ModelOrPath, OutPath, destination, open_model, result
from moe_jax.api.verb import file_verb, model_verb
from moe_jax.conversion.from_hugging_face import convert as _convert
from moe_jax.conversion.packed_experts import Codes, Packing
from moe_jax.conversion.spec import ConvertSpec, ExportSpec
from moe_jax.conversion.to_hugging_face import Pack
from moe_jax.conversion.to_hugging_face import export as _export
from moe_jax.conversion.to_peft import export_peft as _export_peft
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import shows_work
from moe_jax.files.storage_path import as_path


@model_verb(ConvertSpec)
def convert(src: ModelOrPath, out: OutPath, spec: ConvertSpec) -> Model:
    """Reads a Hugging Face checkpoint or a GGUF file, tensor by tensor.

        >>> checkpoint = moe_jax.export(moe_jax.tiny_model(), folder / "checkpoint")
        >>> moe_jax.convert(checkpoint, folder / "model").path.name
        'model'
        >>> moe_jax.convert(checkpoint).config.family
        'llama'

    Args:
      src: Hugging Face directory: config.json, and safetensors or PyTorch files; or a GGUF file.
      out: where a model directory appears, which must not exist; None: the model stays in memory.
      spec: the options.

    Returns:
      The model.

    Raises:
      FileNotFoundError: if there is nothing at `src`.
      InputError: if the checkpoint is damaged or does not fit its config, weights are not finite, or `out` exists.
      OSError: if the disk is full. Nothing is left at `out` then.
    """
    if isinstance(src, Model):
        raise InputError("convert takes the path of a foreign checkpoint, and not a model")
    target = destination(out)
    _convert(as_path(src), target, spec, console=_console())
    return result(target, src)


@file_verb(ExportSpec)
def export(model: ModelOrPath, out: str | os.PathLike[str], spec: ExportSpec) -> Path:
    """Writes a model as a Hugging Face checkpoint. Deltas of experts are merged into full experts.

        >>> checkpoint = moe_jax.export(moe_jax.tiny_model(experts=4), folder / "checkpoint")
        >>> sorted(file.name for file in checkpoint.iterdir())
        ['config.json', 'lineage.json', 'model.safetensors']

    Args:
      model: a model, or the path of one.
      out: where the Hugging Face directory appears; must not exist.
      spec: the options.

    Returns:
      `out`.

    Raises:
      InputError: if no Hugging Face format can hold the model, weights are not finite, or `out` exists.
      OSError: if the disk is full. Nothing is left at `out` then.
    """
    source, target = open_model(model, spec.base), as_path(out)
    if spec.format == "peft":
        _export_peft(source, target, allow_nonfinite=spec.allow_nonfinite, console=_console())
        return target
    _export(source, target, spec, packed=_packed(spec), console=_console())
    return target


def print_export(model: ModelOrPath, out: str | os.PathLike[str], spec: ExportSpec) -> None:
    """Prints what `export` would write, with sizes, and writes nothing.

    Raises:
      InputError: as `export`; and for LoRA alone, of which there is nothing to print.
    """
    if spec.format == "peft":
        raise InputError("--dry-run: does not go with --format peft, which writes LoRA as it is stored")
    _export(open_model(model, spec.base), as_path(out), spec, packed=_packed(spec), dry_run=True)


def _packed(spec: ExportSpec) -> Pack | None:
    return packed_experts(spec.bits, spec.group_size) if spec.format == "compressed-tensors" else None


def packed_experts(bits: int | None = None, group_size: int | None = None) -> Pack:
    """Returns how `export` writes experts in codes, found as in `compress`; `Packing.of` checks the options."""
    return partial(Packing.of, quantise=_codes, bits=bits, group_size=group_size)


def _codes(kernel: np.ndarray, bits: int, group_size: int) -> Codes:
    from moe_jax.compression.coding.coder import LeastError  # takes a while to import

    made = LeastError(even=True).quantize(kernel, bits=bits, group_size=group_size)
    return Codes(made.codes, made.scales)


def _console() -> Console | None:
    """Returns the console on which a conversion reports: a silent one in Python, None (its own choice) in a command."""
    return None if shows_work() else Console(quiet=True)
