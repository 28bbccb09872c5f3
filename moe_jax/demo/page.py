"""The page that the demo ends with: answers before and after, a table, and the curve; on the terminal and as HTML."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import rich.console
import rich.table
from rich.markup import escape

from moe_jax.formatting import show_bytes
from moe_jax.train.metrics import Record


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


def write_page(path: Path, answers: Sequence[Answers], rows: Sequence[Row], picture: Path, model: str) -> None:
    """Writes the same as one HTML file, with the picture in it.

    Args:
      path: of the file.
      answers, rows: what it shows.
      picture: a PNG.
      model: name of the model.
    """
    said = "".join(
        f"<h3>{html.escape(answer.question)}</h3><dl><dt>before</dt><dd>{html.escape(answer.before)}</dd>"
        f"<dt>now</dt><dd>{html.escape(answer.after)}</dd></dl>"
        for answer in answers
    )
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row)) + "</tr>" for row in rows)
    image = base64.b64encode(picture.read_bytes()).decode()
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>moe-jax demo</title><style>{_STYLE}</style>'
        f"<h1>moe-jax demo: {html.escape(model)}</h1><h2>What it said before, and says now</h2>{said}"
        f"<h2>Models</h2><table><tr>{head}</tr>{body}</table>"
        f'<h2>Tuning</h2><img alt="training loss over steps" src="data:image/png;base64,{image}"></html>\n'
    )


def plot(path: Path, records: Sequence[Record]) -> None:
    """Draws the loss over the steps of the tuning as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.plot([record["step"] for record in records], [record["loss"] for record in records], marker="o", markersize=3)
    axes.set(title="tuning on word problems", xlabel="step", ylabel="loss, nats per token of an answer")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _cells(row: Row) -> tuple[str, ...]:
    speed = f"{row.tokens_per_second:,.0f}"
    return (row.name, f"{row.params:,}", show_bytes(row.nbytes), f"{row.perplexity:.3f}", speed)


_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}table{border-collapse:collapse}"
    "td,th{padding:.3em .8em;border-bottom:1px solid #ccc;text-align:right}td:first-child,th:first-child"
    "{text-align:left}dt{font-weight:bold}dd{margin:0 0 .5em 1em;white-space:pre-wrap}img{max-width:100%}"
)
