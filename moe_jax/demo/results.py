"""The demo's final table and plot."""

import statistics
from pathlib import Path
from typing import NamedTuple

import rich.table

from moe_jax.training.log.metrics import Record, read_metrics


class Result(NamedTuple):
    """One model of the comparison."""

    name: str
    params: int
    added: int
    perplexity: float
    tokens_per_second: float


def median_speed(records: list[Record]) -> float:
    """Training tokens per second: the median over the steps, which leaves out compilation."""
    return statistics.median(record["tokens_per_second"] for record in records)


def table(results: list[Result], held_out_bytes: int) -> rich.table.Table:
    """A table of the results, with one row per model."""
    table = rich.table.Table(
        title=f"held-out text: {held_out_bytes:,} bytes; perplexity is per byte", title_justify="left"
    )
    for column in ("model", "parameters", "added", "held-out perplexity", "training tokens/s"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for result in results:
        numbers = (
            f"{result.params:,}",
            f"{result.added:,}",
            f"{result.perplexity:.3f}",
            f"{result.tokens_per_second:,.0f}",
        )
        table.add_row(result.name, *numbers)
    return table


def plot(path: Path, dense: Path, others: dict[str, Path]) -> None:
    """Draws the loss over steps: of the dense model, and then of the models that continue from it.

    Args:
      path: the PNG to write.
      dense: run directory of the dense model.
      others: run directories by name, each begun from the trained dense model.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    first = read_metrics(dense / "metrics.jsonl")
    begin = first[-1]["step"]
    curves = {
        "dense": (0, first),
        **{name: (begin, read_metrics(run / "metrics.jsonl")) for name, run in others.items()},
    }
    for index, (name, (offset, records)) in enumerate(curves.items()):
        style = {"label": name, "linewidth": 1.2, "color": f"C{index}"}
        left.plot([offset + r["step"] for r in records], [r["loss"] for r in records], **style)
        held_out = [(offset + r["step"], r["eval_loss"]) for r in records if "eval_loss" in r]
        if name != "dense":
            held_out.insert(0, (begin, next(r["eval_loss"] for r in reversed(first) if "eval_loss" in r)))
            right.plot(*zip(*held_out, strict=True), marker="o", markersize=3, **style)
    left.set(title="training loss", xlabel="step", ylabel="nats per byte")
    right.set(title="held-out loss after the dense model's training", xlabel="step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
