"""What `moe-jax compress` prints."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from moe_jax.commands.inspect import human_bytes

if TYPE_CHECKING:
    from moe_jax.compress import Report, Sweep


def print_report(model: Path, out: Path, report: "Report", *, as_json: bool) -> None:
    """Prints the figures of a compression: a table and totals, or JSON. Warnings go to standard error."""
    _warn(report.warnings)
    if as_json:
        print(json.dumps({"model": str(model), "out": str(out), **report.to_json()}, indent=2))
        return
    table = _table("layer", "base", "cosine to base", "least", "error", "of the delta", "bytes before", "after", "kept")
    for layer in report.layers:
        table.add_row(
            str(layer.layer),
            layer.base,
            f"{layer.cosine_mean:.4f}",
            f"{layer.cosine_min:.4f}",
            f"{layer.relative_error:.4f}",
            "-" if layer.delta_error is None else f"{layer.delta_error:.4f}",
            human_bytes(layer.bytes_before),
            human_bytes(layer.bytes_after),
            f"{layer.bytes_after / layer.bytes_before:.1%}",
        )
    out_console = console()
    out_console.print(table)
    for what, before, after in (
        ("experts", report.expert_bytes_before, report.expert_bytes_after),
        ("model", report.bytes_before, report.bytes_after),
    ):
        out_console.print(f"{what}: {human_bytes(before)} -> {human_bytes(after)} on the disk ({after / before:.1%})")
    out_console.print(f"wrote {out}", markup=False)


def print_sweep(out: Path, sweep: "Sweep", *, as_json: bool) -> None:
    """Prints what a sweep found: a table, or its JSON file. Warnings go to standard error."""
    _warn(sweep.warnings)
    if as_json:
        print((out / "sweep.json").read_text())
        return
    table = _table("method", "", "bytes of experts", "kept", "error", "perplexity")
    table.add_row("not compressed", "", human_bytes(sweep.expert_bytes), "", "", f"{sweep.perplexity:.4f}")
    for point in sweep.points:
        table.add_row(
            point.method,
            f"{point.option} {point.value:g}",
            human_bytes(point.expert_bytes),
            f"{point.kept:.1%}",
            f"{point.relative_error:.4f}",
            f"{point.perplexity:.4f}",
        )
    out_console = console()
    out_console.print(table)
    out_console.print(f"wrote {out}: sweep.json, sweep.png", markup=False)


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    return table


def console() -> Console:
    """Prints on standard output. Piped into a file or a pager, nothing is cut off."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=200)
