"""`moe-jax plan CONFIG_OR_MODEL`: what a model costs, from its config alone."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from moe_jax.commands.upcycling import Upcycling

if TYPE_CHECKING:
    from moe_jax.commands.planned_compression import PlannedCompression
    from moe_jax.models import ModelConfig
    from moe_jax.plan import Plan, TrainingMemory

_NEEDS_COMPRESS = ("keep", "residual", "storage", "bits", "compress_layers", "dtype")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Upcycling):
    """Counts parameters and bytes of a model, or with any of upcycle's options of the MoE it would become; with
    --compress also the bytes of its experts in every form in which they can be stored."""

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG_OR_MODEL")]
    """A config.json, ours or Hugging Face's, or a directory that holds one, with weights or without."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """Adds the bytes per chip of training with AdamW in float32, without activations, as in fsdp=8,tensor=2."""
    compress: Annotated[str | None, tyro.conf.arg(metavar="METHOD")] = None
    """Adds what the experts take when they are compressed by a method of moe-jax compress."""
    keep: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """With --compress: the share of the experts' entries that is kept, in (0, 1]."""
    residual: Annotated[str | None, tyro.conf.arg(metavar="up|svd|quantized[:BITS]")] = None
    """With --compress resmoe: only forms of this kind."""
    storage: Annotated[str | None, tyro.conf.arg(metavar="FORM")] = None
    """With --compress: only this form, such as csr16 or svd."""
    bits: Annotated[int | None, tyro.conf.arg(metavar="8|4|3|2")] = None
    """With --compress: of quantised forms, and of the values of sparse ones, which are floats without it."""
    compress_layers: Annotated[str | None, tyro.conf.arg(metavar="all|top:N|0,3,8-11")] = None
    """With --compress: the MoE layers that are; by default all."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, tyro.conf.arg(metavar="float32|bfloat16|float16")
    ] = None
    """With --compress: of all parameters; by default that of the config."""
    json: bool = False
    """Prints JSON and nothing else."""


def run(options: Options) -> None:
    """Prints the plan.

    Raises:
      FileNotFoundError: if there is no config.
      InputError: if it cannot be read, or the options do not go with it.
    """
    from moe_jax.open_source import read_config
    from moe_jax.plan import make_plan, training_memory
    from moe_jax.upcycle import upcycled_config

    config = read_config(options.model)
    if options.any_given():
        config = upcycled_config(config, options.options())
    plan = make_plan(config)
    memory = training_memory(config, _mesh(options.mesh)) if options.mesh is not None else None
    compressed = _compression(config, options)
    if options.json:
        described = dataclasses.asdict(plan)
        if memory is not None:
            described["training_bytes_per_chip"] = dataclasses.asdict(memory)
        if compressed is not None:
            described["compression"] = compressed.to_json()
        print(json.dumps(described, indent=2))
        return
    _print(options.model, config, plan, memory)
    if compressed is not None:
        compressed.print()


def _compression(config: "ModelConfig", options: Options) -> "PlannedCompression | None":
    from moe_jax.errors import InputError

    if options.compress is None:
        needless = [name for name in _NEEDS_COMPRESS if getattr(options, name) is not None]
        if needless:
            raise InputError(f"{', '.join('--' + name.replace('_', '-') for name in needless)}: only with --compress")
        return None
    from moe_jax.commands.planned_compression import planned_compression

    return planned_compression(
        config,
        options.compress,
        keep=options.keep,
        residual=options.residual,
        storage=options.storage,
        bits=options.bits,
        layers=options.compress_layers,
        dtype=options.dtype,
    )


def _mesh(text: str) -> dict[str, int]:
    """`fsdp=8,tensor=2` as a dict."""
    from moe_jax.errors import InputError

    mesh = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not size.strip().isdigit() or axis.strip() in mesh:
            raise InputError(f"--mesh {text!r}: expected each axis once with its size, as in fsdp=8,tensor=2")
        mesh[axis.strip()] = int(size)
    return mesh


def _print(path: Path, config: "ModelConfig", plan: "Plan", memory: "TrainingMemory | None") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from moe_jax.commands.inspect import human_bytes

    console = Console(highlight=False)
    if not console.is_terminal:  # into a file or a pager nothing is wrapped
        console = Console(highlight=False, width=200)
    moe = config.moe_layers
    kind = f"{len(moe)} of {config.num_layers} layers are MoEs" if moe else f"{config.num_layers} layers, dense"
    console.print(f"[bold]{escape(str(path))}[/bold]: {config.family}, d={config.d_model}, {kind}")
    if moe:
        first = config.layers[moe[0]].mlp
        universal = "" if first.universal == "none" else f"; universal FFN: {first.universal}"
        extended = ", extended" if first.extended else ""
        console.print(f"{first.num_experts} experts, {first.top_k} per token, {first.bank.kind}{universal}{extended}")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    rows = [
        ("parameters", plan.total_params, ""),
        ("  dense", plan.dense_params, "the dense model, or this one with one expert per MoE and no router"),
        ("  added", plan.added_params, ""),
        ("  routers", plan.router_params, ""),
        ("  experts", plan.expert_params, "kernels or bases and deltas; positions are not parameters"),
        ("active per token", plan.active_params, "norms left out"),
        ("trainable", plan.trainable_params, "all but frozen bases"),
    ]
    if plan.universal_params:
        rows.insert(5, ("  universal FFNs", plan.universal_params, "beside the experts"))
    for name, count, note in rows:
        table.add_row(name, f"{count:,}", note)
    if plan.formula_added_params != plan.added_params:
        table.add_row("  added, by formula", f"{plan.formula_added_params:,}", "as DeRS counts")
    table.add_row("bytes", human_bytes(plan.param_bytes), f"in {config.dtype}, positions included")
    flops = f"of a training step per token, context {config.max_positions}"
    table.add_row("FLOP", f"{plan.train_flops_per_token:,.0f}", flops)
    if memory is not None:
        parts = f"parameters {human_bytes(memory.params)}, gradients {human_bytes(memory.gradients)}, "
        parts += f"AdamW {human_bytes(memory.optimizer)}; float32, without activations"
        table.add_row("training, per chip", human_bytes(memory.total), parts)
    console.print(table)
