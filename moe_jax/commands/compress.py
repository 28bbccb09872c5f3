"""`moe-jax compress MODEL OUT`: the experts of a trained MoE made smaller, by one of several methods.

With `--sweep` several models are made, scored and thrown away; OUT then holds a table and a picture of quality against
bytes.
"""

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from moe_jax.commands import optional
from moe_jax.commands.method_options import command_fields, given_options, one_method, swept_methods
from moe_jax.compression import METHODS, compress, sweep
from moe_jax.compression.choose_layers import parse_layers
from moe_jax.compression.job.stream import check_before_calibration, choose_layers
from moe_jax.core.errors import InputError, flag_of
from moe_jax.files.storage_path import as_path

if TYPE_CHECKING:
    from moe_jax.api.model import Model
    from moe_jax.compression import Calibration, Score
    from moe_jax.compression.layer_figures import LayerFigures
    from moe_jax.model_io.model_source import ModelSource


def _methods() -> str:
    """What every method is, in the words of its docstring."""
    summaries = (f"{name}: {(inspect.getdoc(method) or name).splitlines()[0]}" for name, method in METHODS.items())
    return "\n".join(["How. With --sweep several, separated by commas, by default all.", *summaries])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    in_buckets: ClassVar[tuple[str, ...]] = ("model", "out", "base", "model_base", "calibrate", "text")

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """A model with MoE layers: a model directory, an adapter directory, a Hugging Face directory, or RUN@STEP: a
    checkpoint of a run."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Where the model directory (with --sweep, the folder of results) appears; must not exist."""
    method: Annotated[str | None, optional("NAME", text=_methods())] = None
    base: Annotated[Path | None, optional("DENSE")] = None
    """The dense model that the experts came from, for deltas from it; by default the base that a layer has already, or
    else the mean of its experts."""
    model_base: Annotated[Path | None, optional("DIR", "where it was")] = None
    """Where the model is now that MODEL stands on, if it was moved: the base of an adapter directory, or what the run
    of a checkpoint was begun with."""
    extended: bool = False
    """The universal FFN beside the experts becomes one more delta of the same base."""
    layers: Annotated[str | None, optional("all|top:N|0,3,8-11", "all")] = None
    """The layers to compress, counted from 0, or the last N MoE layers; the others stay as they are. Of a model with an
    encoder, encoder:SOME,decoder:SOME counts them in each stack."""
    calibrate: Annotated[Path | None, optional("FILE")] = None
    """A text file that the model is run on first: methods that merge experts then know how these are used, all others
    (but sp and mlp-fusion, which do not look at it) what the experts are given, and keep what changes outputs least.
    Without it, all experts and all inputs count alike, and methods that look at outputs (reap, hc-smoe, d2-moe) can do
    nothing."""
    samples: Annotated[int | None, optional("INT", "128, or as many as there are")] = None
    """With --calibrate: windows that are drawn of the text."""
    calibration_seed: Annotated[int | None, optional("INT", "0")] = None
    """With --calibrate: seed of the draw."""
    gradients: bool = False
    """With --calibrate: tokens count by the squared gradient of the text's loss with respect to what a layer gives for
    them; otherwise all alike. The pass over the text then also runs backwards."""
    calibration_dir: Annotated[Path | None, optional("DIR", "MODEL.calibration")] = None
    """With --calibrate: where the recording is kept, for the same text to be used again."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, optional("float32|bfloat16|float16", "as stored")
    ] = None
    """Dtype of what is not in codes, in experts and in all else."""
    json: bool = False
    """Prints JSON lines and nothing else: one per layer as soon as it is done, and at last one for the model. With
    --sweep, what sweep.json holds."""
    sweep: bool = False
    """Error and perplexity of --text over a range of what is kept; OUT holds sweep.json and sweep.png, and no model."""
    text: Annotated[Path | None, optional("FILE")] = None
    """With --sweep, which requires it: a text file."""
    seq_len: Annotated[int | None, optional("TOKENS", "1024, or what the model can do")] = None
    """With --sweep or --calibrate: tokens that the model sees at a time."""
    batch_size: Annotated[int | None, optional("INT", "8")] = None
    """With --sweep or --calibrate: windows computed at once. Does not change the result."""


Options = dataclasses.make_dataclass("Options", command_fields(), bases=(_Job,), frozen=True, kw_only=True)
Options.__doc__ = """Makes the experts of a trained Mixture-of-Experts smaller.

A centre is an expert in the middle of all, which they share; a residual, or delta, is what one differs by from it; the
design matrix of an expert has all weights of a neuron in one row. An option of several methods says what each takes it
for.

Interrupted, even killed, it goes on where it was when the same command is given again. Several processes share the
layers.
"""


GROUPS = {
    "what is compressed, and how": (
        "method",
        "layers",
        "dtype",
    ),
    "what a method measures or begins with": (
        "base",
        "calibrate",
        "samples",
        "calibration_seed",
        "gradients",
        "calibration_dir",
        "extended",
    ),
    "trying several": (
        "sweep",
        "text",
        "seq_len",
        "batch_size",
    ),
    "of the methods": tuple(name for name, *_ in command_fields()),
}
EXAMPLES = """
moe-jax compress moe-dir small-dir --method resmoe --keep 0.25
moe-jax compress moe-dir small-dir --method quantize --bits 4
moe-jax compress moe-dir small-dir --method quantize --bits 3 --calibrate text.txt --samples 64
moe-jax compress moe-dir small-dir --method resmoe --target-bytes 12GB
# which method, by perplexity at equal bytes
moe-jax compress moe-dir sweep-dir --sweep --text held-out.txt --method resmoe,quantize --keep 0.1,0.5 --bits 2,4
"""


def run(options: _Job) -> None:
    """Compresses, and prints what came out.

    Raises:
      FileNotFoundError, InputError: bad input; see `moe_jax.compress`.
    """
    from moe_jax.api.open_source import open_source
    from moe_jax.commands.printed.compression_tables import print_report, print_sweep
    from moe_jax.core.terminal import progress_bars
    from moe_jax.distributed.processes import first_decides, is_first_process, join_processes
    from moe_jax.files.staging import check_target
    from moe_jax.model_io.cast_source import CastSource

    _check_use_of_text(options)
    given = given_options(options)
    if options.sweep:
        names = options.method.split(",") if options.method else ()
        methods = swept_methods(names, given, calibrated=options.calibrate is not None)
    elif options.method is None:
        raise InputError("--method is missing; see moe-jax compress --help")
    else:
        method = one_method(options.method, given)
        methods = [(options.method, method)]
    join_processes()
    source = open_source(options.model, base=options.model_base)
    stored = source
    if options.dtype is not None:
        source = CastSource(source, options.dtype)
    base = open_source(options.base) if options.base is not None else None
    layers = parse_layers(options.layers, source.config) if options.layers is not None else None
    # What would be found out anyway, but after a long calibration.
    first_decides(lambda: check_target(options.out, buckets=not options.sweep))
    indices = choose_layers(source.config, layers)
    if options.calibrate is not None:
        for _, one in methods:
            check_before_calibration(source, one, indices, extended=options.extended)
    needed = any(one.needs_sensitivities for _, one in methods)
    calibration = _calibration(stored, options, sensitivities=needed)
    shared = {"base": base, "extended": options.extended, "layers": layers, "calibration": calibration}
    described = {"base": options.base, "extended": options.extended, "layers": layers}
    if options.dtype is not None:
        described |= {"dtype": options.dtype}
    if options.calibrate is not None:
        described |= {name: getattr(options, name) for name in ("calibrate", "seq_len", "samples", "calibration_seed")}
        described |= {"gradients": True} if options.gradients else {}
    if options.sweep:
        described |= given | {"method": list(dict.fromkeys(name for name, _ in methods)), "seq_len": options.seq_len}
        read = [source, *([base] if base is not None else []), options.text]
        read += [options.calibrate] if options.calibrate is not None else []
        score = _scorer(source, options)
        with progress_bars(shown=is_first_process()) as progress:
            result = sweep(
                source, options.out, methods, score, described=described, sources=read, progress=progress, **shared
            )
        if is_first_process():
            print_sweep(options.out, result, as_json=options.json)
        return
    described |= {"method": options.method, **dataclasses.asdict(method)}
    with progress_bars(shown=is_first_process()) as progress:
        report = compress(
            source,
            options.out,
            method,
            described=described,
            progress=progress,
            on_layer=_print_layer if options.json else lambda *done: None,
            **shared,
        )
    if is_first_process():
        print_report(options.model, options.out, report, as_json=options.json)


def _print_layer(layer: int, figures: "LayerFigures", nbytes: int) -> None:
    print(json.dumps({"layer": layer, **dataclasses.asdict(figures), "bytes": nbytes}), flush=True)


def _check_use_of_text(options: _Job) -> None:
    if options.text is not None and not options.sweep:
        raise InputError("--text: only with --sweep")
    if options.sweep and options.text is None:
        raise InputError("--sweep needs --text FILE, to measure the perplexity of")
    sizes = {"--seq-len": options.seq_len, "--batch-size": options.batch_size}
    unused = [name for name, value in sizes.items() if value is not None]
    if unused and not options.sweep and options.calibrate is None:
        raise InputError(f"{', '.join(unused)}: only with --sweep or --calibrate")
    of_calibration = ("samples", "calibration_seed", "calibration_dir")
    unused = [flag_of(name) for name in of_calibration if getattr(options, name) is not None]
    unused += ["--gradients"] if options.gradients else []
    if unused and options.calibrate is None:
        raise InputError(f"{', '.join(unused)}: only with --calibrate")
    if options.batch_size is not None and options.batch_size < 1:
        raise InputError(f"--batch-size {options.batch_size} must be at least 1")


def _calibration(source: "ModelSource", options: _Job, *, sensitivities: bool) -> "Calibration | None":
    """What the experts are given on the text of --calibrate.

    The first process records it, on its own devices, and the others read what it wrote: so it does not depend, in the
    last bits, on how many processes there are.
    """
    if options.calibrate is None:
        return None
    import jax

    from moe_jax.api.calibrate import calibrate, open_calibration
    from moe_jax.core.terminal import progress_bars
    from moe_jax.distributed.processes import first_decides
    from moe_jax.distributed.sharding import make_mesh

    text, folder = options.calibrate, _calibration_folder(options)
    if folder is None and jax.process_count() > 1:
        raise InputError("several processes need --calibration-dir: a folder that all of them see")
    kept: list[Calibration] = []

    def make() -> str:
        with progress_bars() as progress:
            made = calibrate(
                source,
                text,
                samples=options.samples,
                seed=options.calibration_seed or 0,
                place=None if folder is None else folder.joinpath,
                mesh=make_mesh({"data": -1}, jax.local_devices()),
                sensitivities=sensitivities,
                gradients=options.gradients,
                progress=progress,
                **_windows(source, options),
            )
        kept.append(made)
        return str(made.folder)

    place = first_decides(make)
    return (
        kept[0] if kept else open_calibration(Path(place), text, source.config.moe_layers, gradients=options.gradients)
    )


def _calibration_folder(options: _Job) -> Path | None:
    """Where recordings of the model are kept: beside it if that can be written; None: nowhere."""
    if options.calibration_dir is not None:
        return options.calibration_dir
    on_disk = as_path(options.model).on_disk
    if on_disk is None or not on_disk.is_dir():
        return None
    model = Path(os.path.abspath(on_disk))  # `.` and `..` have no name of their own
    return model.with_name(f"{model.name}.calibration") if os.access(model.parent, os.W_OK) else None


def _scorer(source: "ModelSource", options: _Job) -> "Score":
    """Scores models by the text, as `moe-jax eval` does."""
    from moe_jax.api.run import read_ids, score

    assert options.text is not None
    ids, windows = read_ids(_over_devices(source), options.text), _windows(source, options)
    return lambda model: score(_over_devices(model), ids, **windows).nll


def _over_devices(source: "ModelSource", devices: Sequence[Any] | None = None) -> "Model":
    """A model that will be copied to all devices, or to some, each of which computes some of the windows."""
    from moe_jax.api.model import Loading, Model
    from moe_jax.distributed.sharding import make_mesh

    return Model.of_source(source, Loading(mesh=make_mesh({"data": -1}, devices)))


def _windows(source: "ModelSource", options: _Job) -> dict[str, Any]:
    """How many tokens the model is to see at a time."""
    most = source.config.max_positions
    if options.seq_len is not None and options.seq_len > most:
        print(f"warning: {options.model} was made for {most} positions, not {options.seq_len}", file=sys.stderr)
    return {"seq_len": options.seq_len, "batch_size": 8 if options.batch_size is None else options.batch_size}
