"""Compression of a model; with a text, after a run over it that records what its experts are given."""

import dataclasses
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Protocol, cast, overload

import jax
from jax.sharding import Mesh

from moe_jax.api.measure import default_seq_len, read_ids, score
from moe_jax.api.model import (
    Loading,
    Model,
    ModelOrPath,
    OutPath,
    destination,
    model_verb,
    open_model,
    result,
    work_bars,
)
from moe_jax.api.read_calibration import Place, calibration_folder, read_rows
from moe_jax.compression import Method, Report, Score, Sweep
from moe_jax.compression import compress as _compress
from moe_jax.compression import sweep as _sweep
from moe_jax.compression.calibration.recording import (
    FORMAT,
    Calibration,
    LayerCalibration,
    is_complete,
    read_layer,
    read_sensitivities,
    read_windows,
    record,
    write_sensitivities,
)
from moe_jax.compression.calibration.sensitivities import has_gradients, measure_sensitivities, record_gradients
from moe_jax.compression.calibration.summed_squares import summed_squares
from moe_jax.compression.in_order import OnLayer
from moe_jax.compression.rotated_source import RotatedSource
from moe_jax.compression.spec import CompressSpec, MethodOption, SweepSpec, parse_layers
from moe_jax.compression.stream import check_before_calibration, choose_layers
from moe_jax.conversion.gguf.expert_importance import expert_tensors, read_expert_importance, write_expert_importance
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import show_bytes
from moe_jax.core.terminal import Progress, no_progress, shows_work
from moe_jax.data.calibration_texts.weighted_sources import CalibrationSources, files_of, weighted_sources
from moe_jax.distributed.processes import first_decides
from moe_jax.distributed.sharding import make_mesh
from moe_jax.evaluation.held_out import check_seq_len
from moe_jax.files.staging import check_target, lock_directory
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.in_memory import CastSource, Destination
from moe_jax.model_io.model_source import ModelLike, ModelSource

P = ParamSpec("P")


class CompressVerb(Protocol[P]):
    """The type of `compress`; `P` are the fields of `CompressSpec`."""

    @overload
    def __call__(self, model: ModelOrPath, out: OutPath, spec: CompressSpec, /) -> Model: ...
    @overload
    def __call__(self, model: ModelOrPath, out: OutPath = None, *args: P.args, **kwargs: P.kwargs) -> Model: ...
    @overload
    def __call__(
        self,
        model: ModelOrPath,
        out: OutPath = None,
        *,
        method: str,
        **options: MethodOption | Sequence[int] | ModelLike | CalibrationSources,
    ) -> Model: ...


def _compress_verb(
    spec: Callable[P, CompressSpec],
) -> Callable[[Callable[[ModelOrPath, OutPath, CompressSpec], Model]], CompressVerb[P]]:
    return lambda do: cast(CompressVerb[P], model_verb(spec)(do))


def compress_model(
    model: ModelOrPath, out: OutPath, spec: CompressSpec, *, on_layer: OnLayer = lambda layer, figures, nbytes: None
) -> Model:
    """Does what `compress` does; `on_layer` is called with every layer that is done."""
    name, method = spec.named_method()
    target = destination(out)
    recovering = None
    if spec.recovers:
        from moe_jax.api.recover import Recovering  # with Optax and Grain, which compression alone does without

        recovering = Recovering(model, spec, target)
    source, shared, described = _opened(model, spec, [method])
    described |= {"method": name, **dataclasses.asdict(method)}
    calibration: Calibration | None = shared["calibration"]
    with work_bars() as progress:

        def make(target: Destination) -> Report:
            how = {"described": described, "progress": progress, "on_layer": on_layer}
            return _compress(source, target, method, **how, **shared)

        if recovering is None:
            report = make(target)
        else:
            assert calibration is not None
            read = [source, *([] if shared["base"] is None else [shared["base"]]), *calibration.files]
            report = recovering.run(make, described=described, sources=read, on_layer=on_layer, progress=progress)
    if spec.save_imatrix is not None and calibration is not None:
        first_decides(partial(_save_imatrix, spec.save_imatrix, source, calibration))
    return result(target, model, report)


@_compress_verb(CompressSpec)
def compress(model: ModelOrPath, out: OutPath, spec: CompressSpec) -> Model:
    """Makes the experts of a trained Mixture-of-Experts smaller.

        >>> moe = moe_jax.tiny_model(experts=4)
        >>> small = moe_jax.compress(moe, method="up", keep=0.25, layers="top:1")
        >>> measured = small.lineage[-1]["measured"]
        >>> measured["bytes_after"] < measured["bytes_before"]
        True

    Args:
      model: a model with MoE layers, or the path of one.
      out: where a model directory appears, which must not exist; None: the model stays in memory. A job that was killed
        goes on where it was when it is started again with the same options.
      spec: the options. `calibrate` is the path of a file, or several sources, `["text.txt", "self"]`, perhaps with the
        weights by which they share the samples, `{"text.txt": 2, "built-in": 1}`.
      keep, bits, ...: options of the method, which are the fields of its class; `moe-jax compress --help` lists them.

    Returns:
      The smaller model. Errors and bytes of every layer are in the last entry of its lineage.

    Raises:
      FileNotFoundError: if there is nothing at a path.
      InputError: if the model has no experts, an option does not go with it or the method, weights are not finite, or
        `out` exists. Nothing is left behind.
      OSError: if the disk is full. Finished layers stay beside `out`, and the same call goes on after them.
    """
    return compress_model(model, out, spec)


def sweep(
    model: ModelOrPath, out: Path, methods: Sequence[tuple[str, Method]], spec: SweepSpec, *, given: dict[str, Any]
) -> Sweep:
    """Compresses a model by several methods, scores each result on a text, and deletes it.

    `out` is the folder of results. `given` are the options of the methods as the user gave them, to be recorded.
    """
    first_decides(lambda: check_target(out))
    assert spec.text is not None
    source, shared, described = _opened(model, spec, [method for _, method in methods])
    described |= given | {"method": list(dict.fromkeys(name for name, _ in methods)), "seq_len": spec.seq_len}
    read = [source, *([] if shared["base"] is None else [shared["base"]]), as_path(spec.text)]
    read += [] if shared["calibration"] is None else shared["calibration"].files
    score_model = _scorer(source, spec)
    with work_bars() as progress:
        return _sweep(source, out, methods, score_model, described=described, sources=read, progress=progress, **shared)


def _opened(
    model: ModelOrPath, spec: CompressSpec, methods: Sequence[Method]
) -> tuple[ModelSource, dict[str, Any], dict[str, Any]]:
    """Opens and checks what a compression is given, before the first layer is compressed.

    Returns the model, cast if that was asked for; the arguments that `moe_jax.compression.compress` and `sweep` share;
    and the options as the lineage records them.
    """
    source = stored = open_model(model, spec.model_base)
    if spec.dtype is not None:
        source = CastSource(source, spec.dtype)
    base = None if spec.base is None else open_model(spec.base)
    if spec.rotate:
        source, stored = RotatedSource(source), RotatedSource(stored)
        base = None if base is None else RotatedSource(base)
    layers = parse_layers(spec.layers, source.config) if isinstance(spec.layers, str) else spec.layers
    if isinstance(spec, SweepSpec) and any(method.part != "experts" for method in methods):
        raise InputError("--sweep compares methods on experts: leave --of out")
    if spec.calibrate is None and spec.imatrix is None and not all(getattr(one, "feedback", True) for one in methods):
        raise InputError("--no-feedback: codes only make up for errors on a text; leave it out, or give --calibrate")
    # This would fail anyway, but only after a long calibration.
    indices = choose_layers(source.config, layers, part=methods[0].part)
    calibration, described = None, spec.described(layers)
    if spec.calibrate is not None:
        if spec.gradients and not indices:
            raise InputError("--gradients weights what experts are given, and no experts are compressed: leave it out")
        if spec.save_imatrix is not None:  # said now, and not after hours
            if not indices:
                raise InputError("--save-imatrix keeps what experts are given, and no experts are compressed")
            first_decides(partial(check_target, as_path(spec.save_imatrix), file=True))
            expert_tensors(source, source.config.moe_layers)
        for method in methods:
            check_before_calibration(source, method, indices, extended=spec.extended)
        needed = any(method.needs_sensitivities for method in methods)
        if indices:
            calibration = _calibration(model, stored, spec, sensitivities=needed)
        else:
            calibration = _only_rows(model, stored, spec)
        # It stands for all rows, those too that are not in files.
        described["recording"] = _name_of(calibration)
    elif spec.imatrix is not None:
        if not indices:
            raise InputError(
                "--imatrix says what experts are given, and no experts are compressed: --calibrate TEXT measures what "
                "all else is given"
            )
        calibration = _of_imatrix(spec.imatrix, source, indices)
    shared = {"base": base, "extended": spec.extended, "layers": layers, "calibration": calibration}
    return source, shared, described


def _calibration(model: ModelOrPath, source: ModelSource, spec: CompressSpec, *, sensitivities: bool) -> Calibration:
    """Records the inputs of the experts on the sources of the spec.

    The first process records it, on its own devices, and the others read what it wrote: so it does not depend, in the
    last bits, on how many processes there are.
    """
    asked = spec.calibrate
    assert asked is not None
    folder = calibration_folder(model) if spec.calibration_dir is None else Path(spec.calibration_dir)
    if folder is None and jax.process_count() > 1:
        raise InputError("several processes need --calibration-dir: a folder that all of them see")
    kept: list[Calibration] = []

    def make() -> tuple[str, dict[str, int]]:
        with work_bars() as progress:
            made = calibrate(
                source,
                asked,
                samples=spec.samples,
                seed=spec.calibration_seed or 0,
                place=None if folder is None else folder.joinpath,
                mesh=model.mesh if isinstance(model, Model) else make_mesh({"data": -1}, jax.local_devices()),
                sensitivities=sensitivities,
                gradients=spec.gradients,
                image_folder=spec.image_folder,
                progress=progress,
                **_windows(source, spec),
            )
        kept.append(made)
        if shows_work() and folder is not None and made.folder is not None:
            size = show_bytes(sum(file.stat().st_size for file in made.folder.rglob("*") if file.is_file()))
            print(
                f"moe-jax: the inputs of the experts are kept in {folder} ({size} for this text), so that other "
                "methods need not run the model again; remove that folder when you are done",
                file=sys.stderr,
            )
        return str(made.folder), dict(made.sources)

    place, tokens = first_decides(make)
    if kept:
        return kept[0]
    opened = open_calibration(Path(place), source.config.moe_layers, gradients=spec.gradients)
    return opened._replace(files=files_of(weighted_sources(asked)), sources=tokens)


def _only_rows(model: ModelOrPath, source: ModelSource, spec: CompressSpec) -> Calibration:
    """Reads the rows for a compression without experts, whose layers are given them while they are written."""
    asked = spec.calibrate
    assert asked is not None
    source.config.check_no_encoder("a calibration")
    length = default_seq_len(source.config) if spec.seq_len is None else spec.seq_len
    how: dict[str, Any] = {"seed": spec.calibration_seed or 0, "image_folder": spec.image_folder}
    folder = calibration_folder(model) if spec.calibration_dir is None else Path(spec.calibration_dir)
    with work_bars() as progress:
        place = None if folder is None else folder.joinpath
        rows = read_rows(source, asked, seq_len=length, samples=spec.samples, place=place, progress=progress, **how)
    files = files_of(weighted_sources(asked))
    return Calibration(files, {}, rows=rows, sources=rows.tokens_by_source)


def _name_of(calibration: Calibration) -> str:
    """Returns a name of all rows of a calibration: that of its folder, if it has one."""
    if calibration.folder is not None:
        return calibration.folder.name
    assert calibration.rows is not None
    return calibration.rows.digest()[:16]


def _save_imatrix(file: str | os.PathLike[str], source: ModelSource, calibration: Calibration) -> None:
    """Writes what a recording says of the inputs of experts as an imatrix file."""
    assert calibration.folder is not None
    count, length = read_windows(calibration.folder)
    about = {"datasets": list(calibration.sources), "chunk_count": count, "chunk_size": length}
    sums = summed_squares(source, calibration)
    write_expert_importance(file, expert_tensors(source, calibration.layers), sums, **about)


def _of_imatrix(file: str | os.PathLike[str], source: ModelSource, layers: Iterable[int]) -> Calibration:
    """Returns what an imatrix file says of the experts of these layers."""
    importance = read_expert_importance(file, source, layers)
    for layer, own in importance.items():
        if (found := len(own["inputs"])) != (experts := source.config.moe(layer).bank_experts):
            raise InputError(
                f"{file} knows {found} experts in layer {layer}, the model has {experts}: it is of another"
            )
    found = {layer: LayerCalibration(None, squares=own) for layer, own in importance.items()}
    return Calibration((as_path(file),), found)


def _scorer(source: ModelSource, spec: SweepSpec) -> Score:
    """Returns a function that scores a model on the text of a sweep, as `evaluate` does."""
    assert spec.text is not None
    ids, windows = read_ids(_over_devices(source), spec.text), _windows(source, spec)
    return lambda model: score(_over_devices(model), ids, **windows).nll


def _over_devices(source: ModelSource) -> Model:
    """Returns a model that is copied to all devices, each of which computes some of the windows."""
    return Model.of_source(source, Loading(mesh=make_mesh({"data": -1})))


def _windows(source: ModelSource, spec: CompressSpec) -> dict[str, Any]:
    """Returns the arguments that say how many tokens the model sees at a time."""
    most = source.config.max_positions
    if spec.seq_len is not None and spec.seq_len > most and shows_work():
        print(f"warning: {source.path} was made for {most} positions, not {spec.seq_len}", file=sys.stderr)
    return {"seq_len": spec.seq_len, "batch_size": 8 if spec.batch_size is None else spec.batch_size}


def calibrate(
    source: ModelSource,
    sources: CalibrationSources,
    *,
    samples: int | None = None,
    seq_len: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    place: Place | None = None,
    mesh: Mesh | None = None,
    sensitivities: bool = False,
    gradients: bool = False,
    image_folder: str | os.PathLike[str] | None = None,
    progress: Progress = no_progress,
) -> Calibration:
    """Runs a model over texts, layer after layer, and keeps the inputs of its experts.

    Args:
      source: a model with MoE layers.
      sources: a text file; or one of JSON or a table, whose rows are those of training data: texts, pairs and
        conversations, for a model that sees with pictures; or other sources or several, see `weighted_sources`.
      samples: number of windows, or of rows, that are drawn from them; None: 128, or as many as they have.
      seq_len, batch_size: tokens of a window, and windows computed at once; as for `evaluate`.
      seed: seed of the draw.
      place: returns the folder of the recording by its name, in which it is found again later, as are samples of the
        model itself; None: the recording lies in a temporary folder that lives as long as the result.
      mesh: devices that share the work; None: the first one.
      sensitivities: whether to measure also how much the loss depends on each matrix of each layer.
      gradients: whether to weight tokens by the squared gradients of the text's loss with respect to a layer's output.
      image_folder: the folder that names of pictures are inside of; None: that of the file.
      progress: called after every layer.

    Raises:
      InputError: if the model is dense, has an encoder or no tokenizer; the text is too short; a row or a picture
        cannot be read, or the model takes no pictures; activations are not finite; another process makes the same
        recording; or there is no room on the disk.
    """
    if batch_size < 1:
        raise InputError(f"{batch_size=} must be at least 1")
    if seed < 0:
        raise InputError(f"{seed=} must not be negative")
    if not source.config.moe_layers:
        raise InputError("the model is dense: it has no experts to calibrate")
    source.config.check_no_encoder("a calibration")
    length = default_seq_len(source.config) if seq_len is None else seq_len
    check_seq_len(length)
    drawn: dict[str, Any] = {"seq_len": length, "samples": samples, "seed": seed, "image_folder": image_folder}
    rows = read_rows(source, sources, **drawn, place=place, progress=progress)
    shape = [len(rows), rows.length]
    key = {"format": FORMAT, "model": source.fingerprint(), "windows": shape, "tokens": rows.digest()}
    name = hashlib.sha256(repr(sorted(key.items())).encode()).hexdigest()[:16]
    keep = None
    if place is None:
        keep = tempfile.TemporaryDirectory(prefix="moe_jax_calibration_")
        place = Path(keep.name).joinpath
    folder = place(name)
    mesh = make_mesh({}, jax.local_devices()[:1]) if mesh is None else mesh
    how: dict[str, Any] = {"mesh": mesh, "batch_size": batch_size, "progress": progress}
    _complete(folder, lambda: is_complete(folder, key), lambda: record(source, rows, folder, key, **how))
    layers = source.config.moe_layers
    if gradients:
        _complete(folder, lambda: has_gradients(folder, layers), lambda: record_gradients(source, rows, folder, **how))
    if sensitivities and read_sensitivities(folder, gradients=gradients) is None:
        recorded = partial(read_layer, folder, gradients=gradients)
        write_sensitivities(folder, measure_sensitivities(source, rows, recorded, **how), gradients=gradients)
    opened = open_calibration(folder, layers, gradients=gradients)
    files = files_of(weighted_sources(sources))
    return opened._replace(files=files, keep=keep, rows=rows, sources=rows.tokens_by_source)


def _complete(folder: Path, is_done: Callable[[], bool], do: Callable[[], None]) -> None:
    """Does a part of a recording unless it is done; meanwhile no other command can do it."""
    if is_done():
        return
    folder.mkdir(parents=True, exist_ok=True)
    # Two commands on one text would go on with each other's activations.
    lock = lock_directory(folder, folder)
    try:
        if not is_done():  # another command may just have done it
            do()
    finally:
        os.close(lock)


def open_calibration(folder: Path, layers: tuple[int, ...], *, gradients: bool = False) -> Calibration:
    """Opens a complete recording."""
    known = read_sensitivities(folder, gradients=gradients) or {}
    found = {i: read_layer(folder, i, gradients=gradients)._replace(sensitivities=known.get(i)) for i in layers}
    return Calibration((), found, folder)
