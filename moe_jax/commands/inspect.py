"""`moe-jax inspect MODEL`: shows the parts of a model and how it was made. Only --weights and --plots read weights."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from moe_jax.commands import BaseFlag
from moe_jax.core.formatting import index_set, is_parameter, show_bytes

if TYPE_CHECKING:
    import jax

    from moe_jax.model_io.model_source import ModelSource
    from moe_jax.models import AttentionConfig, ModelConfig


@dataclasses.dataclass(frozen=True)
class Options(BaseFlag):
    """Lists what a model consists of: its leaves (arrays of parameters) with shapes and bytes, experts, and lineage.

    The lineage is how the model was made: commands, options, sources, and measured figures.
    """

    in_buckets: ClassVar[tuple[str, ...]] = ("model", "base", "text")

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """The model: a model directory, an adapter directory, a Hugging Face directory, a GGUF file, RUN@STEP (a checkpoint
    of a training run), or org/name on the Hugging Face Hub."""
    json: bool = False
    """Prints JSON and nothing else, with one entry per leaf."""
    weights: bool = False
    """Reads all weights, to tell which leaves hold NaN or infinity, and which experts nothing but zeros."""
    plots: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Makes a folder, which must not exist, with plots and their numbers as figures.json: how similar the experts of
    every layer are to each other and to their base, and with --text how often each expert is chosen."""
    text: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """With --plots: a text file on which the use of the experts is measured."""
    seq_len: Annotated[
        int | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="(default: 1024, or what the model can do)")
    ] = None
    """With --text: length of a window in tokens."""
    split: bool = False
    """With --text: splits the parameters over the devices, instead of copying them to each."""


GROUPS = {
    "what is looked at": (
        "weights",
        "json",
    ),
    "pictures": (
        "plots",
        "text",
        "seq_len",
        "split",
    ),
}
EXAMPLES = """
moe-jax inspect moe-dir
moe-jax inspect moe-dir --plots plots --text held-out.txt
"""


def run(options: Options) -> None:
    """Prints the description of a model; draws its experts first, if asked for.

    Raises:
      FileNotFoundError: if there is nothing at the path.
      InputError: if it is not a model that can be read, or cannot be drawn.
    """
    from moe_jax.commands.printed.inspect_tables import check_options, described_base, draw
    from moe_jax.model_io.model_source import OverBase
    from moe_jax.models import config_to_json

    check_options(options.plots, options.text, options.seq_len, options.split)
    source = options.open(options.model)
    plots = []
    if options.plots is not None:
        plots = draw(source, options.plots, text=options.text, seq_len=options.seq_len, split=options.split)
    specs = source.specs()
    sizes = _sizes(source.config, specs)
    base = {}
    if isinstance(source, OverBase) and source.base is not None:
        base = described_base(source.base, source.own_specs(), sizes)
    examined = examine(source) if options.weights else None
    lineage = source.lineage
    if options.json:
        described = {
            "path": str(source.path),
            "parameters": sum(sizes.values()),
            "bytes": sum(map(nbytes, specs.values())),
            "leaves": [
                {"path": path, "shape": list(spec.shape), "dtype": str(spec.dtype), "bytes": nbytes(spec)}
                for path, spec in specs.items()
            ],
            "experts": describe_experts(source.config, specs, sizes),
            **({} if examined is None else {"weights": examined}),
            **base,
            "config": config_to_json(source.config),
            "lineage": lineage,
            **({"plots": [str(file) for file in plots]} if plots else {}),
        }
        print(json.dumps(described, indent=2))
        return
    _print(source.path, source.config, specs, sizes, base, lineage)
    for line in _weight_lines(examined) if examined is not None else ():
        print(line)
    for file in plots:
        print(f"wrote {file}")
    if plots and options.text is None:
        print("no load of the experts: that takes a text to run the model on; give --text FILE")


def examine(source: "ModelSource") -> dict[str, Any]:
    """Reads all weights, one leaf at a time.

    Returns:
      `not_finite`: the number of entries of a leaf that are NaN or infinite, by path, for leaves with such entries;
      `zero_experts`: the experts with nothing but zeros, by layer, for layers with such experts.
    """
    import numpy as np

    from moe_jax.core.finite import is_floating, largest_magnitude
    from moe_jax.model_io.leaves_to_write import ZeroExperts

    not_finite, zero = {}, ZeroExperts()
    for path, spec in source.specs().items():
        if is_floating(spec.dtype):
            leaf = source.read(path)
            zero.add(path, leaf)
            if not math.isfinite(largest_magnitude(leaf)):
                not_finite[path] = int(np.count_nonzero(~np.isfinite(leaf)))
    return {"not_finite": not_finite, "zero_experts": zero.by_layer}


def _weight_lines(examined: Mapping[str, Any]) -> list[str]:
    from moe_jax.model_io.leaves_to_write import zero_experts_line

    lines = [f"not finite: {count:,} numbers of {path}" for path, count in examined["not_finite"].items()]
    lines = lines or ["weights: all are finite"]
    return lines + ([zero_experts_line(examined["zero_experts"])] if examined["zero_experts"] else [])


def nbytes(spec: "jax.ShapeDtypeStruct") -> int:
    """Returns the number of bytes of a leaf."""
    return spec.size * spec.dtype.itemsize


def collapse(specs: "Mapping[str, jax.ShapeDtypeStruct]") -> "dict[str, tuple[jax.ShapeDtypeStruct, int]]":
    """Joins leaves that several layers have in the same shape and dtype.

    Args:
      specs: leaf path -> shape and dtype.

    Returns:
      "layers/{0..3}/mlp/up/kernel" -> (shape and dtype of one, how many there are), in the order of `specs`.
    """
    groups: dict[tuple[str, Any, Any], list[int]] = {}
    for path, spec in specs.items():
        layer, rest = _split(path)
        groups.setdefault((rest, spec.shape, spec.dtype), []).append(layer)
    rows = {}
    for path, spec in specs.items():
        layer, rest = _split(path)
        layers = groups[rest, spec.shape, spec.dtype]
        if layer == layers[0]:
            name = path if layer < 0 else f"layers/{index_set(layers)}/{rest}"
            rows[name] = (spec, len(layers))
    return rows


def describe_experts(
    config: "ModelConfig", specs: "Mapping[str, jax.ShapeDtypeStruct]", sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Returns one entry per MoE layer: the config of its expert bank, and its size."""
    experts = []
    for layer in config.moe_layers:
        moe = config.moe(layer)
        prefix = f"layers/{layer}/mlp/experts/"
        experts.append(
            {
                "layer": layer,
                "num_experts": moe.num_experts,
                "merged_experts": moe.merged_experts,
                "top_k": moe.top_k,
                "gate": moe.gate if moe.universal == "none" else None,
                "universal": moe.universal,
                "extended": moe.extended,
                "bank": moe.bank.given(),
                "parameters": sum(size for path, size in sizes.items() if path.startswith(prefix)),
                "bytes": sum(nbytes(spec) for path, spec in specs.items() if path.startswith(prefix)),
            }
        )
    return experts


def _sizes(config: "ModelConfig", specs: "Mapping[str, jax.ShapeDtypeStruct]") -> dict[str, int]:
    """Returns the number of parameters by leaf path; an NF4 kernel counts as the kernel that it was quantised from."""
    if any("/nf4/" in path or "/coded_nf4/" in path for path in specs):
        from moe_jax.peft.trained_table import parameter_sizes

        return parameter_sizes(config)
    return {path: spec.size for path, spec in specs.items() if is_parameter(spec)}


def _split(path: str) -> tuple[int, str]:
    """Returns the index of a leaf's layer, -1 for a leaf outside the layers, and its path inside the layer."""
    parts = path.split("/", 2)
    return (int(parts[1]), parts[2]) if parts[0] == "layers" else (-1, path)


def _print(
    path: Path,
    config: "ModelConfig",
    specs: "Mapping[str, jax.ShapeDtypeStruct]",
    sizes: Mapping[str, int],
    base: Mapping[str, Any],
    lineage: Sequence[dict[str, Any]],
) -> None:
    from rich.markup import escape
    from rich.table import Table

    from moe_jax.commands.printed.inspect_tables import adapter_lines
    from moe_jax.core.terminal import console_for_tables

    console = console_for_tables()
    console.print(f"[bold]{escape(str(path))}[/bold]")
    console.print(_summary(config), markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("leaf", "shape", "dtype", "layers", "bytes"):
        table.add_column(name, justify="right" if name in ("layers", "bytes") else "left", no_wrap=True)
    for name, (spec, count) in collapse(specs).items():
        layers = str(count) if name.startswith("layers/") else ""
        table.add_row(name, escape(str(list(spec.shape))), str(spec.dtype), layers, show_bytes(count * nbytes(spec)))
    console.print(table)
    total = sum(sizes.values())
    console.print(f"total: {total:,} parameters, {show_bytes(sum(map(nbytes, specs.values())))}")
    if base:
        own, below = base["own"], base["base"]
        console.print(f"stored here: {own['parameters']:,} parameters, {show_bytes(own['bytes'])}", markup=False)
        console.print(f"base: {below['path']} ({below['fingerprint'][:12]})", markup=False, soft_wrap=True)
    for line in [*_expert_lines(describe_experts(config, specs, sizes)), *adapter_lines(config)]:
        console.print(line, markup=False)
    for entry in lineage:
        console.print(_lineage_line(entry), markup=False)


def _summary(config: "ModelConfig") -> str:
    attention = config.layers[0].attention
    return (
        f"{config.family}: {config.num_layers} layers, d {config.d_model}, vocabulary {config.vocab_size}, "
        f"{_heads(attention)}, "
        f"context {config.max_positions}, {'tied' if config.tie_embeddings else 'untied'} embeddings"
    )


def _heads(attention: "AttentionConfig") -> str:
    latent = attention.latent
    if latent is None:
        return f"{attention.num_heads} heads over {attention.num_kv_heads} key-value heads of {attention.head_dim}"
    of_queries = "" if latent.q_rank is None else f" and of {latent.q_rank} for queries"
    return (
        f"{attention.num_heads} heads of {attention.head_dim} over latents of {latent.kv_rank}{of_queries}, "
        f"{latent.rope_dim} rotated"
    )


def _expert_lines(experts: list[dict[str, Any]]) -> list[str]:
    """Returns one line for all MoE layers that are alike."""
    from moe_jax.commands.printed.inspect_tables import in_words

    kinds: dict[str, list[int]] = {}
    for entry in experts:
        bank = ", ".join(f"{name} {in_words(value)}" for name, value in entry["bank"].items())
        merged = "" if entry["merged_experts"] is None else f" merged into {entry['merged_experts']}"
        line = (
            f"{entry['num_experts']} experts{merged}, top {entry['top_k']}, {_weighting(entry)}; {bank}; "
            f"{entry['parameters']:,} parameters, {show_bytes(entry['bytes'])} per layer"
        )
        kinds.setdefault(line, []).append(entry["layer"])
    return [f"experts of layers/{index_set(layers)}: {line}" for line, layers in kinds.items()]


def _weighting(entry: Mapping[str, Any]) -> str:
    if entry["universal"] == "none":
        return f"gate {entry['gate']}"
    return f"universal {entry['universal']} ({'in the bank' if entry['extended'] else 'beside the bank'})"


def _lineage_line(entry: Mapping[str, Any]) -> str:
    options = " ".join(f"{name}={value}" for name, value in entry.get("options", {}).items())
    sources = ", ".join(f"{source['path']} ({source['fingerprint'][:12]})" for source in entry.get("sources", ()))
    measured = ", ".join(f"{name} {_short(value)}" for name, value in entry.get("measured", {}).items())
    parts = [f"{entry.get('date', '')}  {entry['command']} {options}".rstrip()]
    parts += [f"    from {sources}"] if sources else []
    parts += [f"    measured: {measured}"] if measured else []
    return "\n".join(parts)


def _short(value: Any) -> str:
    """Returns a measured figure as text; for a list only its length, since lineage.json and --json have its figures."""
    return f"[{len(value)}]" if isinstance(value, list | dict) else str(value)
