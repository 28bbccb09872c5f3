"""Figures of a compression: bytes against those of the source, errors by layer, and a sweep's quality against bytes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from moe_jax.compression import LayerReport, Sweep
from moe_jax.compression.coding.storage import bytes_by_part
from moe_jax.compression.method_sweep import plot_sweep
from moe_jax.compression.report import WORDS, layer_columns
from moe_jax.core.errors import InputError, shown
from moe_jax.core.formatting import show_bytes
from moe_jax.figures.plots import DrawnTo
from moe_jax.files.json_toml import parse
from moe_jax.model_io.model_source import ModelSource
from moe_jax.report.elements import facts, picture, table, warning
from moe_jax.report.pictures import drawn

_COMMAND = "compress"


def last_compression(source: ModelSource) -> Mapping[str, Any] | None:
    """The last entry of the lineage, if it is a compression; what came after it would have changed the figures."""
    last = source.lineage[-1] if source.lineage else {}
    return last if last.get("command") == _COMMAND else None


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

    def draw(file: DrawnTo) -> None:
        plot_sweep(sweep, file, title=title)

    best = min(sweep.points, key=lambda point: point.perplexity)
    alt = (
        f"perplexity and error over bytes of the experts for {len(sweep.points)} compressed models; not compressed the "
        f"perplexity is {sweep.perplexity:.4g}, the best is {best.method} with {best.kept:.1%} of the bytes and "
        f"{best.perplexity:.4g}"
    )
    yield picture(drawn(draw, alt), "Quality against bytes of the experts", wide=True)
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
