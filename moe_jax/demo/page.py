"""The page that a demo ends with: on the terminal, and as one HTML file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.console
from markupsafe import Markup
from rich.markup import escape

from moe_jax.core.errors import InputError
from moe_jax.core.formatting import show_bytes, show_duration
from moe_jax.demo.comparison import COLUMNS, Row, cells, comparison_table, summary_of, times_of, write_results
from moe_jax.demo.folder import is_number
from moe_jax.demo.questions import Answers
from moe_jax.figures.plots import Curve, DrawnTo, ink, new_figure, plot_curves
from moe_jax.report.elements import facts, html_page, note, picture, said, section, side_by_side, table
from moe_jax.training.metrics import Record, read_metrics
from moe_jax.training.run_directory import METRICS


class Page(NamedTuple):
    """The content of a page.

    Attributes:
      title: names the model.
      answers: to the questions.
      rows: every model, those that were compressed last, the best of them at the end.
      whole: the name of the model that these were compressed from.
      records: of its training.
      learnt: names what it learnt from, and is scored by.
      unit: of that text, of which each is predicted.
      seconds: that every step took, by its title.
    """

    title: str
    answers: Sequence[Answers]
    rows: Sequence[Row]
    whole: str
    records: Sequence[Record]
    learnt: str
    unit: str
    seconds: dict[str, float]

    @property
    def compressed(self) -> tuple[Row, list[Row]]:
        """The model that was compressed, and what was made of it."""
        place = [row.name for row in self.rows].index(self.whole)
        return self.rows[place], list(self.rows[place + 1 :])

    @property
    def summary(self) -> str:
        """A line about what the last model saves and loses."""
        whole, (*_, small) = self.compressed
        return summary_of(whole, small)


def finish(console: rich.console.Console, folder: Path, page: Page, **about: Any) -> None:
    """Ends a demo: writes its results, with what they are `about`, and its page, and prints that, too."""
    write_results(folder, page.rows, page.seconds, title=page.title, whole=page.whole, unit=page.unit, **about)
    write_page(folder / "page.html", page)
    print_page(console, page)
    print_places(console, folder, page.seconds)


def print_places(console: rich.console.Console, folder: Path, seconds: Mapping[str, float]) -> None:
    """Prints where everything is, and how long it took."""
    took = show_duration(sum(seconds.values()))
    places = f"this page: {folder / 'page.html'}   everything: {folder}/   {took}"
    console.print(places, highlight=False, markup=False)


def print_page(console: rich.console.Console, page: Page) -> None:
    """Prints answers, table and times."""
    console.rule("what each model says")
    print_answers(console, page.answers)
    console.print(comparison_table(page.rows))
    console.print(page.summary, highlight=False)
    console.print(times_of(page.seconds), highlight=False)


def print_answers(console: rich.console.Console, answers: Sequence[Answers]) -> None:
    """Prints questions, and what each model says to them."""
    for answer in answers:
        console.print(f"\n[bold]{escape(answer.question)}[/bold]", highlight=False)
        width = max(map(len, answer.by_model))
        for name, text in answer.by_model.items():
            console.print(f"  {name:>{width}}: {escape(' '.join(text.split()))}", highlight=False)
    console.print()


def training_records(run: Path) -> list[Record]:
    """Returns the records of a run's steps, each with its loss.

    Raises:
      InputError: if there are none: the demo has trained, so something else has changed the file.
    """
    records = [one for one in read_metrics(run / METRICS) if is_number(one.get("loss")) and is_number(one.get("step"))]
    if not records:
        raise InputError(f"{run / METRICS} has no loss of a step; leave out --resume to begin anew")
    return records


_CAPTION = "Bytes of the whole model and of its experts; bits per weight of these, everything included"


def write_page(file: Path, page: Page) -> None:
    """Writes the page as one HTML file."""
    whole, small = page.compressed
    of_sizes = "; ".join(f"{row.name}: {show_bytes(row.nbytes)}, {row.perplexity:.3f}" for row in (whole, *small))
    pictures = (
        picture(
            lambda drawn: plot_sizes(drawn, page),
            of_sizes,
            "Change of the held-out perplexity over the bytes of the whole model",
        ),
        picture_of_loss(page.records, f"Training loss on {page.learnt}", unit=page.unit),
    )
    scored = f"Perplexity is per {page.unit} of {page.learnt} that no model learnt from, {whole.tokens:,} in all."
    before, after = ((show_bytes(row.nbytes), show_bytes(row.expert_bytes or 0)) for row in (whole, small[-1]))
    shown = facts(
        {
            "bytes of the model": f"{before[0]} → {after[0]}",
            "bytes of its experts": f"{before[1]} → {after[1]}",
            "held-out perplexity": f"{whole.perplexity:.3f} → {small[-1].perplexity:.3f}",
        }
    )
    compared = table(_CAPTION, COLUMNS, map(cells, page.rows))
    made = html_page(
        page.title,
        shown,
        section("Models", compared, note(scored), side_by_side(*pictures)),
        section("What each model says", *map(said, page.answers)),
        section_of_times(page.seconds),
        subtitle=f"{page.summary}.",
    )
    file.write_text(made, encoding="utf-8")


_MARKERS = "osD^v"


# The least range of the picture, in percent: what makes no difference looks like none.
_LEAST_RANGE = (-0.5, 2.0)


def plot_sizes(file: DrawnTo, page: Page) -> None:
    """Draws the change of the perplexity over the bytes of the whole model, a point for each that was compressed."""
    whole, small = page.compressed
    figure = new_figure(5.2, 3.3)
    axes = figure.add_subplot()
    axes.axhline(0, color=ink(), linewidth=0.8, linestyle="--")
    changes = [100 * (row.perplexity / whole.perplexity - 1) for row in (whole, *small)]
    for number, (row, change) in enumerate(zip((whole, *small), changes, strict=True)):
        colour = ink() if number == 0 else f"C{number - 1}"
        marker = _MARKERS[number % len(_MARKERS)]
        axes.plot(row.nbytes / 1e6, change, marker, markersize=8, color=colour, label=row.name)
    axes.set(xlabel="bytes of the whole model, MB", ylabel="change of the perplexity, %")
    axes.set_xlim(0, 1.08 * whole.nbytes / 1e6)
    least, most = _LEAST_RANGE
    axes.set_ylim(1.2 * min(least, *changes), 1.2 * max(most, *changes))
    axes.grid(alpha=0.6, linewidth=0.6)
    axes.tick_params(length=0)
    axes.legend(fontsize=9, framealpha=0.8)
    figure.savefig(file, dpi=130)


def picture_of_loss(records: Sequence[Record], caption: str, *, unit: str) -> Markup:
    """Returns a picture of the loss over the steps of a training, in nats per `unit`."""
    first, last = records[0], records[-1]
    alt = f"training loss from {first['loss']:.3f} at step {first['step']} to {last['loss']:.3f} at step {last['step']}"
    curve = Curve("loss", [record["step"] for record in records], [record["loss"] for record in records])
    return picture(lambda drawn: plot_curves([curve], drawn, label=f"training loss, nats per {unit}"), alt, caption)


def section_of_times(seconds: Mapping[str, float]) -> Markup:
    """Returns the section about how long every step took."""
    took = [(title, show_duration(one)) for title, one in seconds.items()]
    return section("How long it took", table("Every step", ("step", "minutes"), took))
