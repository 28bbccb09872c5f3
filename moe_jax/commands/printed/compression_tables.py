"""Prints the results of `moe-jax compress`."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from moe_jax.compression.report import WORDS, layer_columns
from moe_jax.core.formatting import show_bytes

if TYPE_CHECKING:
    from moe_jax.compression import Report, Sweep

_WIDTH = 200


def print_report(model: Path, out: Path, report: "Report", *, as_json: bool) -> None:
    """Prints the figures of a compression: a table and totals, or a line of JSON. Warnings go to standard error."""
    _warn(report.warnings)
    if as_json:
        summary = {key: value for key, value in report.to_json().items() if key != "layers"}
        print(json.dumps({"model": str(model), "out": str(out), **summary}))
        return
    shown = layer_columns(report.layers)
    alike = {title: shown.pop(title)[0] for title in WORDS if len(set(shown.get(title, ()))) == 1}
    table = _table(*shown)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    terminal = console()
    terminal.print(table)
    for title, text in alike.items():
        terminal.print(f"{title}: {text}", markup=False)
    for what, before, after in (
        ("experts", report.expert_bytes_before, report.expert_bytes_after),
        ("model", report.bytes_before, report.bytes_after),
    ):
        terminal.print(f"{what}: {show_bytes(before)} -> {show_bytes(after)} on the disk ({after / before:.1%})")
    terminal.print(_parts_line(out, report), markup=False)
    terminal.print(f"wrote {out}", markup=False)


def _parts_line(out: Path, report: "Report") -> str:
    """Returns a line that splits the bytes of the compressed experts into parts: there are more than the kept share."""
    from moe_jax.api.open_source import read_config
    from moe_jax.compression.coding.storage import bytes_by_part

    config = read_config(out)
    sums = bytes_by_part(config, [layer.layer for layer in report.layers])
    before = report.expert_bytes_before
    shares = [f"{title} {nbytes / before:.1%}" for title, nbytes in sums.items() if nbytes]
    return f"of the experts' bytes there stay: {', '.join(shares)} ({config.dtype} where there are no codes)"


def print_sweep(out: Path, sweep: "Sweep", *, as_json: bool) -> None:
    """Prints the results of a sweep: a table, or its JSON file. Warnings go to standard error."""
    _warn(sweep.warnings)
    if as_json:
        print((out / "sweep.json").read_text())
        return
    table = _table("method", "", "bytes of experts", "kept", "error", "perplexity")
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
    terminal = console()
    terminal.print(table)
    terminal.print(f"wrote {out}: sweep.json, sweep.png", markup=False)


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        words = index == 0 or column in ("", *WORDS)
        table.add_column(column, justify="left" if words else "right", vertical="bottom", no_wrap=True)
    return table


def console() -> Console:
    """Returns a console for standard output that cuts nothing off: a terminal that is too narrow wraps lines itself."""
    return Console(highlight=False, width=max(_WIDTH, Console().width))
