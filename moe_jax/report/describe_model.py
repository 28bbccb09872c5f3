"""Description of a model: sizes, experts, and bytes by part."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from markupsafe import Markup

from moe_jax.core.counting import count_bytes, is_parameter
from moe_jax.core.formatting import index_set, show_bytes
from moe_jax.model_io.model_source import ModelSource, OverBase
from moe_jax.models import ModelConfig
from moe_jax.peft.parameter_sizes import active_size, parameter_sizes
from moe_jax.report.elements import facts, joined, table


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
