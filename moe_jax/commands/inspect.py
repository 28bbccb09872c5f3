"""`moe-jax inspect MODEL`: shows the parts of a model and how it was made. Only --weights and --plots read weights."""

import dataclasses
import json
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from moe_jax.commands.options import OneModel
from moe_jax.core.errors import InputError, check_number
from moe_jax.core.formatting import count_bytes, index_set, is_parameter, show_bytes
from moe_jax.data.sections import check_seq_len, form_of_name

if TYPE_CHECKING:
    import jax

    from moe_jax.core.terminal import Progress
    from moe_jax.model_io.model_source import ModelSource
    from moe_jax.models import LayerConfig, ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(OneModel):
    """Lists what a model consists of: its leaves (arrays of parameters) with shapes and bytes, experts, and lineage.

    The lineage is how the model was made: commands, options, sources, and measured figures.
    """

    local_only: ClassVar[tuple[str, ...]] = ("plots",)
    texts: ClassVar[tuple[str, ...]] = ("text",)

    json: bool = False
    """Prints JSON and nothing else, with one entry per leaf."""
    weights: bool = False
    """Reads all weights, to tell which leaves hold NaN or infinity, and which experts nothing but zeros."""
    plots: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Makes a folder, which must not exist, with plots and their numbers as figures.json: how similar the experts of
    every layer are to each other and to their base, and with --text how often each expert is chosen. If that has
    pictures, also how tokens of pictures and of texts use the experts, and which expert sees which patch."""
    text: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """With --plots: a text file on which the use of the experts is measured; or one of JSON or a table, whose rows are
    those of training data: texts, pairs and conversations, for a model that sees with pictures."""
    image_folder: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: that of the file)")
    ] = None
    """With rows in --text: the folder that names of pictures are inside of."""
    samples: Annotated[
        int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: 128, or as many as there are)")
    ] = None
    """With rows in --text: number of them that are drawn."""
    seq_len: Annotated[
        int | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="(default: 1024, or what the model can do)")
    ] = None
    """With --text: length of a window in tokens."""
    split: bool = False
    """With --text: splits the parameters over the devices, instead of copying them to each."""

    def check(self) -> None:
        """Raises `InputError` for options that do not go together, or a folder that exists."""
        from moe_jax.files.staging import check_target

        if self.plots is None and (self.text is not None or self.seq_len is not None):
            raise InputError(f"--{'text' if self.text is not None else 'seq-len'} belongs to --plots DIR")
        if self.text is None and (self.seq_len is not None or self.split):
            raise InputError(f"--{'split' if self.split else 'seq-len'} belongs to --text FILE")
        for name, value in (("image-folder", self.image_folder), ("samples", self.samples)):
            if value is not None and not self.has_rows:
                raise InputError(f"--{name} is for rows of data; name a file of JSON or a table with --text")
        check_number(self, "samples", at_least=1)
        if self.seq_len is not None:
            check_seq_len(self.seq_len)
        if self.plots is not None:
            check_target(self.plots)

    @property
    def has_rows(self) -> bool:
        """Whether `text` is a file of rows."""
        return self.text is not None and form_of_name(self.text) != "text"


GROUPS = {
    "what is looked at": ("weights", "json"),
    "pictures": ("plots", "text", "image_folder", "samples", "seq_len", "split"),
}
EXAMPLES = """
moe-jax inspect moe-dir
moe-jax inspect moe-dir --plots plots --text held-out.txt
# of a model that sees
moe-jax inspect llava-moe --plots plots --text conversations.jsonl --image-folder pictures
"""


def run(options: Options) -> None:
    """Prints the description of a model; draws its experts first, if asked for."""
    from moe_jax.files.regular_files import taken_bytes
    from moe_jax.model_io.model_source import OverBase
    from moe_jax.model_io.without_codes import weights_in_codes
    from moe_jax.models import config_to_json

    source = options.open(towers=True)
    plots = _draw(source, options, options.plots) if options.plots is not None else []
    specs = source.specs()
    sizes = _sizes(source.config, specs)
    base: dict[str, Any] = {}
    if isinstance(source, OverBase) and source.base is not None:
        own = source.own_specs()
        base = {
            "base": {"path": str(source.base.path), "fingerprint": source.base.fingerprint()},
            "own": {
                "leaves": list(own),
                "parameters": sum(sizes[path] for path in own),
                "bytes": count_bytes(own.values()),
            },
        }
    examined = _examine(source) if options.weights else None
    if options.json:
        described = {
            "path": str(source.path),
            "parameters": sum(sizes.values()),
            "weights_in_codes": weights_in_codes(source.config),
            "bytes": count_bytes(specs.values()),
            "disk_bytes": taken_bytes(source.path),
            "quantized": dict(Counter(getattr(source, "kinds_of_codes", dict)().values())),
            "leaves": [
                {"path": path, "shape": list(spec.shape), "dtype": str(spec.dtype), "bytes": count_bytes([spec])}
                for path, spec in specs.items()
            ],
            "experts": _describe_experts(source.config, specs, sizes),
            **({} if examined is None else {"weights": examined}),
            **base,
            "config": config_to_json(source.config),
            "lineage": source.lineage,
            **({"plots": [str(file) for file in plots]} if plots else {}),
        }
        print(json.dumps(described, indent=2))
        return
    _print(source, specs, sizes, base)
    for line in _weight_lines(examined) if examined is not None else ():
        print(line)
    for file in plots:
        print(f"wrote {file}")
    if plots and options.text is None:
        print("no load of the experts: that takes a text to run the model on; give --text FILE")


def _examine(source: "ModelSource") -> dict[str, Any]:
    """Reads all weights, one leaf at a time.

    Returns the number of entries that are not finite, by the path of the leaf, and by layer the experts of zeros.
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


def collapse(specs: "Mapping[str, jax.ShapeDtypeStruct]") -> "dict[str, tuple[jax.ShapeDtypeStruct, int]]":
    """Joins leaves that several layers have in the same shape and dtype.

    Returns:
      "layers/{0..3}/mlp/up/kernel" -> (shape and dtype of one, how many there are), in the order of `specs`.
    """
    groups: dict[tuple[str, str, Any, Any], list[int]] = {}
    for path, spec in specs.items():
        part, layer, rest = _split(path)
        groups.setdefault((part, rest, spec.shape, spec.dtype), []).append(layer)
    rows = {}
    for path, spec in specs.items():
        part, layer, rest = _split(path)
        layers = groups[part, rest, spec.shape, spec.dtype]
        if layer == layers[0]:
            name = path if layer < 0 else f"{part}layers/{index_set(layers)}/{rest}"
            rows[name] = (spec, len(layers))
    return rows


def _describe_experts(
    config: "ModelConfig", specs: "Mapping[str, jax.ShapeDtypeStruct]", sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Returns one entry per MoE layer: the config of its expert bank, and its size."""
    experts = []
    for layer in config.moe_layers:
        moe = config.moe(layer)
        prefix = f"layers/{layer}/mlp/experts/"
        names = ("num_experts", "merged_experts", "top_k", "gate", "universal", "extended")
        given = {name: getattr(moe, name) for name in names} | ({} if moe.universal == "none" else {"gate": None})
        parameters = sum(size for path, size in sizes.items() if path.startswith(prefix))
        nbytes = count_bytes(spec for path, spec in specs.items() if path.startswith(prefix))
        bank = moe.bank.given()
        experts.append({"layer": layer, **given, "bank": bank, "parameters": parameters, "bytes": nbytes})
    return experts


def _sizes(config: "ModelConfig", specs: "Mapping[str, jax.ShapeDtypeStruct]") -> dict[str, int]:
    """Returns the number of parameters by leaf path; an NF4 kernel counts as the kernel that it was quantised from."""
    if any("/nf4/" in path or "/coded_nf4/" in path for path in specs):
        from moe_jax.peft.trained import parameter_sizes

        return parameter_sizes(config)
    return {path: spec.size for path, spec in specs.items() if is_parameter(spec)}


def _split(path: str) -> tuple[str, int, str]:
    """Returns the part of the model before `layers/`, the layer's index, -1 outside of layers, and the path inside."""
    match = re.fullmatch(r"(vision/tower/|)layers/(\d+)/(.*)", path)
    return (match[1], int(match[2]), match[3]) if match else ("", -1, path)


def _print(
    source: "ModelSource",
    specs: "Mapping[str, jax.ShapeDtypeStruct]",
    sizes: Mapping[str, int],
    base: Mapping[str, Any],
) -> None:
    from rich.markup import escape

    from moe_jax.core.terminal import console_for_tables, table_of_figures
    from moe_jax.files.regular_files import taken_bytes
    from moe_jax.model_io.without_codes import weights_in_codes
    from moe_jax.nn.projector import vision_in_words

    console, config = console_for_tables(), source.config
    console.print(f"[bold]{escape(str(source.path))}[/bold]")
    console.print(_summary(config), markup=False)
    if (sees := vision_in_words(config)) is not None:
        console.print(sees, markup=False)
    table = table_of_figures("leaf", "shape", "dtype", "layers", "bytes", words=("shape", "dtype"))
    for name, (spec, count) in collapse(specs).items():
        layers = str(count) if "layers/" in name else ""
        size = show_bytes(count * count_bytes([spec]))
        table.add_row(name, escape(str(list(spec.shape))), str(spec.dtype), layers, size)
    console.print(table)
    if stored := getattr(source, "kinds_of_codes", dict)():
        size = show_bytes(sum(map(source.stored_bytes, specs)))
        kinds = ", ".join(f"{count:,} in {kind}" for kind, count in Counter(stored.values()).items())
        console.print(f"the checkpoint is quantised, {kinds}, and has {size}; the sizes here are of what it becomes")
    coded = weights_in_codes(config)
    codes = f" and {coded:,} weights in codes" if coded else ""
    console.print(f"total: {sum(sizes.values()):,} parameters{codes}, {show_bytes(count_bytes(specs.values()))}")
    if (taken := taken_bytes(source.path)) is not None:
        console.print(f"on the disk: {show_bytes(taken)}, with all that is in the folder")
    if base:
        own, below = base["own"], base["base"]
        console.print(f"stored here: {own['parameters']:,} parameters, {show_bytes(own['bytes'])}", markup=False)
        console.print(f"base: {below['path']} ({below['fingerprint'][:12]})", markup=False, soft_wrap=True)
    experts = _joined((entry["layer"], _expert_line(entry)) for entry in _describe_experts(config, specs, sizes))
    adapters = _joined((index, line) for index, layer in enumerate(config.layers) for line in _adapter_lines(layer))
    for line in (*experts, *adapters):
        console.print(line, markup=False)
    for entry in source.lineage:
        console.print(_lineage_line(entry), markup=False)


def _summary(config: "ModelConfig") -> str:
    heads = _heads(config)
    tied = "tied" if config.tie_embeddings else "untied"
    return (
        f"{config.family}: {config.num_layers} layers, d {config.d_model}, vocabulary {config.vocab_size}, "
        f"{heads}, context {config.max_positions}, {tied} embeddings"
    )


def _heads(config: "ModelConfig") -> str:
    """Returns the recurrences and the attention of a model in words, of the first layer with each."""
    recurrent = [i for i in config.recurrent_layers if "attention" in config.layers[i].branches]
    first = [layers[0] for layers in (recurrent, config.softmax_layers) if layers]
    if len(first) > 1 or config.layers[first[0]].is_recurrent:
        return " and ".join(config.layers[layer].attention.describe() for layer in first)
    attention = config.layers[0].softmax_attention
    latent = attention.latent
    if latent is None:
        return f"{attention.num_heads} heads over {attention.num_kv_heads} key-value heads of {attention.head_dim}"
    of_queries = "" if latent.q_rank is None else f" and of {latent.q_rank} for queries"
    chosen = "" if latent.indexer is None else f", of each query to {latent.indexer.top_k:,} tokens"
    return (
        f"{attention.num_heads} heads of {attention.head_dim} over latents of {latent.kv_rank}{of_queries}, "
        f"{latent.rope_dim} rotated{chosen}"
    )


def _joined(lines: Iterable[tuple[int, str]]) -> list[str]:
    """Returns the lines of layers, each once; `{layers}` in them stands for the layers that have it."""
    layers_of: dict[str, list[int]] = {}
    for layer, line in lines:
        layers_of.setdefault(line, []).append(layer)
    return [line.replace("{layers}", f"layers/{index_set(layers)}") for line, layers in layers_of.items()]


def _expert_line(entry: Mapping[str, Any]) -> str:
    bank = ", ".join(f"{name} {_in_words(value)}" for name, value in entry["bank"].items())
    merged = "" if entry["merged_experts"] is None else f" merged into {entry['merged_experts']}"
    weighting = f"gate {entry['gate']}"
    if entry["universal"] != "none":
        weighting = f"universal {entry['universal']} ({'in the bank' if entry['extended'] else 'beside the bank'})"
    return (
        f"experts of {{layers}}: {entry['num_experts']} experts{merged}, top {entry['top_k']}, {weighting}; "
        f"{bank}; {entry['parameters']:,} parameters, {show_bytes(entry['bytes'])} per layer"
    )


def _lineage_line(entry: Mapping[str, Any]) -> str:
    options = " ".join(f"{name}={value}" for name, value in entry.get("options", {}).items())
    sources = ", ".join(f"{source['path']} ({source['fingerprint'][:12]})" for source in entry.get("sources", ()))
    # Of a list only the length: lineage.json and --json have its figures.
    figures = entry.get("measured", {}).items()
    short = (f"{name} [{len(one)}]" if isinstance(one, list | dict) else f"{name} {one}" for name, one in figures)
    measured = ", ".join(short)
    parts = [f"{entry.get('date', '')}  {entry['command']} {options}".rstrip()]
    parts += [f"    from {sources}"] if sources else []
    parts += [f"    measured: {measured}"] if measured else []
    return "\n".join(parts)


def _in_words(value: Any) -> str:
    """Returns a config as `(name value, ...)`; anything else as a string."""
    if not isinstance(value, dict):
        return str(value)
    return "(" + ", ".join(f"{name} {one}" for name, one in value.items()) + ")"


def _adapter_lines(layer: "LayerConfig") -> Iterator[str]:
    """Yields a line for each kind of adapter, LoRA or NF4 kernel."""
    from moe_jax.models import MoEConfig

    mlp = layer.mlp
    moe = mlp if isinstance(mlp, MoEConfig) else None
    modules = {"attention": layer.attention, "the FFN" if moe is None else "the experts": moe.expert if moe else mlp}
    for name, module in modules.items():
        if module.nf4:
            yield f"NF4 kernels in {name} of {{layers}}"
        if module.lora is not None:
            yield f"LoRA beside {name} of {{layers}}: {_lora(module.lora)}"
    if moe is not None and moe.router_lora is not None:
        yield f"LoRA beside the router of {{layers}}: {_lora(moe.router_lora)}"
    if moe is not None and moe.perft is not None:
        perft = dataclasses.asdict(moe.perft)
        chosen = "" if moe.perft.top_k is None else f", top {moe.perft.top_k}, gate {moe.perft.gate}"
        adapter = _in_words(perft["adapter"])
        yield f"PERFT in {{layers}}: {moe.perft.variant}, {moe.perft.num_experts} adapters{chosen}, adapter {adapter}"


def _lora(lora: Any) -> str:
    return f"{', '.join(lora.targets)}; rank {lora.rank}, scale {lora.scale:g}, dropout {lora.dropout:g}"


def _draw(source: "ModelSource", options: Options, plots: Path) -> list[Path]:
    """Measures the experts, writes the plots and returns their files; without a text, only those that need none."""
    from moe_jax.api.measure import default_seq_len
    from moe_jax.core.terminal import progress_bars
    from moe_jax.figures import comparable_layers, measure_layers, write_figures

    config = source.config
    if not config.moe_layers:
        raise InputError(f"{source.path} is dense: --plots draws experts, and it has none")
    if not comparable_layers(config) and options.text is None:
        raise InputError(
            f"--plots compares the kernels of experts, and those of {source.path} are adapters, or have LoRA or NF4; "
            "draw those of its base, or give --text FILE to draw their load alone"
        )
    seq_len = default_seq_len(config) if options.seq_len is None else options.seq_len
    if seq_len > config.max_positions:
        print(f"warning: {source.path} was made for {config.max_positions} positions, not {seq_len}", file=sys.stderr)
    load = {}
    with warnings.catch_warnings(), progress_bars() as progress:
        warnings.filterwarnings("ignore", message=r"tokens are \d+ long")  # so it was said above
        if options.text is not None:  # first, because it checks the text
            measure = _measure_use if options.has_rows else _measure_load
            load = measure(source, options, seq_len, progress)
        layers = measure_layers(source, progress)
    return write_figures(plots, layers, name="/".join(source.path.resolve().parts[-2:]), **load)


def _measure_load(source: "ModelSource", options: Options, seq_len: int, progress: "Progress") -> dict[str, Any]:
    """Returns how often each expert is chosen, and on which text, as `write_figures` takes it."""
    from moe_jax.api.model import tokenizer_of_source
    from moe_jax.data.data_files import uncompressed
    from moe_jax.distributed.sharding import make_mesh
    from moe_jax.evaluation.held_out import check_seq_len, measure_router_statistics, read_text
    from moe_jax.files.storage_path import as_path
    from moe_jax.model_io.loading import load_model

    assert options.text is not None
    check_seq_len(seq_len)
    ids = read_text(uncompressed(as_path(options.text)), tokenizer_of_source(source), name=str(options.text))
    mesh = make_mesh({"fsdp" if options.split else "data": -1})
    model = load_model(source, mesh=mesh)
    found = measure_router_statistics(model, ids, seq_len=seq_len, batch_size=8, mesh=mesh)
    shares = {layer: statistics.usage for layer, statistics in found.items()}
    return {"shares": shares, "text": {"path": str(options.text), "tokens": len(ids), "seq_len": seq_len}}


def _measure_use(source: "ModelSource", options: Options, seq_len: int, progress: "Progress") -> dict[str, Any]:
    """The same of rows of data, and what is drawn of those with pictures."""
    from moe_jax.api.expert_use import measure_expert_use
    from moe_jax.api.read_calibration import read_rows
    from moe_jax.distributed.sharding import make_mesh
    from moe_jax.figures import plots_of_use, use_numbers
    from moe_jax.model_io.loading import load_model

    assert options.text is not None
    how = {"samples": options.samples, "seed": 0, "image_folder": options.image_folder}
    rows = read_rows(source, options.text, seq_len=seq_len, **how)
    mesh = make_mesh({"fsdp" if options.split else "data": -1})
    size = 8 * mesh.size // math.gcd(8, mesh.size)
    use = measure_expert_use(load_model(source, mesh=mesh), rows, batch_size=size, mesh=mesh, progress=progress)
    name = "/".join(source.path.resolve().parts[-2:])
    return {
        "shares": use.shares(),
        "text": {"path": str(options.text), "tokens": sum(use.tokens), "seq_len": rows.length},
        "more": plots_of_use(use, name=name) if rows.num_pictures else {},
        "numbers": {"use": use_numbers(use)} if rows.num_pictures else {},
    }
