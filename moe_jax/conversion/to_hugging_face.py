"""Exports any model as a Hugging Face directory."""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from rich.console import Console

from moe_jax.conversion.checkpoint_source import WORKERS, match_weights, row_chunks
from moe_jax.conversion.formats.coded_parts import CodingErrors, Pack, Packing, part_of
from moe_jax.conversion.formats.encoders import WholeNumbers
from moe_jax.conversion.hf_config import kept_keys, read_hf_config, write_hf_config
from moe_jax.conversion.hf_format import MergedModel, exported_config, print_changes
from moe_jax.conversion.hugging_face_dir import open_checkpoint
from moe_jax.conversion.model_card import model_card
from moe_jax.conversion.model_table import mapped as mapped_model
from moe_jax.conversion.safetensors_file import PlannedTensor, shard_writer
from moe_jax.conversion.spec import ExportSpec
from moe_jax.conversion.table import LAYOUTS, Mapped, Piece, print_mapping
from moe_jax.conversion.tensors import DTYPE_NAMES, DTYPES_BY_NAME, TensorEntry, copy_transposed
from moe_jax.conversion.to_peft import kinds_without_place, problems_of_adapter
from moe_jax.conversion.vision_formats import vision_format_named
from moe_jax.core.errors import InputError, check_member
from moe_jax.core.finite import REMEDY, check_finite, check_fits
from moe_jax.core.formatting import count_bytes, parse_bytes, show_bytes
from moe_jax.core.terminal import ByteProgress, console_for_tables
from moe_jax.data.end_tokens import end_tokens, generation_settings
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.files.remote_work import RemoteWork
from moe_jax.files.staging import Workplace, check_beside, check_target, open_work, refuse_existing, require_space
from moe_jax.files.storage_path import as_path
from moe_jax.files.tokenizer_files import GENERATION, PREPROCESSOR, PROCESSOR, TOKENIZER, copy_tokenizer_files
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
    dry_run: bool = False,
    console: Console | None = None,
) -> None:
    """Writes a model as a Hugging Face directory that Transformers loads, in memory that does not grow with its size.

    If `packed` is given, parts of it are written in codes; a dry run only prints the mapping and sizes.

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
        tensors = packing.planned(mapped, tensors, {path: leaf.dtype for path, leaf in specs.items()})
    sizes = {
        path: sum(tensors[name].nbytes for name in _tensors_of(path, mapped, packing))
        if packing is not None and packing.encoder_of(path) is not None
        else count_bytes([spec])
        for path, spec in specs.items()
    }
    print_changes(source.config, config, sizes, console)
    if packing is not None:
        for line in (packing.said(source), *packing.container.notes(packing.encoders, _main_dtype(specs))):
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
    lineage = [*source.lineage, new_lineage_entry("export", options, [source])]
    with ByteProgress(console, "exporting", total) as progress:
        with open_work(dst, job_of(lineage)) as work:
            folder = work.folder
            # Before the weights, so that no copied file can take their place.
            settings = _generation_settings(source)
            files: dict[str, Path | bytes] = {file.name: file for file in source.tokenizer_files}
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
                written = read_hf_config(keys, ignored=kept_keys(config), processing=_processing_of(config))
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


def _processing_of(config: ModelConfig) -> ImageProcessing | None:
    return None if config.vision is None else config.vision.processing


def _processor_files(source: ModelSource, config: ModelConfig) -> dict[str, dict[str, Any]]:
    """Returns the files that say how a model that sees takes pictures, by their names."""
    vision = config.vision
    if vision is None:
        return {}
    format_ = vision_format_named(vision.family)
    processor, made = format_.processor, format_.image_processor
    if made is not None and {PREPROCESSOR, PROCESSOR} & {file.name for file in source.tokenizer_files}:
        return {}  # they say more than we read of them
    processing = (made or write_processing)(vision.processing)
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


class Sized(Protocol):
    """A planned tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in its file."""
        ...


class TensorWriter(Protocol):
    """A file, or several, whose planned tensors are written run by run."""

    def write(self, name: str, offset: int, values: np.ndarray) -> int:
        """Writes a contiguous run of a tensor, from element `offset` on; returns the number of bytes that it took."""
        ...

    def sync(self) -> bool:
        """Waits until the written bytes are safe, if that is possible yet; returns whether all of them are."""
        ...

    def are_kept(self, names: Iterable[str]) -> bool:
        """Whether an interrupted command is known to have written all of these tensors."""
        ...


@dataclass(frozen=True, kw_only=True)
class LeafWriting:
    """The writing of a model's tensors, leaf by leaf.

    Attributes:
      model: whose leaves are written.
      mapped: the pieces of its leaves.
      specs: shapes of the leaves, and the dtypes in which the writer takes them.
      tensors: what is planned, by name.
      writer: writes runs of tensors.
      progress: advances by the bytes that were written.
      packing: how experts are put in codes; None: they are not.
      allow_nonfinite: whether NaN and infinity may be written.
      orders: for tensors whose rows are in another order than the leaf's, the leaf's row of each.
      added: for tensors that hold more than the leaf, what is added to every number.
    """

    model: MergedModel
    mapped: Mapped
    specs: Mapping[str, jax.ShapeDtypeStruct]
    tensors: Mapping[str, Sized]
    writer: TensorWriter
    progress: ByteProgress
    packing: Packing | None
    allow_nonfinite: bool
    orders: Mapping[str, np.ndarray] = field(default_factory=dict)
    added: Mapping[str, float] = field(default_factory=dict)
    errors: CodingErrors = field(default_factory=CodingErrors)

    def write_layers(self, work: Workplace | RemoteWork) -> None:
        """Writes the layers that no interrupted command has written, and notes each when it is on disk."""
        by_layer: dict[str, list[str]] = {}
        for path in self.mapped.pieces:
            by_layer.setdefault(path.split("/")[1] if path.startswith("layers/") else "rest", []).append(path)
        written = work.notes(by_layer)
        for layer, paths in by_layer.items():
            names = {name for path in paths for name in _tensors_of(path, self.mapped, self.packing)}
            size = sum(self.tensors[name].nbytes for name in names)
            if layer in written or self.writer.are_kept(names):
                self.progress.skip(size)
                continue
            for path in paths:
                if self.packing is not None and self.packing.encoder_of(path) is not None:
                    self._write_packed(path, self.packing)
                else:
                    self._write_leaf(path)
            if self.writer.sync():
                work.note(layer, {"bytes": size})

    def _write_packed(self, path: str, packing: Packing) -> None:
        """Writes the kernels of a leaf in codes: in stored codes, or else in new ones."""
        by_expert, encoder = {piece.expert: piece for piece in self.mapped.pieces[path]}, packing.encoder_of(path)
        assert encoder is not None
        for expert, tensors in self._in_codes(path, packing):
            piece = by_expert.pop(expert)
            for ending, values in tensors.items():
                contiguous = np.ascontiguousarray(values)
                self.progress.advance(self.writer.write(encoder.name_of(piece.tensor, ending), 0, contiguous))
        assert not by_expert, (path, by_expert)

    def _in_codes(self, path: str, packing: Packing) -> Iterator[tuple[int | None, dict[str, np.ndarray]]]:
        """Yields the tensors of every kernel of a leaf, by their endings, and counts the errors of new codes."""
        encoder, scales = packing.encoder_of(path), packing.scales(path, self.specs[path].dtype)
        assert encoder is not None
        if packing.stored and part_of(path) == "experts":
            assert isinstance(encoder, WholeNumbers)
            shape = self.mapped.pieces[path][0].shape
            for expert, codes in self.model.codes(path):
                yield expert, encoder.tensors(codes, shape, scales)
            return
        before, made = None, None
        for expert, kernel in self._parts_of(path, self.mapped.pieces[path]):
            if kernel is not before or made is None:  # those of a dense layer are one kernel, and of merged experts
                name = path if expert is None else f"{path}[{expert}]"
                check_finite(name, kernel, REMEDY)
                matrix = np.ascontiguousarray(kernel.T, np.float32)
                before, made = kernel, encoder.encoded(matrix, scales)
                self.errors.add(path, matrix, made.decoded)
            yield expert, made.tensors

    def _write_leaf(self, path: str) -> None:
        """Writes one leaf. The next expert is made while the previous one is written; two are in memory."""
        pieces, dtype = self.mapped.pieces[path], self.specs[path].dtype
        with ThreadPoolExecutor(WORKERS) as pool:
            writing: list[Future[None]] = []
            waiting: dict[int | None, list[Piece]] = {}
            for piece in pieces:
                waiting.setdefault(piece.expert, []).append(piece)
            for expert, part in self._parts_of(path, pieces):
                name = path if expert is None else f"{path}[{expert}]"
                if not self.allow_nonfinite:
                    check_finite(name, part, REMEDY)
                check_fits(name, part, dtype)
                chunks = [
                    (piece, rows) for piece in waiting.pop(expert) for rows in row_chunks(piece.shape, dtype.itemsize)
                ]
                before, writing = writing, [pool.submit(self._write_rows, part, *chunk, dtype) for chunk in chunks]
                for future in before:
                    future.result()
            for future in writing:
                future.result()
            assert not waiting, (path, waiting)

    def _parts_of(self, path: str, pieces: list[Piece]) -> Iterator[tuple[int | None, np.ndarray]]:
        """Yields the parts of a leaf, cut as its pieces are: heads that have a tensor each are stacked in one part."""
        for expert, part in self.model.parts(path):
            if expert is None and pieces[0].expert is not None:
                yield from enumerate(part)
            else:
                yield expert, part

    def _write_rows(self, part: np.ndarray, piece: Piece, rows: tuple[int, int], dtype: np.dtype) -> None:
        """Writes some rows of a tensor from the leaf, or the expert of a leaf, that holds them."""
        start, stop = rows
        part = part if piece.columns is None else part[:, slice(*piece.columns)]
        order = self.orders.get(piece.tensor)
        chosen = slice(start, stop) if order is None else order[start:stop]
        with np.errstate(all="ignore"):  # numbers that are not finite were found before, or are allowed
            cut = (part[:, chosen] if piece.transpose else part[chosen]).astype(dtype, copy=False)
        if piece.transpose:
            values = np.empty(cut.shape[::-1], dtype)
            copy_transposed(cut, values)
        else:
            values = np.ascontiguousarray(cut)
        if piece.tensor in self.added:
            values = values + values.dtype.type(self.added[piece.tensor])
        offset = piece.offset + start * math.prod(piece.shape[1:])
        self.progress.advance(self.writer.write(piece.tensor, offset, values))


def _tensors_of(path: str, mapped: Mapped, packing: Packing | None) -> Iterator[str]:
    """Yields the tensors that hold a leaf."""
    for piece in mapped.pieces[path]:
        yield from [piece.tensor] if packing is None else packing.tensors_of(path, piece)


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
