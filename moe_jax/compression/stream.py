"""Compresses a model, layer by layer; with several processes, each has its own layers."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moe_jax.compression.analyses import AnalysisStore, analyse_layers
from moe_jax.compression.board import Board
from moe_jax.compression.calibration.map_analysis import MapAnalysis, analyse_maps
from moe_jax.compression.calibration.recording import NOT_YET_RECORDED, Calibration
from moe_jax.compression.calibration.sensitivities import check_full_experts
from moe_jax.compression.in_order import OnLayer
from moe_jax.compression.linear_maps import LinearMap, check_maps, has_codes_below
from moe_jax.compression.measured_plans import Tried
from moe_jax.compression.methods.interface import Method, Rest, check_base
from moe_jax.compression.options.in_common import Of
from moe_jax.compression.options.in_words import compressions_of
from moe_jax.compression.part_report import TriedPlan
from moe_jax.compression.plan_work import PlanWork
from moe_jax.compression.report import LayerFigures, LayerReport, Report
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import count_bytes
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.distributed.processes import check_equal, first_decides, gathered, is_first_process
from moe_jax.distributed.sharding import make_mesh
from moe_jax.files.staging import check_target
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.in_memory import Destination, InMemory, ModelWriter, open_writer
from moe_jax.model_io.leaves_to_write import dealt
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.loading import check_leaves, leaf_specs
from moe_jax.model_io.model_source import ModelSource
from moe_jax.model_io.tuned_base import is_tuned
from moe_jax.models import ModelConfig, config_to_json


def compress(
    source: ModelSource,
    dst: Destination,
    method: Method,
    *,
    base: ModelSource | None = None,
    extended: bool = False,
    layers: Iterable[int] | None = None,
    calibration: Calibration | None = None,
    described: Mapping[str, Any],
    progress: Progress = no_progress,
    on_layer: OnLayer = lambda layer, figures, nbytes: None,
) -> Report:
    """Writes a model with its experts, or also its linear maps, compressed. Memory holds one layer at a time.

    A job that was killed continues when it is started again with the same options.

    Several processes that make the same call write one directory together. A layer is the work of one of them; each
    copies its share of the other leaves. All get the analyses, by which the layers share a budget, and plan the same.
    The result is that of one process, to the last bit. If the target is in memory, every process makes all of it.

    Args:
      source: a model with MoE layers, whatever their banks; of a method for linear maps, any.
      dst: the model directory to write, or memory.
      method: the method of compression.
      base: the dense model that the experts came from. Without it, a bank's own base, or the mean of the experts.
      extended: the universal FFN beside each bank becomes one more of its deltas.
      layers: the MoE layers to compress; None: all. The others stay as they are.
      calibration: recorded inputs of the experts on a text. Without it, all inputs and all experts count alike.
      described: the options as the user gave them: for the lineage, and to recognise the job.
      progress: called in the first process at the start and after every compressed layer, whichever process did it.
      on_layer: called there for every compressed layer in order, also for those that a killed job had done.

    Raises:
      InputError: if the model has no experts, an option does not fit it, weights are not finite, `dst` exists, or
        processes were given different arguments. Nothing is left behind by one process, or if the first one fails.
      OSError: if the disk is full. Finished work stays beside `dst`, to be continued.
    """
    shared = isinstance(dst, Path)
    decided = first_decides if shared else lambda action: action()
    if isinstance(dst, Path):
        first_decides(lambda: check_target(dst, buckets=True))
    indices = choose_layers(source.config, layers, part=method.part)
    if extended:
        _check_universal(source.config, indices)
    if base is not None:
        check_base(base.config, source.config, indices)
        check_leaves(leaf_specs(base.config), base.specs(), str(base.path))
    check_leaves(leaf_specs(source.config), source.specs(), str(source.path))
    maps = linear_maps_of(source.config, method, extended=extended)
    if method.origin is not None and base is not None:
        raise InputError(f"--base does not go with this method: it takes the {method.origin}")

    rest = Rest.of(source, maps, indices)
    work = PlanWork(
        source=source,
        method=method,
        base=base,
        extended=extended,
        indices=indices,
        rest=rest,
        calibration=calibration,
        progress=progress,
    )
    opened = [work.open_layer(i) for i in indices]
    method.check(opened)
    method.check_model(opened, rest)
    read = [source, *([base] if base is not None else []), *(() if calibration is None else calibration.files)]
    # One process is enough to take the fingerprints, for which it reads a little of every leaf.
    entry = decided(lambda: new_lineage_entry("compress", described, read))
    job = {name: entry[name] for name in ("options", "sources")}
    if shared:
        given = {name: str(value) for name, value in described.items()}
        check_equal({"the options": given, "the model": config_to_json(source.config)})
    # Analyses are not kept in a bucket: there they are made again.
    on_disk = None if isinstance(dst, InMemory) else as_path(dst).on_disk
    with contextlib.nullcontext() if on_disk is None else AnalysisStore(on_disk, job) as store:
        analyses = analyse_layers(
            method, work.open_layer, _expert_sizes(source, indices), store, progress, shared=shared
        )
        if maps and (options := method.codes_of_maps) is not None:
            rest = dataclasses.replace(rest, analysis=_analysed(work, options, store))
        make_plans = partial(method.plans, [work.open_layer(i) for i in indices], analyses, rest)
        tried: tuple[Tried, ...] = ()
        if method.tried_plans > 1:
            kept = None if store is None else store.folder / "plans.json"
            plan, tried = work.best_plan(make_plans, analyses, kept)
        else:
            plan = make_plans()[0]
        config = work.config_of(plan)
        if shared:
            check_equal({"what layers are to become": config_to_json(config)})
        lineage = [*source.lineage, entry]
        writer = open_writer(dst, config, tokenizer_files=source.tokenizer_files, lineage=lineage, resume=True)

        parts, losses = (), None
        with writer:
            if maps:
                rows = None if calibration is None else calibration.rows
                with _place_of_pass(store, "pass") as place:
                    done = work.in_order(
                        plan, analyses, rows, place, writer, doing="compressing", on_layer=on_layer
                    ).write()
                figures, parts, losses = done
            else:
                made = partial(work.compress_layer, plan, analyses)
                figures = _write(source, config, indices, made, writer, progress, on_layer, shared=shared)
            written = writer.read_back()
            stored = (source.specs(), source.stored_bytes), (written.specs, written.stored_bytes)
            before, after = decided(lambda: [_sizes(*one, indices) for one in stored])
            reports = [
                LayerReport(
                    layer=i,
                    base=method.origin or work.base_of(work.open_layer(i)).origin,
                    bytes_before=old,
                    bytes_after=new,
                    **dataclasses.asdict(figures[i]),
                )
                for i, old, new in zip(indices, before, after, strict=False)
            ]
            report = Report(
                layers=tuple(reports),
                parts=parts,
                losses=losses,
                tried=tuple(TriedPlan(one.expected, one.measured) for one in tried),
                bytes_before=before[-1],
                bytes_after=after[-1],
                earlier=compressions_of(source.lineage),
                calibration_tokens=(None if calibration is None else dict(calibration.sources)) or None,
            )
            writer.lineage[-1]["measured"] = report.to_json()
    return report


@contextlib.contextmanager
def _place_of_pass(store: AnalysisStore | None, name: str) -> Iterator[Path]:
    """A folder for a pass over the text: in that of the job's analyses, or if there is none a temporary one."""
    with tempfile.TemporaryDirectory(prefix="moe_jax_calibration_") as folder:
        place = Path(folder) if store is None else store.folder / name
        place.mkdir(exist_ok=True)
        yield place


def _analysed(work: PlanWork, options: Mapping[str, Any], store: AnalysisStore | None) -> MapAnalysis:
    """Analyses the linear maps of a job on its text; raises `InputError` if there is none."""
    calibration = work.calibration
    if calibration is None or calibration.rows is None:
        raise InputError("this method looks at what linear maps do on a text: give one with --calibrate TEXT")
    how: Any = {"mesh": make_mesh({"data": -1}, jax.local_devices()), "progress": work.progress}
    with _place_of_pass(store, "maps") as place:
        return analyse_maps(work.source, work.rest.maps, calibration.rows, place, options, **how)


def linear_maps_of(config: ModelConfig, method: Method, *, extended: bool) -> list[LinearMap]:
    """Returns the linear maps outside the experts that a method compresses.

    Raises `InputError` if it should, and there are none, or several processes share the work, or universal FFNs are to
    become experts.
    """
    if method.part == "experts":
        return []
    if extended:
        raise InputError(f"--extended makes an expert of the universal FFN, which --of {method.part} codes where it is")
    if jax.process_count() > 1:
        raise InputError(
            f"--of {method.part} runs in one process, for every layer is given what those before it give: start the "
            "command in one, which takes the memory of a layer; several share the work of --of experts"
        )
    return check_maps(config)


def choose_layers(config: ModelConfig, layers: Iterable[int] | None, *, part: Of = "experts") -> tuple[int, ...]:
    """Returns the layers whose experts are compressed, ascending, given the part of the model that is.

    Raises `InputError` if the model has none of them, or has adapters.
    """
    if part == "experts" and not config.moe_layers:
        raise InputError(
            "the model is dense: it has no experts to compress; --method quantize --of model compresses the rest, and "
            "moe-jax upcycle makes an MoE of it"
        )
    config.check_no_further("compression")
    if is_tuned(config):
        raise InputError("the model has adapters, LoRA or NF4 kernels: compress its base, and adapt what comes out")
    if layers is not None and part != "experts":
        raise InputError(f"--layers are those whose experts are compressed, and --of {part} is for all layers")
    if layers is None:
        return () if part == "rest" else config.moe_layers
    chosen = sorted(set(layers))
    others = ", ".join(str(i) for i in chosen if i not in config.moe_layers)
    if others or not chosen:
        known = ", ".join(map(str, config.moe_layers))
        raise InputError(f"--layers: {others or 'none'} of the model's MoE layers, which are {known}")
    return tuple(chosen)


def check_before_calibration(source: ModelSource, method: Method, layers: Iterable[int], *, extended: bool) -> None:
    """Raises `InputError` if a method does not fit a model on any text, before a calibration that takes long."""
    layers = tuple(layers)
    if method.needs_sensitivities:
        check_full_experts(source.config)
    if extended:
        _check_universal(source.config, layers)
    universal = {i: extended and source.config.moe(i).universal_beside for i in layers}
    some = [SourceLayer(source, i, with_universal=universal[i], calibration=NOT_YET_RECORDED) for i in layers]
    method.check(some)
    method.check_model(some, Rest.of(source, linear_maps_of(source.config, method, extended=extended), layers))


def _check_universal(config: ModelConfig, layers: Iterable[int]) -> None:
    without = [i for i in layers if config.moe(i).universal == "none"]
    if without:
        some = ", ".join(map(str, without[:4])) + (", ..." if len(without) > 4 else "")
        raise InputError(f"--extended: there is no universal FFN in layers {some}; leave it out, or choose --layers")
    for i in layers:
        moe = config.moe(i)
        if has_codes_below(config.layers[i], "mlp/universal/"):
            raise InputError(
                f"--extended: the universal FFN of layer {i} is in codes; give the model that it was made from"
            )
        if moe.universal_ffn != moe.expert:
            raise InputError(
                f"--extended: the universal FFN of layer {i} is {moe.universal_ffn.dim} wide and its experts "
                f"{moe.expert.dim}, so that they cannot share a base; leave it out, or choose --layers"
            )


def _write(
    source: ModelSource,
    config: ModelConfig,
    indices: Sequence[int],
    compress_layer: Callable[[int, Write], LayerFigures],
    writer: ModelWriter,
    progress: Progress,
    on_layer: OnLayer,
    *,
    shared: bool,
) -> dict[int, LayerFigures]:
    """Writes all leaves that are not on the disk yet, and returns the figures of every compressed layer."""
    stored = source.specs()
    by_layer: dict[int, list[str]] = {}
    specs = leaf_specs(config)
    for path in specs:
        by_layer.setdefault(int(path.split("/")[1]) if path.startswith("layers/") else -1, []).append(path)
    notes = {int(name): note for name, note in writer.notes(map(str, indices)).items()}
    # Figures may be noted before or after the last leaves of a layer are on the disk: both have to be there.
    left = [i for i in indices if not (i in notes and writer.done.issuperset(by_layer[i]))]
    owners = _distribute(source, writer, by_layer, left)
    board = Board(
        "compressing",
        indices,
        progress,
        in_turn=lambda i, note: on_layer(i, LayerFigures.from_note(note["figures"]), note["nbytes"]),
        shared=shared,
    )
    for i, paths in by_layer.items():
        made: set[str] = set()
        experts = f"layers/{i}/mlp/experts/"
        size, whole = 0, count_bytes(specs[path] for path in paths if path.startswith(experts))
        mine = i in left and (not shared or owners[i] == jax.process_index())
        if mine:

            def write(below: str, leaf: np.ndarray, i: int = i, made: set[str] = made, whole: int = whole) -> None:
                nonlocal size
                path = f"layers/{i}/mlp/{below}"
                made.add(path)
                size += leaf.nbytes if below.startswith("experts/") else 0  # others are routers and universal FFNs
                if path not in writer.done:
                    writer.write({path: leaf})
                # A layer may take minutes: its progress is shown before it is done.
                board.working(min(1.0, size / whole))

            figures = compress_layer(i, write)
            left_alone = (path for path in paths if path.startswith(experts) and path not in made and path in stored)
            size += count_bytes(stored[path] for path in left_alone)
            notes[i] = {"figures": dataclasses.asdict(figures), "nbytes": size}
            writer.note(str(i), notes[i])
        for path in paths:
            if path in stored and path not in made and path not in writer.done and writer.mine(path):
                writer.write({path: source.read(path)})
        if mine or (i in indices and i not in left and is_first_process()):
            board.done(i, notes[i])
    board.wait()
    if shared:
        notes = {int(i): note for one in gathered(notes) for i, note in one.items()}
    board.complete(notes)
    return {i: LayerFigures.from_note(notes[i]["figures"]) for i in indices}


def _distribute(
    source: ModelSource, writer: ModelWriter, by_layer: Mapping[int, Sequence[str]], left: Sequence[int]
) -> dict[int, int]:
    """Distributes the remaining work: returns which process compresses each layer, and which copies each other leaf."""
    stored, sizes = source.specs(), _expert_sizes(source, left)
    of_experts = {path for i in left for path in by_layer[i] if path.startswith(f"layers/{i}/mlp/")}
    copied = [path for paths in by_layer.values() for path in paths if path not in of_experts | writer.done]
    owners = dealt({**sizes, **{path: count_bytes([stored[path]]) for path in copied if path in stored}})
    layers = {i: owners[i] for i in left}
    writer.deal(
        {path: owners[path] for path in copied if path in owners}
        | {path: layers[i] for i in left for path in by_layer[i] if path in of_experts}
    )
    return layers


def _expert_sizes(source: ModelSource, layers: Iterable[int]) -> dict[int, int]:
    """Returns the bytes of the experts of each layer, with the rest of their MoE, by which the work is shared."""
    sizes = dict.fromkeys(layers, 0)
    for path, spec in source.specs().items():
        names = path.split("/")
        if names[0] == "layers" and names[2] == "mlp" and int(names[1]) in sizes:
            sizes[int(names[1])] += count_bytes([spec])
    return sizes


def _sizes(paths: Iterable[str], stored_bytes: Callable[[str], int], layers: Sequence[int]) -> list[int]:
    """Returns the bytes of the experts and the universal FFN of each layer, wherever that is; and at last, of all."""
    sizes = {path: stored_bytes(path) for path in paths}
    prefixes = [(f"layers/{i}/mlp/experts/", f"layers/{i}/mlp/universal/") for i in layers]
    of_layers = [sum(size for path, size in sizes.items() if path.startswith(some)) for some in prefixes]
    return [*of_layers, sum(sizes.values())]
