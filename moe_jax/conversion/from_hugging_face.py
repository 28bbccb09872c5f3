"""Converts a checkpoint, a Hugging Face directory or a GGUF file, to a model directory."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from moe_jax.conversion.checkpoint_source import CheckpointSource
from moe_jax.conversion.gguf.gguf_header import is_gguf
from moe_jax.conversion.gguf.gguf_model import GGUFModel
from moe_jax.conversion.hf_config import read_hf_config
from moe_jax.conversion.hugging_face_dir import HuggingFaceDirectory, completed_config, has_weights
from moe_jax.conversion.kept_codes import KeptCodes
from moe_jax.conversion.model_table import mapped as mapped_model
from moe_jax.conversion.spec import ConvertSpec
from moe_jax.conversion.table import PER_EXPERT, Mapped, print_mapping
from moe_jax.conversion.tensors import DTYPES_BY_NAME
from moe_jax.conversion.vision_formats import vision_format_named
from moe_jax.conversion.vision_formats.elsewhere import Elsewhere
from moe_jax.core.errors import InputError, check_member
from moe_jax.core.formatting import count_bytes
from moe_jax.core.terminal import ByteProgress, console_for_tables
from moe_jax.distributed.processes import first_decides, is_first_process
from moe_jax.files.json_toml import read_json_object
from moe_jax.files.staging import check_target, refuse_existing, require_space
from moe_jax.files.storage_path import as_path, nearest_path
from moe_jax.model_io.in_memory import InMemory, open_writer
from moe_jax.model_io.leaves_to_write import ZeroExperts, zero_experts_line
from moe_jax.model_io.lineage import local_model, new_lineage_entry
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_names import why_a_path


def convert(
    src: Path | str,
    dst: Path | str | InMemory,
    spec: ConvertSpec = ConvertSpec(),
    *,
    dry_run: bool = False,
    console: Console | None = None,
) -> None:
    """Writes a checkpoint as a model directory, leaf by leaf, in memory that does not grow with its size.

    With several processes, each reads and writes its own leaves. For a dry run, which prints the mapping and sizes, a
    config.json alone is enough, and for a model on the Hub only that is fetched.

    Raises:
      FileNotFoundError: if there is nothing at `src`.
      InputError: if the checkpoint is damaged or does not fit its config, weights are not finite or too large for
        the dtype, or `dst` exists.
      OSError: if the disk is full. Nothing is at `dst` then, and the same call continues the work.
    """
    console = console or console_for_tables(stderr=not dry_run)
    if not is_first_process():
        console = Console(quiet=True)
    dtype = spec.dtype
    if dtype is not None:
        check_member("dtype", dtype, tuple(DTYPES_BY_NAME))
    if not isinstance(dst, InMemory):
        dst = as_path(dst)
        check = refuse_existing if dry_run else check_target
        first_decides(lambda: check(dst, buckets=True))
    src = local_model(src, weights=not dry_run)
    if not src.exists():
        expected = "expected a Hugging Face directory or a GGUF file"
        raise FileNotFoundError(f"there is nothing at {src}; {expected}{why_a_path(src)}{nearest_path(src)}")
    elsewhere = _elsewhere(spec, weights=not dry_run)
    source: HuggingFaceDirectory | GGUFModel
    if is_gguf(src):
        elsewhere.check(takes_parts=False)
        if spec.further == "keep":
            raise InputError(f"--further keep: {src} is a GGUF file, of which these layers are not read")
        source = GGUFModel(src)
    elif dry_run and not (src.is_dir() and has_weights(src)):
        _print_expected(src, spec, elsewhere, console)
        return
    else:
        further = spec.further == "keep"
        source = HuggingFaceDirectory(src, ignored_keys=spec.ignored_keys, elsewhere=elsewhere, further=further)
    if (codes := source.codes_inside()) is not None:
        said = f"quantised tensors become {dtype or 'float32'}: {codes.in_words()}"
        for line in filter(None, (said, codes.partly)):
            console.print(line, markup=False, soft_wrap=True)
    kept = _kept_codes(source) if spec.codes == "keep" else None
    for line in kept.describe() if kept is not None else ():
        console.print(line, markup=False, soft_wrap=True)
    target = DTYPES_BY_NAME[dtype] if dtype else None
    for why, count in Counter(source.weights.ignored.values()).items():
        console.print(f"left out: {count} tensors, {why}")
    if source.config.vision is not None and (note := vision_format_named(source.config.vision.family).note):
        console.print(f"note: {source.config.vision.family}: {note}")
    if dry_run:
        shapes = {name: entry.shape for name, entry in source.weights.tensors.items()}
        specs = _specs(source, target)
        print_mapping(
            Mapped(shapes, source.weights.pieces), specs, source.specs(), console, codes=source.kinds_of_codes()
        )
        return

    reader = source if kept is None else kept
    specs = _specs(reader, target)
    config = replace(reader.config, dtype=dtype) if dtype else reader.config
    options = {"dtype": dtype, "ignore_keys": sorted(spec.ignored_keys), "allow_nonfinite": spec.allow_nonfinite}
    options |= {} if kept is None else {"codes": spec.codes}
    options |= {"further": spec.further} if spec.further == "keep" else {}
    options |= {name: str(place) for name, place in elsewhere._asdict().items() if place is not None}
    # An exported directory brings its own history.
    lineage = [*source.lineage, new_lineage_entry("convert", options, [source])]
    total = count_bytes(specs.values())
    if isinstance(dst, Path):
        require_space(dst, total)
    zero = ZeroExperts()
    with ByteProgress(console, "converting", total) as progress:
        with open_writer(
            dst,
            config,
            tokenizer_files=source.tokenizer_files,
            lineage=lineage,
            resume=True,
            allow_nonfinite=spec.allow_nonfinite,
        ) as writer:
            if is_first_process():
                for path in filter(ZeroExperts.concerns, writer.done):
                    zero.add(path, reader.read(path))
            missing = {path: spec for path, spec in specs.items() if path not in writer.done and writer.mine(path)}
            progress.skip(total - count_bytes(missing.values()))
            for path, leaf in _read_ahead(reader, missing):
                writer.write({path: leaf})
                zero.add(path, leaf)
                progress.advance(leaf.nbytes)
            zero.gather()
            found = {"zero_experts": zero.by_layer} if zero.by_layer else {}
            writer.lineage[-1]["measured"] = {**progress.measured(), **found}
    if zero.by_layer:
        console.print(f"note: {zero_experts_line(zero.by_layer)}", markup=False, soft_wrap=True)
    where = f"wrote {dst}" if isinstance(dst, Path) else f"read {src}"
    console.print(f"{where}: {progress.summary()}", markup=False)


def _kept_codes(source: CheckpointSource) -> KeptCodes:
    """Returns a checkpoint whose experts stay in codes; raises `InputError` if none can."""
    if not isinstance(source, HuggingFaceDirectory) or source.quantized_as is None:
        raise InputError(f"{source.path}: --codes keep is for a Hugging Face directory with a quantization_config")
    return KeptCodes(source)


def _specs(reader: CheckpointSource | KeptCodes, target: np.dtype | None) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the leaves as they are written: in the dtype `target`, if one is given, unless they stay in codes."""
    stays = reader.is_kept if isinstance(reader, KeptCodes) else lambda path: False
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if target is None or stays(path) else target)
        for path, leaf in reader.specs().items()
    }


def _elsewhere(spec: ConvertSpec, *, weights: bool) -> Elsewhere:
    tower = None if spec.vision_tower is None else local_model(as_path(spec.vision_tower), weights=weights)
    return Elsewhere(tower, None if spec.projector is None else as_path(spec.projector))


def _print_expected(path: Path, spec: ConvertSpec, elsewhere: Elsewhere, console: Console) -> None:
    """Prints the mapping of an absent checkpoint, whose config.json, or directory with it, is at a path."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no config at {file}")
    try:
        data = completed_config(read_json_object(file, allow=("nonfinite",)), elsewhere, ())
        config = read_hf_config(data, ignored=spec.ignored_keys, further=spec.further == "keep")
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    stored, leaves = leaf_specs(config), leaf_specs(config, spec.dtype)
    mapped = mapped_model(config, stored, PER_EXPERT)
    console.print(f"{file} has no weights beside it; a checkpoint of this config holds:", markup=False)
    print_mapping(mapped, leaves, stored, console)


def _read_ahead(
    source: CheckpointSource | KeptCodes, specs: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields leaves in order, and reads each while the caller works on the previous one, with two buffers in turn.

    New memory for every leaf would cost as much as reading it, because the system has to clear it.
    """
    largest = max((count_bytes([spec]) for spec in specs.values()), default=0)
    buffers = itertools.cycle([np.empty(largest, np.uint8) for _ in range(2)])
    with ThreadPoolExecutor(1) as pool:
        # Lazily: the reading of a leaf begins when it is taken from here.
        started = ((path, pool.submit(source.read, path, spec.dtype, next(buffers))) for path, spec in specs.items())
        upcoming = next(started, None)
        while upcoming is not None:
            path, reading = upcoming
            leaf, upcoming = reading.result(), next(started, None)
            yield path, leaf
