"""`moe-jax compress MODEL OUT`: the experts of a trained MoE become a shared base and light deltas.

With `--sweep` several models are made, scored and thrown away; OUT then holds a table and a picture of quality against
bytes.
"""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from moe_jax.compress import Score
    from moe_jax.model_source import ModelSource

_DEFAULT_SEQ_LEN = 1024


def _arg(metavar: str, default: str = "") -> object:
    """An option that shows its default, which the method holds; None here means that it was not given."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Makes a trained Mixture-of-Experts smaller: one base per layer, and what little each expert adds to it.

    Interrupted, even killed, it goes on where it was when the same command is given again.
    """

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """A model with MoE layers: a model directory or a Hugging Face directory."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Where the model directory (with --sweep, the folder of results) appears; must not exist."""
    method: Annotated[str | None, _arg("ders-sparsify|ders-quantize")] = None
    """ders-sparsify: single entries of every delta. ders-quantize: all of them in a few bits. With --sweep several,
    separated by commas; by default all."""
    drop: Annotated[str | None, _arg("P")] = None
    """ders-sparsify: the share of entries that is left out, such as 0.9. With --sweep several, separated by commas."""
    keep: Annotated[str | None, _arg("random|exact|magnitude", "random")] = None
    """ders-sparsify: which entries stay. Each with probability 1-P, or as many in every matrix, both rescaled to be
    right on average; or the largest, as they are, which is the least error."""
    bits: Annotated[str | None, _arg("8|4|2|1")] = None
    """ders-quantize: bits of an entry. With --sweep several, separated by commas."""
    group_size: Annotated[int | None, _arg("INT", "128")] = None
    """ders-quantize: entries along the input that share a scale; 0: the whole matrix."""
    scale: Annotated[str | None, _arg("mse|absmax", "mse")] = None
    """ders-quantize: scales of least squared error, or by the largest entry, which is never clipped. With one bit the
    scale is the mean absolute entry."""
    seed: Annotated[int | None, _arg("INT", "0")] = None
    """ders-sparsify: of the entries that stay."""
    base: Annotated[Path | None, _arg("DENSE")] = None
    """The dense model that the experts came from; by default the base that a layer has already, or else the mean of
    its experts."""
    extended: bool = False
    """The universal FFN beside the experts becomes one more delta of the same base."""
    layers: Annotated[str | None, _arg("INT[,INT...]", "all MoE layers")] = None
    """The layers to compress, counted from 0; the others stay as they are."""
    json: bool = False
    """Prints JSON and nothing else."""
    sweep: bool = False
    """Perplexity of --text over a range of --drop and --bits; OUT holds sweep.json and sweep.png, and no model."""
    text: Annotated[Path | None, _arg("FILE")] = None
    """With --sweep: a text file."""
    seq_len: Annotated[int | None, _arg("INT", "1024, or what the model can do")] = None
    """With --sweep: tokens that are scored at a time."""
    batch_size: Annotated[int | None, _arg("INT", "8")] = None
    """With --sweep: windows computed at once. Does not change the result."""


def run(options: Options) -> None:
    """Compresses, and prints what came out.

    Raises:
      FileNotFoundError, InputError: bad input; see `moe_jax.compress`.
    """
    from moe_jax.commands.compression_tables import print_report, print_sweep
    from moe_jax.commands.progress import progress_bars
    from moe_jax.compress import compress, make_method, make_swept_methods, sweep
    from moe_jax.errors import InputError
    from moe_jax.open_source import open_source

    scoring = {"--text": options.text, "--seq-len": options.seq_len, "--batch-size": options.batch_size}
    unused = [name for name, value in scoring.items() if value is not None]
    if unused and not options.sweep:
        raise InputError(f"{', '.join(unused)}: only with --sweep")
    given = _given(options)
    layers = _numbers("--layers", options.layers, int) if options.layers is not None else None
    if options.sweep:
        methods = make_swept_methods(options.method.split(",") if options.method else (), given)
    elif options.method is None:
        raise InputError("--method is missing; see moe-jax compress --help")
    else:
        method = make_method(options.method, {name: _single(name, value) for name, value in given.items()})
    source = open_source(options.model)
    base = open_source(options.base) if options.base is not None else None
    shared = {"base": base, "extended": options.extended, "layers": layers}
    described = {"base": options.base, "extended": options.extended, "layers": layers}
    if options.sweep:
        described |= given | {"method": list(dict.fromkeys(name for name, _ in methods)), "seq_len": options.seq_len}
        sources = [source, *([base] if base is not None else []), options.text]
        score = _scorer(source, options)
        with progress_bars() as progress:
            result = sweep(
                source, options.out, methods, score, described=described, sources=sources, progress=progress, **shared
            )
        print_sweep(options.out, result, as_json=options.json)
        return
    described |= {"method": options.method, **dataclasses.asdict(method)}
    with progress_bars() as progress:
        report = compress(source, options.out, method, described=described, progress=progress, **shared)
    print_report(options.model, options.out, report, as_json=options.json)


def _given(options: Options) -> dict[str, Any]:
    """The options of methods that were given; of those that can be swept, all values."""
    from moe_jax.compress import METHODS, option_names

    swept = {name: type(values[0]) for name, values in (method.swept for method in METHODS.values())}
    given = {name: getattr(options, name) for name in option_names() if getattr(options, name) is not None}
    return {
        name: _numbers(f"--{name}", value, swept[name]) if name in swept else value for name, value in given.items()
    }


def _single(name: str, value: Any) -> Any:
    from moe_jax.errors import InputError

    if not isinstance(value, tuple):
        return value
    if len(value) > 1:
        raise InputError(f"--{name} {','.join(map(str, value))}: several values need --sweep")
    return value[0]


def _numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    """`0,2,5` as numbers."""
    from moe_jax.errors import InputError

    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        expected = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{option} {text!r}: expected {expected}, separated by commas") from None


def _scorer(source: "ModelSource", options: Options) -> "Score":
    """Scores models by the text, as `moe-jax eval` does."""
    from flax import nnx

    from moe_jax.errors import InputError
    from moe_jax.loading import load_model
    from moe_jax.sharding import make_mesh
    from moe_jax.train.evaluation import Evaluator, read_text
    from moe_jax.train.tokenizer import Tokenizer, find_tokenizer

    if options.text is None:
        raise InputError("--sweep needs --text FILE, to measure the perplexity of")
    batch_size = 8 if options.batch_size is None else options.batch_size
    if batch_size < 1:
        raise InputError(f"--batch-size {batch_size} must be at least 1")
    most = source.config.max_positions
    seq_len = min(_DEFAULT_SEQ_LEN, most) if options.seq_len is None else options.seq_len
    if seq_len > most:
        print(f"warning: {options.model} was made for {most} positions, not {seq_len}", file=sys.stderr)
    ids = read_text(options.text, Tokenizer(find_tokenizer(source.tokenizer_files, source.path), source.config))
    mesh = make_mesh({"data": -1})

    def score(model: "ModelSource") -> float:
        graphdef, state = nnx.split(load_model(model, mesh=mesh))
        return Evaluator(graphdef, ids, seq_len=seq_len, batch_size=batch_size, mesh=mesh)(state).nll

    return score
