"""Sections about a model: its sizes and parts, what compression did to it, how similar its experts are, its lineage."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from markupsafe import Markup

from moe_jax.compression import LayerReport, Sweep
from moe_jax.compression.coding.storage import bytes_by_part
from moe_jax.compression.method_sweep import plot_sweep
from moe_jax.compression.report import WORDS, layer_columns
from moe_jax.core.errors import InputError, shown
from moe_jax.core.formatting import count_bytes, index_set, is_parameter, show_bytes
from moe_jax.figures import LayerSimilarity
from moe_jax.figures.plots import plot_between, plot_load, plot_to_base
from moe_jax.figures.use_plots import plot_use_by_kind
from moe_jax.files.json_toml import parse
from moe_jax.model_io.model_source import ModelSource, OverBase
from moe_jax.models import ModelConfig
from moe_jax.nn.projector import vision_in_words
from moe_jax.peft.trained import active_size, parameter_sizes
from moe_jax.report.elements import facts, folded, joined, photograph, picture, table, warning
from moe_jax.report.subjects import Measured


class Sizes(NamedTuple):
    """Sizes of a model: parameters, its base's too, and those that one token meets; bytes stored on the disk.

    `own` are the parameters that it does not take from a base; None: it stands on none.
    """

    parameters: int
    active: int
    stored: int
    own: int | None


def sizes_of(source: ModelSource) -> Sizes:
    """Counts a model; only metadata is read."""
    sizes = parameter_sizes(source.config)
    active = sum(active_size(source.config, path, size) for path, size in sizes.items())
    own = source.own_specs() if isinstance(source, OverBase) else None
    stored = sum(map(source.stored_bytes, source.specs() if own is None else own))
    of_its_own = None if own is None else sum(spec.size for spec in own.values() if is_parameter(spec))
    return Sizes(sum(sizes.values()), active, stored, of_its_own)


def experts_in_words(config: ModelConfig) -> list[str]:
    """A line for all MoE layers that are alike."""
    alike: dict[str, list[int]] = {}
    for index in config.moe_layers:
        moe = config.moe(index)
        given = dict(moe.bank.given())
        kind, _ = given.pop("kind"), given.pop("train_base")
        # Numbers of entries by matrix, and what else is long, are in the config.
        short = {name: value for name, value in given.items() if isinstance(value, str | int | float)}
        form = ", ".join([str(kind), *(f"{name} {value}" for name, value in short.items())])
        merged = "" if moe.merged_experts is None else f" merged into {moe.merged_experts}"
        alike.setdefault(f"{moe.num_experts} experts{merged}, top {moe.top_k}, {form}", []).append(index)
    if len(alike) == 1 and len(config.moe_layers) == config.num_layers:
        return list(alike)
    return [f"{line} (layer{'s' * (len(layers) > 1)} {index_set(layers)})" for line, layers in alike.items()]


def model_facts(source: ModelSource, sizes: Sizes) -> Markup:
    """The most important figures, and a table of bytes by part."""
    config = source.config
    experts = experts_in_words(config)
    base = source.base.path if source.base is not None else None
    shown = facts(
        {
            "family": config.family,
            "layers": f"{config.num_layers}",
            "width": f"{config.d_model:,}",
            "vocabulary": f"{config.vocab_size:,}",
            "parameters": f"{sizes.parameters:,}",
            "active per token": f"{sizes.active:,}" if sizes.active != sizes.parameters else None,
            "stored here": None if sizes.own is None else f"{sizes.own:,}",
            "weights on the disk": show_bytes(sizes.stored),
            "experts": "; ".join(experts) if experts else None,
            "sees": vision_in_words(config),
            "stands on": None if base is None else str(base),
        }
    )
    return joined(shown, parts_table(source))


def parts_table(source: ModelSource) -> Markup:
    """Parameters and bytes by part."""
    specs = source.specs()
    sizes = parameter_sizes(source.config)
    parts: dict[str, list[str]] = {}
    for path in specs:
        part = next(name for name, mark in _PARTS.items() if mark in path)
        parts.setdefault(part, []).append(path)
    whole = count_bytes(specs.values())
    rows = [_row(name, paths, specs, sizes, whole) for name, paths in parts.items()]
    rows.append(_row("all", list(specs), specs, sizes, whole))
    columns = ("part", "parameters", "dtype", "bytes", "share")
    return table("Bytes by part, as they are in memory", columns, rows, words={0, 2}, last_is_total=True)


def _row(name: str, paths: list[str], specs: Mapping, sizes: Mapping[str, int], whole: int) -> tuple[str, ...]:
    nbytes = count_bytes(specs[path] for path in paths)
    dtypes = ", ".join(dict.fromkeys(str(specs[path].dtype) for path in paths)) if name != "all" else ""
    # `parameter_sizes` has the path of a kernel for its NF4 codes and scales.
    kernels = dict.fromkeys(path.split("/nf4/")[0] + "/kernel" if "/nf4/" in path else path for path in paths)
    params = sum(sizes[kernel] for kernel in kernels if kernel in sizes)
    return (name, f"{params:,}", dtypes, show_bytes(nbytes), f"{nbytes / max(whole, 1):.1%}")


# What the paths of their leaves contain; the first that fits counts.
_PARTS = {
    "image encoder": "vision/tower/",
    "projector": "vision/projector/",
    "LoRA": "/lora/",
    "PERFT adapters": "/mlp/perft/",
    "routers": "/mlp/router/",
    "what the experts share": "/mlp/experts/base/",
    "what each expert has of its own": "/mlp/experts/",
    "universal FFNs": "/mlp/universal/",
    "norms": "norm",
    "dense FFNs": "/mlp/",
    "attention": "layers/",
    "embeddings and head": "",
}


_MAX_TEXT = 400
# These have tables of their own.
_ELSEWHERE = ("layers", "warnings", "points")


def lineage_step(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a command of a lineage for `steps`, with its sources, figures, options and versions."""
    command = entry["command"]
    measured = {name: value for name, value in entry.get("measured", {}).items() if name not in _ELSEWHERE}
    scalars = {
        name: show_bytes(value) if name.split("_")[-1] == "bytes" and type(value) is int else in_words(value)
        for name, value in measured.items()
        if not isinstance(value, list | dict)
    }
    others = [(name, in_words(value)) for name, value in measured.items() if isinstance(value, list | dict)]
    options = [(name, in_words(value)) for name, value in entry.get("options", {}).items()]
    versions = [(name, in_words(value)) for name, value in entry.get("versions", {}).items()]
    tables = folded(
        "options, versions" + (", other figures" if others else ""),
        table(f"Options of {command}", ("option", "value"), options, words=2),
        table(f"Other figures of {command}", ("figure", "value"), others, words=2),
        table(f"Versions of what {command} ran with", ("package", "version"), versions, words=2),
    )
    return {
        "command": command,
        "date": str(entry.get("date", "")).replace("T", " "),
        "sources": [
            (str(source.get("hub") or source.get("path", "")), str(source.get("fingerprint", "")))
            for source in entry.get("sources", ())
        ],
        "content": joined(facts({name.replace("_", " "): value for name, value in scalars.items()}), tables),
    }


def in_words(value: Any) -> str:
    """A value of a lineage entry: numbers as they are read, anything else as JSON, not all of it if it is long."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) > 9999 else str(value)
    if isinstance(value, float):
        return f"{value:,.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({len(text):,} characters)"


def last_compression(source: ModelSource) -> Mapping[str, Any] | None:
    """The last entry of the lineage, if it is a compression; what came after it would have changed the figures."""
    last = source.lineage[-1] if source.lineage else {}
    return last if last.get("command") == "compress" else None


def compression_tables(source: ModelSource) -> list[Markup]:
    """Bytes before and after, what stays of the experts, and a table of the layers; nothing without a compression.

    Raises:
      InputError: if the lineage does not hold what `compress` writes.
    """
    entry = last_compression(source)
    if entry is None:
        return []
    measured, where = entry.get("measured", {}), f"{source.path}, lineage of compress"
    layers = _layers(measured, where)
    before, after = (_bytes(measured, f"expert_bytes_{when}", where) for when in ("before", "after"))
    rows = [("experts", show_bytes(before), show_bytes(after), f"{after / before:.1%}")]
    for name, nbytes in bytes_by_part(source.config, [layer.layer for layer in layers]).items():
        if nbytes:
            rows.append((f"experts: {name}", "", show_bytes(nbytes), f"{nbytes / before:.1%}"))
    before, after = (_bytes(measured, f"bytes_{when}", where) for when in ("before", "after"))
    rows.append(("the whole model", show_bytes(before), show_bytes(after), f"{after / before:.1%}"))
    columns = layer_columns(layers)
    alike = {title: columns.pop(title)[0] for title in WORDS if len(set(columns.get(title, ()))) == 1}
    titles = [title.replace("\n", " ") for title in columns]
    warnings = measured.get("warnings")
    return [
        *(warning(str(one)) for one in (warnings if isinstance(warnings, list) else ())),
        facts(alike),
        table("Bytes on the disk, before and after", ("part", "before", "after", "of what it was"), rows),
        table(
            "What compression did to every layer",
            titles,
            zip(*columns.values(), strict=True),
            words={0, *(index for index, title in enumerate(titles) if title in WORDS)},
        ),
    ]


def sweep_pictures(sweep: Sweep, title: str) -> Iterator[Markup]:
    """Quality against bytes, drawn and as a table."""
    best = min(sweep.points, key=lambda point: point.perplexity)
    alt = (
        f"perplexity and error over bytes of the experts for {len(sweep.points)} compressed models; not compressed the "
        f"perplexity is {sweep.perplexity:.4g}, the best is {best.method} with {best.kept:.1%} of the bytes and "
        f"{best.perplexity:.4g}"
    )
    yield picture(partial(plot_sweep, sweep, title=title), alt, "Quality against bytes of the experts", wide=True)
    rows = [("not compressed", "", show_bytes(sweep.expert_bytes), "100.0%", "", f"{sweep.perplexity:.4f}")]
    for point in sweep.points:
        option = f"{point.option} {point.value:g}"
        figures = (f"{point.kept:.1%}", f"{point.relative_error:.4f}", f"{point.perplexity:.4f}")
        rows.append((point.method, option, show_bytes(point.expert_bytes), *figures))
    columns = ("method", "option", "bytes of experts", "kept", "error", "perplexity")
    yield table("Every compressed model of the sweep", columns, rows, words=2)
    yield from (warning(one) for one in sweep.warnings)


def _layers(measured: Mapping[str, Any], where: str) -> Sequence[LayerReport]:
    entries = measured.get("layers")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{where}: layers is {shown(entries)}, expected a list of objects")
    return [parse(LayerReport, entry, where=f"{where}, layers", language="JSON") for entry in entries]


def _bytes(measured: Mapping[str, Any], key: str, where: str) -> int:
    found = measured.get(key)
    if type(found) is not int or found < 1:
        raise InputError(f"{where}: {key} is {shown(found)}, expected a number of bytes")
    return found


def similarity_pictures(layers: Sequence[LayerSimilarity], title: str) -> list[Markup]:
    """Cosines over the layers and between experts, drawn and as a table; nothing if there are no layers."""
    if not layers:
        return []
    to_base, between = partial(plot_to_base, layers, title=title), partial(plot_between, layers, title=title)
    rows = []
    for layer in layers:
        every, others = layer.all_to_base(), layer.between_others()
        least, mean = (f"{1 - value:.3g}" for value in (every.max(), every.mean()))
        apart = f"{1 - others.mean():.3g}" if others.size else "-"
        rows.append((str(layer.layer), layer.base, f"{len(layer.between)}", least, mean, apart))
    farthest = max(layers, key=lambda layer: 1 - layer.all_to_base().mean())
    alt = (
        f"experts and their base over {len(layers)} layers; on average they are farthest from it in layer "
        f"{farthest.layer}, where the cosine is {farthest.all_to_base().mean():.6g}"
    )
    columns = ("layer", "base", "experts", "to the base, nearest", "to the base, mean", "to each other, mean")
    figures = table("Distances of experts by layer, as 1 − cosine", columns, rows, words=2)
    return [
        picture(to_base, alt, "How far the experts have gone from their base", wide=True),
        picture(
            between,
            f"heat maps of the similarity between the experts of {len(layers)} layers",
            "How similar the experts of a layer are to each other",
            wide=True,
        ),
        folded("the distances in figures", figures),
    ]


def measured_pictures(measured: Measured) -> list[Markup]:
    """Returns pictures of the measurements of `inspect --plots`."""
    found = similarity_pictures(measured.layers, measured.model)
    if measured.shares:
        on = f", on {measured.text}" if measured.text else ""
        load = partial(plot_load, measured.shares, title=f"{measured.model}: load of the experts")
        alt = f"heat map of how often each expert of {len(measured.shares)} layers is chosen"
        found.append(picture(load, alt, f"Use of the experts by layer{on}", wide=True))
    if measured.use is not None:
        seen, read = measured.use.tokens
        by_kind = partial(plot_use_by_kind, measured.use, title=f"{measured.model}: experts by tokens")
        alt = f"bars of the experts of {len(measured.use.of_text)} layers, of tokens of pictures and of texts"
        found.append(picture(by_kind, alt, f"Experts of {seen:,} tokens of pictures, and {read:,} of texts", wide=True))
    for number, png in enumerate(measured.patches, start=1):
        caption = f"Picture {number}, and by layer the first expert of every patch"
        found.append(photograph(png, caption, caption, wide=True))
    return found
