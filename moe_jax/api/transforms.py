"""The verbs that make one model from another: upcycle, adapt, merge, attach, convert and export."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from moe_jax.api.measure import default_seq_len
from moe_jax.api.model import (
    Model,
    ModelOrPath,
    OutPath,
    destination,
    file_verb,
    model_verb,
    open_model,
    result,
    tokenizer_of_source,
    work_bars,
)
from moe_jax.checks.step0 import ProbeText, has_nf4_kernels
from moe_jax.conversion.formats.coded_parts import CONTAINERS, Pack, Packing
from moe_jax.conversion.formats.encoders import Codes
from moe_jax.conversion.from_hugging_face import convert as _convert
from moe_jax.conversion.gguf.to_gguf import export_gguf as _export_gguf
from moe_jax.conversion.hugging_face_dir import processing_keys_of
from moe_jax.conversion.spec import ConvertSpec, ExportSpec
from moe_jax.conversion.to_hugging_face import export as _export
from moe_jax.conversion.to_peft import export_peft as _export_peft
from moe_jax.conversion.writing.leaf_writing import Calibrate
from moe_jax.core.errors import InputError, shown
from moe_jax.core.terminal import shows_work
from moe_jax.data.pictures.picture_sources import MARK
from moe_jax.distributed.processes import first_decides
from moe_jax.distributed.sharding import make_mesh
from moe_jax.evaluation.held_out import read_text
from moe_jax.files.storage_path import as_path
from moe_jax.files.tokenizer_files import TOKENIZER
from moe_jax.model_io.model_source import ModelSource
from moe_jax.model_io.without_codes import without_codes
from moe_jax.models import ModelConfig
from moe_jax.peft.adapt import adapt as _adapt
from moe_jax.peft.adapt import adapted_config
from moe_jax.peft.merge import merge as _merge
from moe_jax.peft.spec import AdaptSpec, MergeSpec
from moe_jax.upcycling.attach_spec import AttachSpec
from moe_jax.upcycling.attached_tower import attach as _attach
from moe_jax.upcycling.beginnings import Prompt
from moe_jax.upcycling.dense_to_moe import upcycle as _upcycle
from moe_jax.upcycling.dense_to_moe import upcycled_config
from moe_jax.upcycling.spec import UpcycleSpec


@model_verb(UpcycleSpec)
def upcycle(model: ModelOrPath, out: OutPath, spec: UpcycleSpec) -> Model:
    """Turns a dense model into a Mixture-of-Experts that gives the same logits until it is trained, or an MoE larger.

        >>> moe = moe_jax.upcycle(moe_jax.tiny_model(), experts=4, top_k=2, every=2, delta="low-rank:2")
        >>> moe.config.moe_layers
        (1,)
        >>> measured = moe.lineage[-1]["measured"]
        >>> measured["step0_max_abs_difference"] <= measured["step0_allowed"]
        True

    An MoE gets more experts, copies of those it has; a token goes to as many times more of them.

        >>> larger = moe_jax.upcycle(moe, experts=8, step0_check=False)
        >>> larger.config.moe(1).num_experts, larger.config.moe(1).top_k
        (8, 4)

    Args:
      model: a dense model or an MoE, or the path of one.
      out: where a directory appears, which must not exist; None: the model stays in memory. With `method="pesc"`,
        unless `rest` is `full`, it is an adapter directory, which refers to the dense model and needs the path of one.
      spec: the options.

    Returns:
      The MoE.

    Raises:
      FileNotFoundError: if there is nothing at the path.
      InputError: if the options do not go with the model or each other, weights are not finite, the logits differ, or
        `out` exists. Nothing is left behind.
    """
    target, source = destination(out), without_codes(open_model(model, spec.base))
    if source.config.moe_layers:
        upcycled_config(source.config, spec)  # mistakes are found before experts are measured
        with work_bars() as progress:
            made = _upcycle(source, target, spec, demand=_demand(source, spec), progress=progress)
        return result(target, model, made)
    text = _probe_text(source, upcycled_config(source.config, spec), spec.text, check=spec.step0_check)
    with work_bars() as progress:
        made = _upcycle(
            source,
            target,
            spec,
            text=text,
            prompts=read_prompts(source, spec.router_from),
            experts_from=[without_codes(open_model(one)) for one in spec.experts_from],
            progress=progress,
        )
    return result(target, model, made)


def _demand(source: ModelSource, spec: UpcycleSpec) -> dict[int, np.ndarray] | None:
    """Returns how much each expert of an MoE calls for copies, by layer; None: all alike."""
    if spec.copies_by == "even" or spec.text is None:
        return None
    from moe_jax.api.read_calibration import read_rows  # takes a while to import
    from moe_jax.upcycling.expert_demand import measure_demand

    by, text = spec.copies_by, spec.text

    def measure() -> dict[str, list[float]]:
        length = default_seq_len(source.config)
        rows = read_rows(source, as_path(text), seq_len=length, samples=None, seed=spec.seed)
        return {str(layer): found.tolist() for layer, found in measure_demand(source, rows, by=by).items()}

    return {int(layer): np.array(found) for layer, found in first_decides(measure).items()}


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
    text = _probe_text(source, adapted_config(source.config, spec), spec.text, check=spec.step0_check)
    with work_bars() as progress:
        made = _adapt(source, target, spec, text=text, progress=progress)
    return result(target, model, made)


@model_verb(MergeSpec)
def merge(model: ModelOrPath, out: OutPath, spec: MergeSpec) -> Model:
    """Folds LoRA into the kernels that it stands beside; the model then needs no base.

    NF4 kernels are dequantised before, so that the model computes what was trained.

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
    target, source = destination(out), without_codes(open_model(model, spec.base))
    with work_bars() as progress:
        made = _merge(source, target, spec, progress=progress)
    return result(target, model, made)


@model_verb(AttachSpec)
def attach(model: ModelOrPath, out: OutPath, spec: AttachSpec) -> Model:
    """Puts an image encoder before a language model, which then takes pictures; a projector between them is drawn.

    All weights but the projector's stay as they are, so that texts without pictures get the same logits. What a picture
    means to the model, the projector has to learn, which `train` does.

        >>> moe_jax.attach(moe_jax.tiny_model(), tower=folder / "nothing")
        Traceback (most recent call last):
        FileNotFoundError: no model at ...

    Args:
      model: a language model, or the path of one.
      out: where a model directory appears, which must not exist; None: the model stays in memory.
      spec: the options.

    Returns:
      The model that sees.

    Raises:
      FileNotFoundError: if there is nothing at a path.
      InputError: if the model takes pictures already or has an encoder, the tower is no image encoder, the options do
        not go with it, the tokenizer has no such placeholder, weights are not finite, or `out` exists.
    """
    target, source = destination(out), open_model(model)
    tower = open_model(os.fspath(spec.tower), towers=True)
    preprocessor = processing_keys_of(tower)
    placeholder = _placeholder(source, spec.placeholder)
    with work_bars() as progress:
        made = _attach(
            source, tower, target, spec, preprocessor=preprocessor, placeholder=placeholder, progress=progress
        )
    return result(target, model, made)


def _placeholder(source: ModelSource, token: str | None) -> int | None:
    """Returns the id of the token that stands for a picture; None: none was asked for, and the usual one is absent."""
    if token is None and not any(file.name == TOKENIZER for file in source.tokenizer_files):
        return None
    found = tokenizer_of_source(source).id_of(MARK if token is None else token)
    if found is None and token is not None:
        raise InputError(f"--placeholder {shown(token)}: the tokenizer has no such token; expected one that it has")
    return found


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
    """Writes a model as a Hugging Face checkpoint or a GGUF file. Deltas of experts are merged into full experts.

        >>> checkpoint = moe_jax.export(moe_jax.tiny_model(experts=4), folder / "checkpoint")
        >>> sorted(file.name for file in checkpoint.iterdir())
        ['README.md', 'config.json', 'lineage.json', 'model.safetensors']

    Args:
      model: a model, or the path of one.
      out: where the Hugging Face directory, or the file `NAME.gguf`, appears; must not exist.
      spec: the options.

    Returns:
      `out`.

    Raises:
      InputError: if no such format can hold the model, weights are not finite, or `out` exists.
      OSError: if the disk is full. Nothing is left at `out` then.
    """
    source, target = without_codes(open_model(model, spec.base, towers=True)), as_path(out)
    if spec.format == "peft":
        _export_peft(source, target, allow_nonfinite=spec.allow_nonfinite, console=_console())
        return target
    calibrate = None if spec.calibrate is None else _calibrate(model, source, spec)
    if spec.format == "gguf":
        _export_gguf(source, target, spec, calibrate=calibrate, console=_console())
        return target
    _export(source, target, spec, packed=_packed(spec), calibrate=calibrate, console=_console())
    return target


def print_export(model: ModelOrPath, out: str | os.PathLike[str], spec: ExportSpec) -> None:
    """Prints what `export` would write, with sizes, and writes nothing.

    Raises:
      InputError: as `export`; and for LoRA alone, of which there is nothing to print.
    """
    if spec.format == "peft":
        raise InputError("--dry-run: does not go with --format peft, which writes LoRA as it is stored")
    source, target = without_codes(open_model(model, spec.base, towers=True)), as_path(out)
    if spec.format == "gguf":
        _export_gguf(source, target, spec, dry_run=True)
    else:
        _export(source, target, spec, packed=_packed(spec), dry_run=True)


def _packed(spec: ExportSpec) -> Pack | None:
    if spec.format not in CONTAINERS:
        return None
    return packed_parts(
        spec.codes,
        spec.group_size,
        whole=spec.parts == "model",
        format=spec.format,
        zero_points=spec.zero_points,
    )


def packed_parts(
    codes: dict[str, str | None] | None = None,
    group_size: int | None = None,
    *,
    whole: bool = False,
    format: str = "compressed-tensors",
    zero_points: bool = False,
) -> Pack:
    """Returns how `export` writes parts of a model in codes, by default its experts; `Packing.of` checks the options.

    Whole numbers are found as in `compress`.
    """
    codes = {"experts": None} if codes is None else codes
    container = CONTAINERS[format]
    return partial(
        Packing.of,
        container=container,
        quantise=_codes,
        codes=codes,
        whole=whole,
        group_size=group_size,
        zero_points=zero_points,
    )


def _codes(
    kernel: np.ndarray, bits: int, group_size: int, *, moment: np.ndarray | None = None, zero_points: bool = False
) -> Codes:
    from moe_jax.compression.coding.coder import LeastError, LeastOutputError  # takes a while to import

    grid: Any = {"even": not zero_points, "whole_zeros": zero_points}
    coder = LeastError(**grid) if moment is None else LeastOutputError(moment, in_order=True, **grid)
    made = coder.quantize(kernel, bits=bits, group_size=group_size, zero_points=zero_points)
    return Codes(made.codes, made.scales, made.leaves["zeros"] >> (8 - bits) if zero_points else None)


def _calibrate(model: ModelOrPath, source: ModelSource, spec: ExportSpec) -> Calibrate:
    """Reads the texts that codes are calibrated on; the model is run on it while it is written."""
    from moe_jax.api.read_calibration import calibration_folder, read_rows  # takes a while to import
    from moe_jax.compression.calibration.coded_pass import begun_pass

    assert spec.calibrate is not None
    source.config.check_no_encoder("a calibration")
    length = default_seq_len(source.config) if spec.seq_len is None else spec.seq_len
    folder = calibration_folder(model)
    with work_bars() as progress:
        rows = read_rows(
            source,
            spec.calibrate,
            seq_len=length,
            samples=spec.samples,
            seed=spec.calibration_seed or 0,
            place=None if folder is None else folder.joinpath,
            progress=progress,
        )
    mesh = make_mesh({"data": -1}, jax.local_devices())
    return partial(begun_pass, rows=rows, mesh=mesh)


def _console() -> Console | None:
    """Returns the console on which a conversion reports: a silent one in Python, None (its own choice) in a command."""
    return None if shows_work() else Console(quiet=True)


def read_prompts(source: ModelSource, texts: Sequence[str]) -> list[Prompt]:
    """Returns the tokens of texts, with BOS before them where documents of the model begin with one.

    A text may be `@` and the path of a file with it; one that is the path of a file is an error.
    """
    if not texts:
        return []
    tokenizer = tokenizer_of_source(source)
    begin = tokenizer.prompt("")
    prompts = []
    for text in texts:
        if text.startswith("@"):
            ids = read_text(as_path(text[1:]), tokenizer)
        elif os.path.isfile(text):
            raise InputError(f"--router-from {shown(text)} is a file; write @{text} for the text in it")
        else:
            ids = tokenizer.encode(text)
        prompts.append(Prompt(np.concatenate([begin, np.asarray(ids, np.int32)]).astype(np.int32), len(begin)))
    return prompts


# On this a model with NF4 kernels is compared with its source, unless the user names a text.
_BUILT_IN = "a built-in text"
_TEXT = """\
The harbour lies below the old town, and in the early morning it is the only place with a light. Two boats come in
before six. The men carry the boxes up to the hall, where the buyers stand around with coffee in paper cups and say
little. By eight o'clock everything has been sold, and the gulls take what is left on the stones.

Water boils at a lower temperature on a mountain than at the sea, because the air above it weighs less. Cooks who move
from the coast to a high valley notice that beans need an hour more, although the pot looks as lively as it did before.
A lid that closes tightly helps: it keeps the steam inside, the pressure rises, and with it the temperature.

"Have you read the letter?" she asked. He shook his head and went on peeling the apple, slowly, in one long strip. "I
know what it says," he answered. "They want the house back by the first of May, and they are right to ask for it."

In 1869 a railway joined the two coasts of the continent, and a journey of six months became one of about a week.
To add two fractions, write both over the same denominator first: one half and one third are three sixths and two
sixths, which makes five sixths.
"""


def _probe_text(
    source: ModelSource, config: ModelConfig, file: str | os.PathLike[str] | None, *, check: bool
) -> ProbeText | None:
    """Returns the text on which a model of a config and its source are compared; None if there is none, or no way to.

    Without a file of the user's, that is the built-in one.
    """
    if file is None:
        if not check or not has_nf4_kernels(config) or not _predicts_texts(source.config):
            return None
        try:
            ids = tokenizer_of_source(source).encode(_TEXT)
        except (InputError, FileNotFoundError):  # the logits are compared all the same
            return None
        return ProbeText(_BUILT_IN, ids) if len(ids) > 1 else None
    if not check:
        raise InputError("a text is for the step-0 check, which was not asked for")
    if not has_nf4_kernels(config):
        raise InputError("a text shows what NF4 kernels change, and the new model has none")
    if not _predicts_texts(source.config):
        raise InputError(f"{source.path} does not continue texts, so that none can show what NF4 kernels change")
    return ProbeText(os.fspath(file), np.asarray(read_text(as_path(file), tokenizer_of_source(source))))


def _predicts_texts(config: ModelConfig) -> bool:
    return not config.has_encoder and config.num_classes is None
