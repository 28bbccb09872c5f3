"""Verbs that make a model of a model: convert, upcycle, adapt, merge; and export.

Each takes a model or the path of one, and leaves its result in memory, or with `out` in a directory. Written to a
directory, a model goes through memory one layer at a time, whatever its size. Options are the fields of the verb's
spec: given by name, or together as a spec.
"""

import os
from pathlib import Path

from rich.console import Console

from moe_jax.api.built_in_text import probe_text
from moe_jax.api.model import Model, ModelOrPath, OutPath, destination, open_model, result
from moe_jax.api.packed import packed_experts
from moe_jax.api.prompts import read_prompts
from moe_jax.api.verb import file_verb, model_verb, work_bars
from moe_jax.conversion import export as _export
from moe_jax.conversion import export_peft as _export_peft
from moe_jax.conversion.from_hugging_face import convert as _convert
from moe_jax.conversion.spec import ConvertSpec, ExportSpec
from moe_jax.conversion.to_hugging_face import Pack
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import shows_work
from moe_jax.files.remote.remote_path import as_path
from moe_jax.peft.adapt import adapt as _adapt
from moe_jax.peft.adapted_config import adapted_config
from moe_jax.peft.merge import merge as _merge
from moe_jax.peft.spec import AdaptSpec, MergeSpec
from moe_jax.upcycling.dense_to_moe import upcycle as _upcycle
from moe_jax.upcycling.spec import UpcycleSpec
from moe_jax.upcycling.upcycled_config import upcycled_config


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


@model_verb(UpcycleSpec)
def upcycle(model: ModelOrPath, out: OutPath, spec: UpcycleSpec) -> Model:
    """Turns a dense model into a Mixture-of-Experts that gives the same logits until it is trained.

        >>> moe = moe_jax.upcycle(moe_jax.tiny_model(), experts=4, top_k=2, every=2, delta="low-rank:2")
        >>> moe.config.moe_layers
        (1,)
        >>> measured = moe.lineage[-1]["measured"]
        >>> measured["step0_max_abs_difference"] <= measured["step0_allowed"]
        True

    Args:
      model: a dense model, or the path of one.
      out: where a directory appears, which must not exist; None: the model stays in memory. With `method="pesc"`,
        unless `rest` is `full`, it is an adapter directory, which refers to the dense model and needs the path of one.
      spec: the options.

    Returns:
      The MoE.

    Raises:
      FileNotFoundError: if there is nothing at the path.
      InputError: if the model is an MoE already, the options do not go with it or each other, weights are not
        finite, the logits differ, or `out` exists. Nothing is left behind.
    """
    target, source = destination(out), open_model(model, spec.base)
    text = probe_text(source, upcycled_config(source.config, spec), spec.text, check=spec.step0_check)
    with work_bars() as progress:
        made = _upcycle(
            source,
            target,
            spec,
            text=text,
            prompts=read_prompts(source, spec.router_from),
            experts_from=[open_model(one) for one in spec.experts_from],
            progress=progress,
        )
    return result(target, model, made)


@model_verb(AdaptSpec)
def adapt(model: ModelOrPath, out: OutPath, spec: AdaptSpec) -> Model:
    """Puts fresh adapters beside a model, to be trained while the model is frozen: PERFT beside the MoEs, or LoRA.

        >>> tuned = moe_jax.adapt(moe_jax.tiny_model(experts=4), method="lora", adapter="lora:2", targets="q,v")
        >>> tuned.config.layers[0].attention.lora.rank
        2

    Args:
      model: a model, or the path of one.
      out: where an adapter directory appears, which must not exist. It refers to the model, so that a path is needed.
        None: the model stays in memory, with its adapters.
      spec: the options.

    Returns:
      The model with its adapters.

    Raises:
      FileNotFoundError: if there is nothing at the path.
      InputError: if the model has adapters already, the options do not go with it or each other, weights are not
        finite, the logits differ, or `out` exists. Nothing is left behind.
    """
    target, source = destination(out), open_model(model)
    text = probe_text(source, adapted_config(source.config, spec), spec.text, check=spec.step0_check)
    with work_bars() as progress:
        made = _adapt(source, target, spec, text=text, progress=progress)
    return result(target, model, made)


@model_verb(MergeSpec)
def merge(model: ModelOrPath, out: OutPath, spec: MergeSpec) -> Model:
    """Folds LoRA into the kernels that it stands beside; the model then needs no base.

    Over NF4 kernels it is folded into what these stand for, so that the model computes what was trained.

        >>> tuned = moe_jax.adapt(moe_jax.tiny_model(), method="lora", adapter="lora:2", targets=["q", "v"])
        >>> merged = moe_jax.merge(tuned)
        >>> merged.config.layers[0].attention.lora is None
        True

    Args:
      model: a model with LoRA or NF4 kernels, or the path of one.
      out: where a model directory appears, which must not exist; None: the model stays in memory.
      spec: the options.

    Returns:
      The merged model.

    Raises:
      FileNotFoundError: if there is nothing at the path.
      InputError: if there is nothing to fold, something cannot be folded and `partly` is not said, weights are
        not finite, or `out` exists.
    """
    target, source = destination(out), open_model(model, spec.base)
    with work_bars() as progress:
        made = _merge(source, target, spec, progress=progress)
    return result(target, model, made)


def _console() -> Console | None:
    """Where a conversion says what it did: nowhere in Python, and where it chooses itself in a command."""
    return None if shows_work() else Console(quiet=True)
