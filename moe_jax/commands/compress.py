"""`moe-jax compress MODEL OUT`: the experts of a trained MoE made smaller, by one of several methods.

With `--sweep` several models are made, scored and thrown away; OUT then holds a table and a picture of quality against
bytes.
"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from moe_jax.commands.line.method_options import command_fields, given_options, one_method, swept_methods
from moe_jax.commands.line.spec_options import command_options, given_to
from moe_jax.compression.spec import CompressSpec, SweepSpec
from moe_jax.core.errors import InputError

if TYPE_CHECKING:
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

    in_buckets: ClassVar[tuple[str, ...]] = ("model", "out")

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


Options = command_options(_Command, SweepSpec, more=command_fields())
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


def run(options: _Command) -> None:
    """Compresses the model, and prints errors and sizes.

    Raises:
      FileNotFoundError, InputError: bad input, as in `moe_jax.compress`.
    """
    from moe_jax.api.compress import compress_model, sweep
    from moe_jax.commands.printed.compression_tables import print_report, print_sweep
    from moe_jax.distributed.processes import join_processes

    given, name = given_options(options), vars(options)["method"]
    if options.sweep:
        spec = given_to(SweepSpec, options)
        methods = swept_methods(name.split(",") if name else (), given, calibrated=spec.calibrate is not None)
        join_processes()
        result = sweep(options.model, options.out, methods, spec, given=given)
        print_sweep(options.out, result, as_json=options.json)
        return
    if vars(options)["text"] is not None:
        raise InputError("--text: only with --sweep")
    spec = given_to(CompressSpec, options, method=name and one_method(name, given))
    join_processes()
    on_layer = _print_layer if options.json else lambda *done: None
    made = compress_model(options.model, options.out, spec, on_layer=on_layer)
    print_report(options.model, options.out, made.report, as_json=options.json)


def _print_layer(layer: int, figures: "LayerFigures", nbytes: int) -> None:
    print(json.dumps({"layer": layer, **dataclasses.asdict(figures), "bytes": nbytes}), flush=True)
