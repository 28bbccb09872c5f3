"""Prints what `plan --platform` says."""

from typing import TYPE_CHECKING

from rich.table import Table

from moe_jax.core.terminal import console_for_tables

if TYPE_CHECKING:
    from moe_jax.planning.planned_strategies import LayerStrategies, PlannedStrategies


def print_strategies(planned: "PlannedStrategies") -> None:
    """A table for every kind of experts; microseconds."""
    out = console_for_tables()
    peak, bandwidth = planned.operations_per_second, planned.bytes_per_second
    out.print()
    out.print(
        f"on {planned.platform}: {peak / 1e12:.4g} TFLOP/s in {planned.dtype}, {bandwidth / 1e9:.4g} GB/s, "
        f"{peak / bandwidth:.0f} operations per byte ({planned.source})",
        soft_wrap=True,
    )
    for layer in planned.layers:
        out.print(_title(layer), soft_wrap=True)
        out.print(_table(layer))
    for experts, count in planned.left_out.items():
        out.print(f"{count} layers of {experts}: no choice between strategies")
    if not planned.layers and not planned.left_out:
        out.print("no layer has experts: nothing to choose")


def _title(layer: "LayerStrategies") -> str:
    chosen = layer.times[layer.chosen]
    why = f"takes least, bound by {chosen.bound}" if len(layer.times) > 1 else f"the only way, bound by {chosen.bound}"
    count = f"{len(layer.layers)} layer{'s' if len(layer.layers) > 1 else ''}"
    load = f"{layer.num_experts} {layer.experts}, top-{layer.top_k}, {layer.use}, {layer.tokens} tokens"
    return f"{count} of {load}: {layer.chosen} ({why})"


def _table(layer: "LayerStrategies") -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("  strategy", no_wrap=True)
    for column in ("products, µs", "bytes, µs", "making, µs", "in all, µs"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for name, time in layer.times.items():
        numbers = (time.products, time.bytes, time.making, time.total)
        mark = "*" if name == layer.chosen else " "
        table.add_row(f"{mark} {name}", *(f"{number:,.1f}" for number in numbers), time.bound)
    return table
