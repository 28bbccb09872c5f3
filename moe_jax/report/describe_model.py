"""Description of a model: sizes, experts, and bytes by part."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from moe_jax.core.formatting import count_bytes, index_set, is_parameter, show_bytes
from moe_jax.model_io.model_source import ModelSource, OverBase
from moe_jax.models import ModelConfig
from moe_jax.peft.trained_table import active_size, parameter_sizes
from moe_jax.report.elements import facts, folded, joined, steps, table


class Sizes(NamedTuple):
    """Sizes of a model.

    Attributes:
      parameters: all of them, its base's too.
      active: those that one token meets.
      stored: bytes on the disk, of what it does not take from a base.
      own: parameters that it does not take from a base; None: it stands on none.
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
            "on the disk": show_bytes(sizes.stored),
            "experts": "; ".join(experts) if experts else None,
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
        parts.setdefault(part_of(path), []).append(path)
    whole = count_bytes(specs.values())
    rows = [_row(name, paths, specs, sizes, whole) for name, paths in parts.items()]
    rows.append(_row("all", list(specs), specs, sizes, whole))
    columns = ("part", "parameters", "dtype", "bytes", "share")
    return table("Bytes by part, as they are in memory", columns, rows, words={0, 2}, last_is_total=True)


def _row(name: str, paths: list[str], specs: Mapping, sizes: Mapping[str, int], whole: int) -> tuple[str, ...]:
    nbytes = count_bytes(specs[path] for path in paths)
    dtypes = ", ".join(dict.fromkeys(str(specs[path].dtype) for path in paths)) if name != "all" else ""
    params = sum(sizes[kernel] for kernel in dict.fromkeys(map(_kernel_of, paths)) if kernel in sizes)
    return (name, f"{params:,}", dtypes, show_bytes(nbytes), f"{nbytes / max(whole, 1):.1%}")


def _kernel_of(path: str) -> str:
    """The path that `parameter_sizes` has for a leaf: of NF4 codes and scales that of their kernel."""
    return path.split("/nf4/")[0] + "/kernel" if "/nf4/" in path else path


def part_of(path: str) -> str:
    """The part of a model that a leaf belongs to, in words."""
    return next(name for name, belongs in _parts(path) if belongs)


def _parts(path: str) -> Iterator[tuple[str, bool]]:
    yield "LoRA", "/lora/" in path
    yield "PERFT adapters", "/mlp/perft/" in path
    yield "routers", "/mlp/router/" in path
    yield "what the experts share", "/mlp/experts/base/" in path
    yield "what each expert has of its own", "/mlp/experts/" in path
    yield "universal FFNs", "/mlp/universal/" in path
    yield "norms", any("norm" in part for part in path.split("/"))
    yield "dense FFNs", "/mlp/" in path
    yield "attention", "layers/" in path
    yield "embeddings and head", True


_MAX_TEXT = 400
# These have tables of their own.
_ELSEWHERE = ("layers", "warnings", "points")


def lineage_steps(lineage: Sequence[Mapping[str, Any]]) -> Markup:
    """Returns the commands in their order, each with sources, figures, options and versions."""
    return steps([_step(entry) for entry in lineage])


def _step(entry: Mapping[str, Any]) -> dict[str, Any]:
    command = entry["command"]
    measured = {name: value for name, value in entry.get("measured", {}).items() if name not in _ELSEWHERE}
    scalars = {name: _figure(name, value) for name, value in measured.items() if not isinstance(value, list | dict)}
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
        "sources": [_source(source) for source in entry.get("sources", ())],
        "content": joined(facts({name.replace("_", " "): value for name, value in scalars.items()}), tables),
    }


def _source(source: Mapping[str, Any]) -> tuple[str, str]:
    return str(source.get("hub") or source.get("path", "")), str(source.get("fingerprint", ""))


def _figure(name: str, value: Any) -> str:
    """A figure in words; bytes have a unit."""
    return show_bytes(value) if name.split("_")[-1] == "bytes" and type(value) is int else in_words(value)


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
