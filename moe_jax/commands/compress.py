"""`moe-jax compress MODEL OUT`: the experts of a trained MoE made smaller; with `--sweep`, several methods compared.

The fields of the methods are the only list of their options: a method that is added has its options at once.
"""

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import tyro

from moe_jax.commands.options import (
    Field,
    by_name,
    check_sources,
    command_options,
    field_name,
    field_value,
    given_to,
    metavar,
    parts_of,
    shown_default,
    switch_field,
    words_of,
)
from moe_jax.compression.spec import (
    METHOD_OPTIONS,
    CompressSpec,
    MethodOptions,
    SweepSpec,
    make_options,
    make_swept_options,
)
from moe_jax.core.errors import InputError, check_member, flag_of, shown
from moe_jax.core.formatting import parse_bytes, show_bytes
from moe_jax.core.terminal import console_for_tables, table_of_figures
from moe_jax.core.verb_spec import Option, attribute_texts, options_of

if TYPE_CHECKING:
    from rich.console import Console

    from moe_jax.compression import Report, Sweep
    from moe_jax.compression.report import LayerFigures


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Command:
    """Makes the experts of a trained Mixture-of-Experts smaller.

    A centre is an expert in the middle of all, which they share; a residual, or delta, is the difference of one expert
    from it; the design matrix of an expert has all weights of a neuron in one row. If several methods have an option,
    its text says what it means to each.

    Interrupted, even killed, it goes on where it was when the same command is given again. Several processes share the
    layers.
    """

    models: ClassVar[tuple[str, ...]] = ("model", "model_base", "base")
    texts: ClassVar[tuple[str, ...]] = ("text",)
    made: ClassVar[tuple[str, ...]] = ("out",)

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """A model with MoE layers: a model directory, an adapter directory, a Hugging Face directory, or RUN@STEP: a
    checkpoint of a run."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Where the model directory (with --sweep, the folder of results) appears; must not exist."""
    json: bool = False
    """Prints JSON lines and nothing else: one per layer as soon as it is done, and at last one for the model. With
    --sweep, what sweep.json holds."""
    sweep: bool = False
    """Error and perplexity of --text over a range of what is kept; OUT holds sweep.json and sweep.png, and no model."""

    def check(self) -> None:
        """Raises `InputError` for what can be said of the options without the model."""
        if self.sweep:
            _asked_sweep(self)
        else:
            _asked_method(self)

    def check_places(self) -> None:
        """Raises an error for a source of a calibration that is not there."""
        check_sources(getattr(self, "calibrate", None))


def command_fields() -> list[Field]:
    """Returns one field for every option of any method, None or False if it is not given."""
    fields = []
    for name, same in by_name({method: _options(method) for method in METHOD_OPTIONS}).items():
        texts: dict[str, list[str]] = {}
        for method, option in same.items():
            texts.setdefault(option.text, []).append(method)
        text = "\n".join(f"{', '.join(methods)}: {text}" for text, methods in texts.items())
        first = next(iter(same.values()))
        if first.kind is bool:
            fields.append(switch_field(first, f"Leaves out what is done otherwise.\n{text}" if first.default else text))
            continue
        defaults = dict.fromkeys(map(shown_default, same.values()))
        hint = f"(default: {' or '.join(defaults)})" if all(defaults) else ""
        placeholder = "|".join(dict.fromkeys(map(metavar, same.values())))
        arg = tyro.conf.arg(metavar=placeholder, help=text, help_behavior_hint=hint)
        fields.append((name, Annotated[str | None, arg], dataclasses.field(default=None)))
    return fields


def _options(method: str) -> list[Option]:
    return options_of(METHOD_OPTIONS[method], attribute_texts)


_OF_METHODS = command_fields()
Options = command_options(_Command, SweepSpec, more=_OF_METHODS)
GROUPS = {
    "what is compressed, and how": ("method", "layers", "rotate", "dtype"),
    "what a method measures or begins with": (
        "base",
        "calibrate",
        "imatrix",
        "save_imatrix",
        "samples",
        "calibration_seed",
        "gradients",
        "calibration_dir",
        "image_folder",
        "extended",
    ),
    "tuning what is small, after it": ("recover", "recover_steps"),
    "trying several": ("sweep", "text", "seq_len", "batch_size"),
    "of the methods": tuple(name for name, *_ in _OF_METHODS),
}
EXAMPLES = """
moe-jax compress moe-dir small-dir --method resmoe --keep 0.25
moe-jax compress moe-dir small-dir --method quantize --bits 4
moe-jax compress moe-dir small-dir --method quantize --bits 3 --calibrate text.txt --samples 64
# on texts of several kinds, and on what the model itself writes
moe-jax compress moe-dir small-dir --method quantize --bits 3 --calibrate built-in,self:2,my-chats.jsonl:2
moe-jax compress seeing-moe small-dir --method quantize --bits 4 --calibrate chats.jsonl --image-folder pictures
moe-jax compress moe-dir small-dir --method quantize --bits 2 --calibrate text.txt --recover 30
moe-jax compress moe-dir small-dir --method resmoe --target-bytes 12GB
# which method, by perplexity at equal bytes
moe-jax compress moe-dir sweep-dir --sweep --text held-out.txt --method resmoe,quantize --keep 0.1,0.5 --bits 2,4
"""


def run(options: _Command) -> None:
    """Compresses the model, and prints errors and sizes; errors as in `moe_jax.compress`."""
    from moe_jax.api.compress import compress_model, sweep
    from moe_jax.distributed.processes import join_processes

    if options.sweep:
        swept, given = _asked_sweep(options), given_options(options)
        join_processes()
        methods = [(name, method.to_method()) for name, method in swept.methods]
        result = sweep(options.model, options.out, methods, swept.spec, given=given)
        print_sweep(options.out, result, as_json=options.json)
        return
    spec = _asked_method(options)
    join_processes()
    on_layer = _print_layer if options.json else lambda *done: None
    made = compress_model(options.model, options.out, spec, on_layer=on_layer)
    print_report(options.model, options.out, made.report, as_json=options.json)


class _Swept(NamedTuple):
    """The methods that a sweep tries, and its other options."""

    spec: SweepSpec
    methods: list[tuple[str, MethodOptions]]


def _asked_sweep(options: Any) -> _Swept:
    """Reads the options of a sweep; `InputError` for one that is wrong whatever the model is."""
    spec, name = given_to(SweepSpec, options), options.method
    names = name.split(",") if name else ()
    methods = swept_methods(names, given_options(options), calibrated=spec.calibrate is not None)
    return _Swept(spec, methods)


def _asked_method(options: Any) -> CompressSpec:
    """Reads the options of a compression; `InputError` for one that is wrong whatever the model is."""
    if options.text is not None:
        raise InputError("--text: only with --sweep")
    method = None if options.method is None else one_method(options.method, given_options(options))
    spec = given_to(CompressSpec, options, method=method)
    spec.check_named()
    return spec


def given_options(options: Any) -> dict[str, Any]:
    """Returns the options of methods that the user gave, by the names of the fields: texts, or bool for switches."""
    given = {}
    for option in (option for method in METHOD_OPTIONS for option in _options(method)):
        if getattr(options, field_name(option)) not in (None, False):
            given[option.name] = field_value(option, options)
    return given


def one_method(name: str, given: Mapping[str, Any]) -> MethodOptions:
    """Makes the options of the method that the user asks for."""
    options = {}
    for key, value in _read(name, given).items():
        values = value if isinstance(value, tuple) else (value,)
        if len(values) > 1:
            raise InputError(f"{flag_of(key)} {given[key]}: several values need --sweep")
        options[key] = next(iter(values))
    return make_options(name, options)


def swept_methods(
    names: Sequence[str], given: Mapping[str, Any], *, calibrated: bool = False
) -> list[tuple[str, MethodOptions]]:
    """Makes the options of all that a sweep tries, by method: every one gets the options that it can read.

    Without names, these are the methods whose swept option is given, or else all; not `calibrated`, for there is no
    text, only those that need none.
    """
    for name in names:
        if name not in METHOD_OPTIONS:
            make_options(name, {})  # says so
    if not names:
        usable = [name for name, method in METHOD_OPTIONS.items() if calibrated or not method.needs_calibration]
        swept = {name: METHOD_OPTIONS[name].swept[0] for name in usable}
        names = [name for name, key in swept.items() if key in given and key not in _refused(name, given)]
        names = names or usable
    refused = {name: _refused(name, given) for name in names}
    for key in given:
        if all(key in refusals for refusals in refused.values()):
            raise refused[names[0]][key]
    made = []
    for name in names:
        options = {key: value for key, value in given.items() if key not in refused[name]}
        made += make_swept_options(name, _read(name, options))
    return made


def _refused(name: str, given: Mapping[str, Any]) -> dict[str, InputError]:
    """Returns the options that a method cannot have, each with the error that says why."""
    refusals = {}
    for key, value in given.items():
        try:
            read = _read(name, {key: value})
            if key not in {option.name for option in _options(name)}:
                make_options(name, read)
        except InputError as error:
            refusals[key] = error
    return refusals


def _read(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options in the types of a method, its swept option with all values; leaves others as they are."""
    known = {option.name: option for option in _options(name)} if name in METHOD_OPTIONS else {}
    read = dict(given)
    for key, value in given.items():
        if key in known and isinstance(value, str):
            swept = METHOD_OPTIONS[name].swept[0] == key
            read[key] = _values(known[key], value) if swept else _value(known[key], value)
    return read


def _values(option: Option, text: str) -> tuple[Any, ...]:
    try:
        return tuple(_value(option, part) for part in text.split(","))
    except InputError:
        expected = {int: "whole numbers", float: "numbers"}.get(parts_of(option.kind)[0], metavar(option))
        raise InputError(f"{flag_of(option.name)} {shown(text)}: expected {expected}, separated by commas") from None


def _value(option: Option, text: str) -> Any:
    (kind, *_), words = parts_of(option.kind), words_of(option.kind)
    if option.name.endswith("_bytes"):
        return parse_bytes(text, flag=flag_of(option.name))
    if words:
        check_member(option.name, text, words)
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise InputError(f"{flag_of(option.name)} {shown(text)}: expected {expected}") from None


def _print_layer(layer: int, figures: "LayerFigures", nbytes: int) -> None:
    print(json.dumps({"layer": layer, **dataclasses.asdict(figures), "bytes": nbytes}), flush=True)


def print_report(model: Path, out: Path, report: "Report", *, as_json: bool) -> None:
    """Prints the figures of a compression: a table and totals, or a line of JSON. Warnings go to standard error."""
    from moe_jax.api.open_source import read_config
    from moe_jax.compression.coding.storage import bytes_by_part
    from moe_jax.compression.part_report import part_columns
    from moe_jax.compression.report import layer_columns
    from moe_jax.files.regular_files import taken_bytes

    _warn(report.warnings)
    if as_json:
        summary = {key: value for key, value in report.to_json().items() if key != "layers"}
        print(json.dumps({"model": str(model), "out": str(out), **summary, "disk_bytes": taken_bytes(out)}))
        return
    terminal = console_for_tables(cuts_nothing=True)
    if report.layers:
        _print_columns(layer_columns(report.layers), terminal)
    if report.parts:
        _print_columns(part_columns(report.parts), terminal)
    if report.calibration_tokens is not None:
        counts = (f"{tokens:,} tokens of {name}" for name, tokens in report.calibration_tokens.items())
        terminal.print(f"calibrated on {', '.join(counts)}", markup=False)
    sizes = {"experts": (report.expert_bytes_before, report.expert_bytes_after)} if report.layers else {}
    for what, (before, after) in (sizes | {"all weights": (report.bytes_before, report.bytes_after)}).items():
        terminal.print(f"{what}: {show_bytes(before)} -> {show_bytes(after)} on the disk ({after / before:.1%})")
    if report.layers:
        # There are more than the kept share.
        config, before = read_config(out), report.expert_bytes_before
        sums = bytes_by_part(config, [layer.layer for layer in report.layers])
        shares = ", ".join(f"{title} {nbytes / before:.1%}" for title, nbytes in sums.items() if nbytes)
        stays = f"of the experts' bytes there stay: {shares} ({config.dtype} where there are no codes)"
        terminal.print(stays, markup=False)
    if report.losses is not None:
        before, after, divergence = report.losses
        said = f"the calibration text: {before:.4f} nats per token before, {after:.4f} now; divergence {divergence:.4f}"
        terminal.print(said, markup=False)
    for number, (expected, measured) in enumerate(report.tried, 1):
        terminal.print(f"plan {number}: divergence {measured:.4f}, expected {expected:.4f}", markup=False)
    if report.recovery is not None:
        terminal.print(report.recovery.in_words(), markup=False)
    for before in report.earlier:
        terminal.print(f"the model was compressed before: {before}", markup=False)
    taken = taken_bytes(out)
    size = "" if taken is None else f": {show_bytes(taken)} on the disk, with all that is in the folder"
    terminal.print(f"wrote {out}{size}", markup=False)


def _print_columns(columns: dict[str, list[str]], terminal: "Console") -> None:
    """Prints a table, and words that are the same in all its rows once below it."""
    from moe_jax.compression.report import WORDS

    alike = {title: columns.pop(title)[0] for title in WORDS if len(set(columns.get(title, ()))) == 1}
    table = table_of_figures(*columns, words=WORDS)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    terminal.print(table)
    for title, text in alike.items():
        terminal.print(f"{title}: {text}", markup=False)


def print_sweep(out: Path, sweep: "Sweep", *, as_json: bool) -> None:
    """Prints the results of a sweep: a table, or its JSON file. Warnings go to standard error."""
    _warn(sweep.warnings)
    if as_json:
        print((out / "sweep.json").read_text("utf-8"))
        return
    table = table_of_figures("method", "", "bytes of experts", "kept", "error", "perplexity")
    table.add_row("not compressed", "", show_bytes(sweep.expert_bytes), "", "", f"{sweep.perplexity:.4f}")
    for point in sweep.points:
        table.add_row(
            point.method,
            f"{point.option} {point.value:g}",
            show_bytes(point.expert_bytes),
            f"{point.kept:.1%}",
            f"{point.relative_error:.4f}",
            f"{point.perplexity:.4f}",
        )
    terminal = console_for_tables(cuts_nothing=True)
    terminal.print(table)
    terminal.print(f"wrote {out}: sweep.json, sweep.png", markup=False)


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
