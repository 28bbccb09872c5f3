"""Exports any model as a Hugging Face directory."""

import contextlib
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from moe_jax.conversion.checkpoint_source import match_weights
from moe_jax.conversion.config_keys import without_code_beside
from moe_jax.conversion.families import family_named
from moe_jax.conversion.formats.coded_parts import Pack
from moe_jax.conversion.hf_config import kept_keys, read_hf_config, write_hf_config
from moe_jax.conversion.hf_format import MergedModel, exported_config, print_changes
from moe_jax.conversion.hugging_face_dir import open_checkpoint
from moe_jax.conversion.model_table import mapped as mapped_model
from moe_jax.conversion.safetensors_file import PlannedTensor, shard_writer
from moe_jax.conversion.spec import ExportSpec
from moe_jax.conversion.table import LAYOUTS, Mapped, print_mapping
from moe_jax.conversion.tensors import DTYPE_NAMES, DTYPES_BY_NAME, TensorEntry
from moe_jax.conversion.to_peft import kinds_without_place, problems_of_adapter
from moe_jax.conversion.vision_formats import vision_format_named
from moe_jax.conversion.writing.leaf_writing import Calibrate, CalibratingPass, LeafWriting, tensors_of
from moe_jax.conversion.writing.model_card import model_card
from moe_jax.core.errors import InputError, check_member
from moe_jax.core.formatting import count_bytes, parse_bytes, show_bytes
from moe_jax.core.terminal import ByteProgress, console_for_tables
from moe_jax.data.calibration_texts.weighted_sources import describe_sources, files_of, weighted_sources
from moe_jax.data.end_tokens import end_tokens, generation_settings
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.files.json_toml import ANYTHING, read_json_object
from moe_jax.files.staging import check_beside, check_target, open_work, refuse_existing, require_space
from moe_jax.files.storage_path import as_path
from moe_jax.files.tokenizer_files import (
    GENERATION,
    PREPROCESSOR,
    PROCESSOR,
    TOKENIZER,
    TOKENIZER_CONFIG,
    by_name,
    copy_tokenizer_files,
)
from moe_jax.images.processing import write_processing
from moe_jax.model_io.lineage import CARD, LINEAGE_FILE, job_of, new_lineage_entry
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_source import ModelSource
from moe_jax.model_io.portable_lineage import without_places
from moe_jax.model_io.tuned_base import is_tuned
from moe_jax.models import ImageProcessing, ModelConfig

SHARD_SIZE, SHARD_SIZE_IN_BUCKETS = "5GB", "500MB"


def export(
    source: ModelSource,
    dst: Path | str,
    spec: ExportSpec = ExportSpec(),
    *,
    packed: Pack | None = None,
    calibrate: Calibrate | None = None,
    dry_run: bool = False,
    console: Console | None = None,
) -> None:
    """Writes a model as a Hugging Face directory that Transformers loads, in memory that does not grow with its size.

    If `packed` is given, parts of it are written in codes; a dry run only prints the mapping and sizes. With
    `calibrate`, whole numbers are chosen by what linear maps are given on a text.

    Raises:
      InputError: if no format can hold the model, weights are not finite or too large for the dtype, or `dst` exists.
      OSError: if the disk is full. Nothing is at `dst` then, and the same call continues the work.
    """
    console = console or console_for_tables(stderr=not dry_run)
    dtype, max_shard_size = spec.dtype, spec.max_shard_size
    check_member("expert layout", spec.expert_layout, LAYOUTS)
    check_member("choice for dense layers", spec.dense_layers, ("replicate", "refuse"))
    if dtype is not None:
        check_member("dtype", dtype, tuple(DTYPES_BY_NAME))
    dst = as_path(dst)
    if max_shard_size is None:
        max_shard_size = SHARD_SIZE if dst.renames else SHARD_SIZE_IN_BUCKETS
    max_bytes = parse_bytes(max_shard_size, flag="--max-shard-size")
    (refuse_existing if dry_run else check_target)(dst, buckets=True)
    check_beside(dst, [source.path])
    refuse_tuned(source)

    # Checks, before anything is read, that there is a format that can hold this model.
    config = exported_config(source.config, replicate_dense=spec.dense_layers == "replicate")
    model = MergedModel(source, config)
    stored = model.specs()
    target = DTYPES_BY_NAME[dtype] if dtype else None
    specs = {path: jax.ShapeDtypeStruct(leaf.shape, target or leaf.dtype) for path, leaf in stored.items()}
    mapped = mapped_model(config, specs, spec.expert_layout)
    tensors = _planned(mapped, specs)
    packing = None if packed is None else packed(source, config)
    if packing is not None:
        config.check_no_further("an export in codes")
        tensors = packing.planned(mapped, tensors, {path: leaf.dtype for path, leaf in specs.items()})
        if calibrate is not None and not packing.is_calibrated:
            raise InputError("--calibrate: no part gets new whole numbers, which a text could choose")
    sizes = {
        path: sum(tensors[name].nbytes for name in tensors_of(path, mapped, packing))
        if packing is not None and packing.encoder_of(path) is not None
        else count_bytes([spec])
        for path, spec in specs.items()
    }
    print_changes(source.config, config, sizes, console)
    if packing is not None:
        for line in (
            packing.said(source, ", ".join(one.name for one in weighted_sources(spec.calibrate)) or None),
            *packing.container.notes(packing.encoders, _main_dtype(specs)),
            *packing.doubts(mapped),
        ):
            console.print(line, soft_wrap=True)
    if grown := _growth(source, sizes, packed=packing is not None):
        console.print(grown)
    if dry_run:
        print_mapping(mapped, specs, stored, console)
        return

    total = sum(tensor.nbytes for tensor in tensors.values())
    require_space(dst, total)
    kept = ("expert_layout", "dense_layers", "dtype", "allow_nonfinite")
    options = {"max_shard_size": max_bytes, **{name: getattr(spec, name) for name in kept}}
    if packing is not None:
        options |= {"codes": {part: encoder.word for part, encoder in packing.encoders.items()}}
    if spec.calibrate is not None:
        options |= {
            "calibrate": describe_sources(weighted_sources(spec.calibrate)),
            "samples": spec.samples,
            "seq_len": spec.seq_len,
            "calibration_seed": spec.calibration_seed,
        }
    read = [source, *files_of(weighted_sources(spec.calibrate))]
    lineage = [*source.lineage, new_lineage_entry("export", options, read)]
    job = job_of(lineage)
    with ByteProgress(console, "exporting", total) as progress:
        with open_work(dst, job) as work, _calibration(calibrate, model, dst, job) as calibration:
            folder = work.folder
            # Before the weights, so that no copied file can take their place.
            settings = _generation_settings(source)
            files: dict[str, Path | bytes] = {**by_name(source.tokenizer_files), **_without_code(source, config)}
            files |= {} if settings is None else {GENERATION: (json.dumps(settings, indent=2) + "\n").encode()}
            files |= {
                name: (json.dumps(keys, indent=2) + "\n").encode()
                for name, keys in _processor_files(source, config).items()
            }
            copy_tokenizer_files(files, folder)
            with shard_writer(work, tensors, max_bytes) as writer:
                writing = LeafWriting(
                    model=model,
                    mapped=mapped,
                    specs=specs,
                    tensors=tensors,
                    writer=writer,
                    progress=progress,
                    packing=packing,
                    allow_nonfinite=spec.allow_nonfinite,
                    calibration=calibration,
                )
                writing.write_layers(work)
            keys = write_hf_config(replace(config, dtype=_main_dtype(specs)))
            lineage[-1]["measured"] = progress.measured()
            portable = without_places(lineage)
            (folder / LINEAGE_FILE).write_durably((json.dumps(portable, indent=2) + "\n").encode())
            (folder / CARD).write_durably(model_card(config, portable, library="transformers"))
            # Opens all files and compares them with the config, which is written last.
            found = open_checkpoint(folder)
            if packing is None:
                how: dict[str, Any] = {"processing": _processing_of(config), "further": config.further_layers > 0}
                written = read_hf_config(keys, ignored=kept_keys(config), **how)
                match_weights(found.tensors, written, leaf_specs(written), str(folder))
            else:
                _check_planned(found.tensors, tensors)
                keys["quantization_config"] = packing.describe(mapped)
            work.check_alone()
            (folder / "config.json").write_durably((json.dumps(keys, indent=2) + "\n").encode())
            work.complete()
    console.print(f"wrote {dst}: {progress.summary()}", markup=False)
    if said := writing.errors.said():
        console.print(said, markup=False, soft_wrap=True)
    if writing.losses:
        before, after = writing.losses
        console.print(
            f"the text of the calibration: {before:.4f} nats per token before, {after:.4f} in codes", soft_wrap=True
        )


def _calibration(
    calibrate: Calibrate | None, model: MergedModel, dst: Path, job: Any
) -> AbstractContextManager[CalibratingPass | None]:
    return contextlib.nullcontext() if calibrate is None else calibrate(model.whole(), dst, job)


def _without_code(source: ModelSource, config: ModelConfig) -> dict[str, bytes]:
    """Returns the tokenizer_config.json without what asks for code beside it, if it does and Transformers has its own.

    Code is never copied, and where it is asked for and absent, Transformers loads nothing.
    """
    file = by_name(source.tokenizer_files).get(TOKENIZER_CONFIG)
    if file is None or family_named(config.family).own_code:
        return {}
    with contextlib.suppress(InputError):  # exporting is no place to find faults in files that are copied
        keys = read_json_object(file, allow=ANYTHING)
        rest = without_code_beside(keys)
        return {} if rest == keys else {TOKENIZER_CONFIG: (json.dumps(rest, indent=2) + "\n").encode()}
    return {}


def _processing_of(config: ModelConfig) -> ImageProcessing | None:
    return None if config.vision is None else config.vision.processing


def _processor_files(source: ModelSource, config: ModelConfig) -> dict[str, dict[str, Any]]:
    """Returns the files that say how a model that sees takes pictures, by their names."""
    vision = config.vision
    if vision is None:
        return {}
    format_ = vision_format_named(vision.family)
    processor, made = format_.processor, format_.image_processor
    if vision.processing.pad and made is not None:
        raise InputError(
            f"this model pads pictures to squares, and the format of {vision.family!r} cannot say so: Transformers "
            "would show it others"
        )
    if made is not None and {PREPROCESSOR, PROCESSOR} & {file.name for file in source.tokenizer_files}:
        return {}  # they say more than we read of them
    is_said = vision.processing.pad and format_.config_pads
    processing = (made or write_processing)(replace(vision.processing, pad=False) if is_said else vision.processing)
    if processor is None:
        return {PREPROCESSOR: processing}
    keys = processor(vision)
    with contextlib.suppress(InputError):  # exporting is no place to find faults in files that are copied
        tokenizer = _tokenizer_of(source)
        if tokenizer is not None and vision.placeholder is not None:
            keys["image_token"] = tokenizer.token(vision.placeholder)
    return {PREPROCESSOR: processing, PROCESSOR: {"image_processor": processing, **keys}}


def _tokenizer_of(source: ModelSource) -> Tokenizer | None:
    file = next((file for file in source.tokenizer_files if file.name == TOKENIZER), None)
    return None if file is None else Tokenizer(file, source.config)


def refuse_tuned(source: ModelSource) -> None:
    """Raises `InputError` for a model that no checkpoint holds as it is; it says which ways out are open to it."""
    if is_tuned(source.config):
        raise InputError(_what_to_do(source))


def _what_to_do(source: ModelSource) -> str:
    if kinds := kinds_without_place(source.config):
        folds = any("/lora/" in path or "/nf4/" in path for path in source.specs())
        rest = " (moe-jax merge --partly folds the LoRA and NF4 kernels beside them)" if folds else ""
        return (
            f"{source.path} has {' and '.join(kinds)}, which no format holds but its own: moe-jax merge cannot fold "
            f"them, nor PEFT read them; keep the model directory, which moe-jax generate and serve read{rest}"
        )
    why = f"{source.path} has LoRA or NF4 kernels, which no Hugging Face checkpoint holds: fold them with moe-jax merge"
    alone = not problems_of_adapter(source)
    return f"{why}, or write LoRA alone with --format peft" if alone else why


def _generation_settings(source: ModelSource) -> dict[str, Any] | None:
    """Returns the generation_config.json that the model needs in place of its own, if it needs one."""
    files = source.tokenizer_files
    # Exporting is no place to find faults in files that are copied.
    with contextlib.suppress(InputError):
        tokenizer = _tokenizer_of(source)
        return generation_settings(source.config, files, end_tokens(source.config, files, source.lineage, tokenizer))
    return None


def _growth(source: ModelSource, sizes: Mapping[str, int], *, packed: bool) -> str | None:
    """Returns a line that says how much larger the experts of MoE layers become, and what keeps them small.

    None: they do not. `sizes` are bytes as written, by leaf.
    """
    places = tuple(f"layers/{i}/mlp/experts/" for i in source.config.moe_layers)
    written = sum(size for path, size in sizes.items() if path.startswith(places))
    before = count_bytes(spec for path, spec in source.specs().items() if path.startswith(places))
    if written <= before or show_bytes(written) == show_bytes(before):  # but for the shapes beside the codes
        return None
    why = "the format has whole experts only" if not packed else "in codes of their own, without a shared base"
    smaller = ", and --format compressed-tensors has codes of 4 or 8 bits" if not packed else ""
    grown = f"experts grow from {show_bytes(before)} to {show_bytes(written)}: {why}"
    return f"{grown}; the model directory keeps them small{smaller}"


def _check_planned(found: Mapping[str, TensorEntry], tensors: Mapping[str, PlannedTensor]) -> None:
    """Raises `InputError` unless files hold the tensors that were planned: somebody else has written into them."""
    wrong = {name for name, entry in found.items() if tensors.get(name) != (entry.dtype, entry.shape)}
    if wrong or found.keys() != tensors.keys():
        raise InputError(f"{', '.join(sorted(wrong)[:3]) or 'a tensor'} is not what was written; export again")


def _planned(mapped: Mapped, specs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, PlannedTensor]:
    """Returns every tensor, in the order of the table; a fused tensor needs leaves of one dtype."""
    dtypes: dict[str, np.dtype] = {}
    for path, pieces in mapped.pieces.items():
        for piece in pieces:
            dtype = dtypes.setdefault(piece.tensor, specs[path].dtype)
            if dtype != specs[path].dtype:
                raise InputError(
                    f"{piece.tensor} would be joined from leaves of dtypes {dtype} and {specs[path].dtype}; "
                    "choose one with --dtype"
                )
    return {name: PlannedTensor(DTYPE_NAMES[dtype], mapped.tensors[name]) for name, dtype in dtypes.items()}


def _main_dtype(specs: Mapping[str, jax.ShapeDtypeStruct]) -> str:
    """Returns the dtype of most bytes: Transformers loads a checkpoint in the single dtype that its config names."""
    sizes = Counter[str]()
    for spec in specs.values():
        sizes[str(spec.dtype)] += count_bytes([spec])
    return sizes.most_common(1)[0][0]
