"""Exports a model as a GGUF file, which llama.cpp and others read."""

import contextlib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.table
from rich.console import Console

from moe_jax.conversion.gguf.architectures.gguf_architectures import check_written, only_moe
from moe_jax.conversion.gguf.architectures.gguf_description import ROPE_FACTORS
from moe_jax.conversion.gguf.coded_types import coded_types
from moe_jax.conversion.gguf.gguf_file import WEIGHTED, GGUFFile, header_of, plain_dtype
from moe_jax.conversion.gguf.gguf_header import PLAIN
from moe_jax.conversion.gguf.gguf_metadata import Described, check_read_back, described, row_orders, tensor_shapes
from moe_jax.conversion.gguf.gguf_model import GGUFModel
from moe_jax.conversion.gguf.gguf_types import FILE_TYPES, Facts, Planned, planned_tensor, said_of_fallbacks
from moe_jax.conversion.gguf.imatrix import read_imatrix, write_imatrix
from moe_jax.conversion.gguf.measured_importance import measure
from moe_jax.conversion.gguf.tokenizer_keys import tokenizer_keys
from moe_jax.conversion.hf_format import MergedModel, exported_config, print_changes
from moe_jax.conversion.model_table import mapped as mapped_model
from moe_jax.conversion.spec import AS_CODED, ExportSpec, check_gguf_name
from moe_jax.conversion.table import FUSED, PER_EXPERT, Mapped
from moe_jax.conversion.tensors import DTYPE_NAMES
from moe_jax.conversion.to_hugging_face import refuse_tuned
from moe_jax.conversion.writing.leaf_writing import Calibrate, LeafWriting
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import show_bytes
from moe_jax.core.terminal import ByteProgress, console_for_tables
from moe_jax.data.calibration_texts.weighted_sources import describe_sources, files_of, weighted_sources
from moe_jax.data.end_tokens import end_tokens
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.files.byte_files import fingerprint_files
from moe_jax.files.file_work import FileWorkplace
from moe_jax.files.staging import check_beside, check_target, refuse_existing, require_space
from moe_jax.files.storage_path import as_path
from moe_jax.files.tokenizer_files import TOKENIZER
from moe_jax.model_io.lineage import job_of, new_lineage_entry
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig


def export_gguf(
    source: ModelSource,
    dst: Path | str,
    spec: ExportSpec,
    *,
    calibrate: Calibrate | None = None,
    dry_run: bool = False,
    console: Console | None = None,
) -> None:
    """Writes a model as a GGUF file, in memory that does not grow with its size.

    A dry run only prints the tensors with their types and sizes. With `calibrate`, blocks are chosen by what linear
    maps are given on a text.

    Raises:
      InputError: if no architecture of GGUF files can hold the model or its tokenizer, weights are not finite or too
        large for their type, the package gguf is missing, or `dst` exists or is no name of a GGUF file.
      OSError: if the disk is full. Nothing is at `dst` then, and the same call continues the work.
    """
    console = console or console_for_tables(stderr=not dry_run)
    check_gguf_name(dst)
    if importlib.util.find_spec("gguf") is None:
        raise InputError("GGUF files are written with the package gguf: pip install 'moe-jax[gguf]'")
    dst = as_path(dst)
    (refuse_existing if dry_run else check_target)(dst, file=True)
    check_beside(dst, [source.path])
    refuse_tuned(source)
    if source.config.vision is not None:
        raise InputError(f"{source.path} takes pictures, and GGUF files hold models of text: leave out --format gguf")
    check_written(source.config)
    config = exported_config(source.config, replicate_dense=spec.dense_layers == "replicate", all_moe=only_moe)
    plan = _Plan.of(source, described(config), dst.stem, spec.gguf_type)
    _check_importance(spec, plan, dst, dry_run=dry_run)
    importance: dict[str, np.ndarray] = {}
    if spec.imatrix is not None:
        importance = read_imatrix(spec.imatrix, {name: tensor.shape for name, tensor in plan.tensors.items()})
    sizes = {
        path: sum(plan.tensors[name].nbytes for name in {piece.tensor for piece in pieces})
        for path, pieces in plan.mapped.pieces.items()
    }
    print_changes(source.config, config, sizes, console)
    for line in (*plan.notes, *said_of_fallbacks(plan.tensors)):
        console.print(line, markup=False)
    if spec.imatrix is not None:
        _say_known(plan, importance, console)
    if dry_run:
        _print_tensors(plan.tensors, console)
        return
    _write(source, dst, spec, plan, importance, calibrate, console)


class _Plan(NamedTuple):
    """All that is known of a file before it is written."""

    model: MergedModel
    description: Described
    mapped: Mapped
    tensors: dict[str, Planned]
    specs: dict[str, jax.ShapeDtypeStruct]  # of the leaves, in the dtypes in which they are written
    metadata: dict[str, Any]
    notes: list[str]

    @classmethod
    def of(cls, source: ModelSource, description: Described, name: str, mix: str | None) -> "_Plan":
        config, architecture = description.config, description.architecture
        model = MergedModel(source, config)
        stored = model.specs()
        # Experts are stacked; queries, keys and values have a tensor each.
        layout = FUSED if config.moe_layers else PER_EXPERT
        mapped = mapped_model(config, stored, layout, table=architecture.table_of(config))
        shapes = tensor_shapes(mapped.tensors, architecture, description.factors)
        check_read_back(description, shapes)
        own = {
            piece.tensor: DTYPE_NAMES[np.dtype(stored[path].dtype)]
            for path, pieces in mapped.pieces.items()
            for piece in pieces
        }
        facts, coded = _facts(config), None
        if mix == AS_CODED:
            coded = coded_types(source, mapped.pieces)
            mix = coded.mix
        tensors = {
            name: planned_tensor(
                name, shape, own.get(name, PLAIN[0]), mix, facts, wanted=None if coded is None else coded.type_of(name)
            )
            for name, shape in shapes.items()
        }
        specs = {
            path: jax.ShapeDtypeStruct(stored[path].shape, _widest(tensors[piece.tensor] for piece in pieces))
            for path, pieces in mapped.pieces.items()
        }
        tokenizer, notes = tokenizer_keys(source.tokenizer_files, config, _ends(source))
        metadata = {
            "general.type": "model",
            "general.name": name,
            "general.file_type": FILE_TYPES[mix or _main_type(tensors)],
            "general.quantization_version": 2,
            **description.metadata,
            **tokenizer,
        }
        said = [] if coded is None else [coded.said(tensors)]
        return cls(model, description, mapped, tensors, specs, metadata, [*description.notes, *notes, *said])


def _widest(tensors: Iterable[Planned]) -> np.dtype:
    """Returns the dtype in which a leaf is written to tensors: float32, unless all take the same other one."""
    dtypes = {plain_dtype(tensor) for tensor in tensors}
    return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)


def _facts(config: ModelConfig) -> Facts:
    attention = config.layers[0].softmax_attention
    return Facts(
        num_layers=config.num_layers,
        num_experts=config.moe(config.moe_layers[0]).num_experts if config.moe_layers else 0,
        heads_per_kv_head=attention.num_heads // attention.num_kv_heads,
        is_tied=config.tie_embeddings,
    )


def _main_type(tensors: Mapping[str, Planned]) -> str:
    """Returns the type of most bytes."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.nbytes
    return max(sizes, key=lambda kind: sizes[kind])


def _ends(source: ModelSource) -> tuple[int, ...]:
    """Returns the tokens that end a text; exporting is no place to find faults in the files that name them."""
    file = next((file for file in source.tokenizer_files if file.name == TOKENIZER), None)
    with contextlib.suppress(InputError):
        tokenizer = None if file is None else Tokenizer(file, source.config)
        return end_tokens(source.config, source.tokenizer_files, source.lineage, tokenizer)
    return source.config.eos_ids


def _write(
    source: ModelSource,
    dst: Path,
    spec: ExportSpec,
    plan: _Plan,
    importance: Mapping[str, np.ndarray],
    calibrate: Calibrate | None,
    console: Console,
) -> None:
    architecture = plan.description.architecture
    total = sum(tensor.nbytes for tensor in plan.tensors.values())
    header = header_of(plan.description.name, plan.metadata, plan.tensors)
    require_space(dst, total + len(header))
    options = {name: getattr(spec, name) for name in ("gguf_type", "dense_layers", "allow_nonfinite")}
    options |= {name: getattr(spec, name) for name in ("samples", "seq_len", "calibration_seed")}
    options |= {"saves": spec.save_imatrix is not None}
    if spec.calibrate is not None:
        options |= {"calibrate": describe_sources(weighted_sources(spec.calibrate))}
    if spec.imatrix is not None:
        options |= {"imatrix": fingerprint_files([as_path(spec.imatrix)])}
    read = [source, *files_of(weighted_sources(spec.calibrate))]
    job = job_of([*source.lineage, new_lineage_entry("export", {"format": "gguf", **options}, read)])
    with contextlib.ExitStack() as until_written:
        measured, shape = None, (0, 0)
        if calibrate is not None:
            calibration = until_written.enter_context(calibrate(plan.model.whole(), dst, job))
            # Routers and norms are float32, and never need it.
            every = [name for name, tensor in plan.tensors.items() if tensor.kind != "F32"]
            names = _weighted(plan.tensors) if spec.save_imatrix is None else every
            measured = measure(plan.mapped, names, plan.model.config.num_layers, calibration, console)
            importance, shape = measured.importance, calibration.shape
            _say_known(plan, importance, console)
        progress = until_written.enter_context(ByteProgress(console, "exporting", total))
        with FileWorkplace(dst, job) as work:
            with GGUFFile(work.file, header, plan.tensors, importance) as file:
                if plan.description.factors is not None:
                    progress.advance(file.write(ROPE_FACTORS, 0, plan.description.factors))
                writing = LeafWriting(
                    model=plan.model,
                    mapped=plan.mapped,
                    specs=plan.specs,
                    tensors=plan.tensors,
                    writer=file,
                    progress=progress,
                    packing=None,
                    allow_nonfinite=spec.allow_nonfinite,
                    orders=row_orders(plan.model.config, architecture),
                    added={name: added for name in plan.tensors if (added := architecture.added_to(name))},
                )
                writing.write_layers(work)
            _check_written(work.file, plan)
            if measured is not None and spec.save_imatrix is not None:
                about = {
                    "datasets": [one.name for one in weighted_sources(spec.calibrate)],
                    "chunk_count": shape[0],
                    "chunk_size": shape[1],
                }
                write_imatrix(spec.save_imatrix, measured.sums, measured.counts, **about)
            work.complete()
    console.print(f"wrote {dst}: {progress.summary()}", markup=False)


def _weighted(tensors: Mapping[str, Planned]) -> list[str]:
    """Returns the tensors whose blocks depend on the importance of inputs."""
    return [name for name, tensor in tensors.items() if tensor.kind in WEIGHTED]


def _check_importance(spec: ExportSpec, plan: _Plan, dst: Path, *, dry_run: bool) -> None:
    """Raises `InputError` if the importance of inputs is given and changes nothing, or cannot be saved."""
    given = "--calibrate" if spec.calibrate is not None else "--imatrix" if spec.imatrix is not None else None
    if given is not None and not _weighted(plan.tensors):
        kinds = ", ".join(dict.fromkeys(tensor.kind for tensor in plan.tensors.values()))
        raise InputError(f"{given}: no matrix has a type that it changes ({kinds}); choose another with --gguf-type")
    if spec.save_imatrix is not None:
        file = as_path(spec.save_imatrix)
        if file.absolute() == dst.absolute():
            raise InputError(f"--save-imatrix {file} is the name of the model; give another one")
        (refuse_existing if dry_run else check_target)(file, file=True)


def _say_known(plan: _Plan, importance: Mapping[str, np.ndarray], console: Console) -> None:
    weighted = _weighted(plan.tensors)
    known = sum(name in importance for name in weighted)
    kinds = ", ".join(sorted({plan.tensors[name].kind for name in weighted}))
    console.print(f"importance of inputs: known for {known} of {len(weighted)} matrices in {kinds}", markup=False)


def _check_written(file: Path, plan: _Plan) -> None:
    """Raises `InputError` unless a file is read as the model that it was made of."""
    found = GGUFModel(file)
    shapes = {path: spec.shape for path, spec in found.specs().items()}
    if shapes != {path: spec.shape for path, spec in plan.specs.items()}:
        raise InputError(f"{file} is not what was written: something else has written into it; export again")


def _print_tensors(tensors: Mapping[str, Planned], console: Console) -> None:
    """Prints the tensors, a line for all of a kind."""
    kinds: dict[tuple[str, str, tuple[int, ...]], list[Planned]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((re.sub(r"blk\.\d+\.", "blk.{i}.", name), tensor.kind, tensor.shape), []).append(tensor)
    table = rich.table.Table(box=None, pad_edge=False)
    for title in ("tensors", "", "shape", "type", "bytes"):
        table.add_column(title, justify="right" if title == "bytes" else "left")
    for (name, kind, shape), alike in kinds.items():
        size = sum(tensor.nbytes for tensor in alike)
        table.add_row(name, f"x{len(alike)}", "x".join(map(str, shape)), kind, show_bytes(size))
    console.print(table)
    total = sum(tensor.nbytes for tensor in tensors.values())
    parameters = sum(tensor.num_elements for tensor in tensors.values())
    console.print(f"{len(tensors)} tensors, {parameters:,} parameters, {show_bytes(total)}")
