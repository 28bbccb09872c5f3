"""The page that the demo ends with: answers before and after, a table, and the curve; on the terminal and as HTML."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import rich.console
import rich.table
from rich.markup import escape

from moe_jax.core.formatting import show_bytes
from moe_jax.figures.curves import Curve, plot_curves
from moe_jax.figures.plots import DrawnTo
from moe_jax.report.elements import html_page, picture, said, section, table
from moe_jax.report.pictures import drawn
from moe_jax.training.log.metrics import Record


class Answers(NamedTuple):
    """A question, and what the model said before and after it was tuned."""

    question: str
    before: str
    after: str


class Row(NamedTuple):
    """One model.

    Attributes:
      name: what was done to it.
      params: parameters; codes and positions are none.
      nbytes: of its weights on the disk.
      perplexity: per token, of the answers to held-out problems.
      tokens_per_second: that were scored.
    """

    name: str
    params: int
    nbytes: int
    perplexity: float
    tokens_per_second: float


COLUMNS = ("model", "parameters", "bytes", "held-out perplexity", "scored tokens/s")


def print_page(console: rich.console.Console, answers: Sequence[Answers], rows: Sequence[Row]) -> None:
    """Prints answers and table."""
    console.rule("what it said before, and says now")
    for answer in answers:
        console.print(f"\n[bold]{escape(answer.question)}[/bold]", highlight=False)
        for when, text in (("before", answer.before), ("now", answer.after)):
            console.print(f"  {when:>6}: {escape(' '.join(text.split()))}", highlight=False)
    table = rich.table.Table()
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        table.add_row(*_cells(row))
    console.print()
    console.print(table)


def write_page(
    path: Path, answers: Sequence[Answers], rows: Sequence[Row], records: Sequence[Record], model: str
) -> None:
    """Writes the same as one HTML file, with the loss of the tuning.

    Args:
      path: of the file.
      answers, rows: what it shows.
      records: of the steps of the tuning.
      model: name of the model.
    """
    compared = table("What was made of the model, and how well it does", COLUMNS, map(_cells, rows))
    first, last = records[0], records[-1]
    alt = f"training loss from {first['loss']:.3f} at step {first['step']} to {last['loss']:.3f} at step {last['step']}"
    curve = picture(drawn(lambda file: plot(file, records), alt), "Training loss on word problems")
    page = html_page(
        f"moe-jax demo: {model}",
        section("What it said before, and says now", *map(said, answers)),
        section("Models", compared),
        section("Tuning", curve),
    )
    path.write_text(page, encoding="utf-8")


def plot(file: DrawnTo, records: Sequence[Record]) -> None:
    """Draws the loss over the steps of the tuning."""
    curve = Curve("loss", [record["step"] for record in records], [record["loss"] for record in records])
    plot_curves([curve], file, label="loss, nats per token of an answer")


def _cells(row: Row) -> tuple[str, ...]:
    speed = f"{row.tokens_per_second:,.0f}"
    return (row.name, f"{row.params:,}", show_bytes(row.nbytes), f"{row.perplexity:.3f}", speed)
