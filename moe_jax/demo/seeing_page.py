"""The page that the demo of a model that sees ends with: on the terminal, and as one HTML file."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rich.box
import rich.console
import rich.table

import moe_jax
from moe_jax.core.formatting import show_bytes
from moe_jax.demo.comparison import RESULTS, console_table, times_of
from moe_jax.demo.page import picture_of_loss, print_answers, print_places, section_of_times
from moe_jax.demo.questions import Answers
from moe_jax.demo.small_world import CHANCE
from moe_jax.figures.plots import DrawnTo, ink, new_figure
from moe_jax.report.elements import answers, facts, html_page, note, photograph, picture, section, side_by_side, table
from moe_jax.training.metrics import Record


class Asked(NamedTuple):
    """A question about a picture.

    Attributes:
      picture: its file, a PNG.
      question, answer: a word is right.
      kind: one of `small_world.CHANCE`.
    """

    picture: Path
    question: str
    kind: str
    answer: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeeingModel:
    """A model, and what was measured of it.

    Attributes:
      name: says what was done to it.
      params: numbers that it has, the image encoder's included; codes stand for as many as they were made of.
      nbytes: of all weights on the disk. expert_bytes: of the experts, with what they share; None: it is dense.
      tokens_per_second: read and written, once compiled; features of pictures are tokens.
      said: its answer to every question.
      right: by kind of question, how many answers were right, and how many there were.
    """

    name: str
    params: int
    nbytes: int
    expert_bytes: int | None
    tokens_per_second: float
    said: Sequence[str]
    right: Mapping[str, tuple[int, int]]

    @property
    def share(self) -> float:
        """The share of right answers."""
        right, count = map(sum, zip(*self.right.values(), strict=True))
        return right / count


class VisionPage(NamedTuple):
    """The content of a page.

    Attributes:
      title: names the model.
      models: in the order in which they were made: before training, after it, and made smaller.
      questions: the first of those that were asked.
      stages: the records of each training, by its name.
      seconds: that every step took, by its title.
    """

    title: str
    models: Sequence[SeeingModel]
    questions: Sequence[Asked]
    stages: Mapping[str, Sequence[Record]]
    seconds: dict[str, float]

    @property
    def answers(self) -> list[Answers]:
        """The answers of every model to the questions that are shown."""
        return [
            Answers(one.question, {model.name: model.said[number] for model in self.models})
            for number, one in enumerate(self.questions)
        ]

    @property
    def summary(self) -> str:
        """A line about what was learnt, and about what was saved."""
        before, tuned, small = self.models
        return (
            f"right answers: {before.share:.0%} before training, {tuned.share:.0%} after it, {small.share:.0%} in "
            f"4 bits, with experts of {show_bytes(small.expert_bytes or 0)} instead of "
            f"{show_bytes(tuned.expert_bytes or 0)}; by chance {chance():.0%}"
        )


def chance() -> float:
    """The share of answers that are right by chance."""
    return float(np.mean(list(CHANCE.values())))


COLUMNS = ("model", "parameters", "bytes", "experts", "right", "tokens/s")


def cells(model: SeeingModel) -> tuple[str, ...]:
    """The cells of a model under `COLUMNS`."""
    experts = "" if model.expert_bytes is None else show_bytes(model.expert_bytes)
    speed = f"{model.tokens_per_second:,.0f}"
    return (model.name, f"{model.params:,}", show_bytes(model.nbytes), experts, f"{model.share:.0%}", speed)


_BY_CHANCE = ("by chance", "", "", "", f"{chance():.0%}", "")


def finish(console: rich.console.Console, folder: Path, page: VisionPage, **about: Any) -> None:
    """Ends a demo: writes its results, with what they are `about`, and its page, and prints that, too."""
    made = about | {
        "title": page.title,
        "version": moe_jax.__version__,
        "seconds": page.seconds,
        "models": [dataclasses.asdict(model) for model in page.models],
    }
    (folder / RESULTS).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    write_page(folder / "page.html", page)
    print_page(console, page)
    print_places(console, folder, page.seconds)


def print_page(console: rich.console.Console, page: VisionPage) -> None:
    """Prints answers, table and times."""
    console.rule("what each model says about pictures that it has never seen")
    named = zip(page.questions, page.answers, strict=True)
    print_answers(console, [answer._replace(question=f"{one.question}  {one.picture}") for one, answer in named])
    console.print(console_table(COLUMNS, [*map(cells, page.models), _BY_CHANCE]))
    console.print(page.summary, highlight=False)
    console.print(times_of(page.seconds), highlight=False)


_CAPTION = "Bytes of the whole model and of its experts, and the share of right answers"


def write_page(file: Path, page: VisionPage) -> None:
    """Writes the page as one HTML file, pictures included."""
    before, tuned, small = page.models
    shown = facts(
        {
            "right answers": f"{before.share:.0%} → {tuned.share:.0%} → {small.share:.0%}",
            "bytes of the experts": f"{show_bytes(tuned.expert_bytes or 0)} → {show_bytes(small.expert_bytes or 0)}",
            "bytes of the model": f"{show_bytes(tuned.nbytes)} → {show_bytes(small.nbytes)}",
        }
    )
    asked = [
        section(
            one.question,
            photograph(one.picture.read_bytes(), f"picture for: {one.question}", f"right is: {one.answer}"),
            answers(answer.by_model),
            level=3,
        )
        for one, answer in zip(page.questions, page.answers, strict=True)
    ]
    curves = [picture_of_loss(one, f"Training loss of {name}", unit="token") for name, one in page.stages.items()]
    shares = "; ".join(f"{model.name}: {model.share:.0%}" for model in page.models)
    kinds = picture(lambda drawn: plot_kinds(drawn, page.models), shares, "Right answers by kinds; a line is chance")
    compared = table(_CAPTION, COLUMNS, [*map(cells, page.models), _BY_CHANCE])
    by_kind = [
        (model.name, *(f"{model.right[kind][0]} of {model.right[kind][1]}" for kind in CHANCE)) for model in page.models
    ]
    by_chance = ("by chance", *(f"{share:.0%}" for share in CHANCE.values()))
    count = sum(count for _, count in before.right.values())
    made = html_page(
        page.title,
        shown,
        section("Questions about pictures that no model has seen", side_by_side(*asked)),
        section(
            "Models",
            compared,
            note(
                f"Asked about {count} pictures that no model has seen; a token is read or written, or a feature. The "
                "last model was exported in the format of LLaVA and loaded again; its bytes are those before that, for "
                "the format has whole experts only."
            ),
            table("Right answers by kinds of questions", ("model", *CHANCE), [*by_kind, by_chance]),
            side_by_side(kinds, *curves),
        ),
        section_of_times(page.seconds),
        subtitle=f"{page.summary}.",
    )
    file.write_text(made, encoding="utf-8")


def plot_kinds(file: DrawnTo, models: Sequence[SeeingModel]) -> None:
    """Draws the share of right answers, in groups by kinds of questions, a bar for each model, and chance as a line."""
    figure = new_figure(6.4, 3.3)
    axes = figure.add_subplot()
    width = 0.8 / len(models)
    for number, model in enumerate(models):
        shares = [100 * right / count for right, count in (model.right[kind] for kind in CHANCE)]
        axes.bar(np.arange(len(CHANCE)) - 0.4 + (number + 0.5) * width, shares, width, label=model.name)
    for place, share in enumerate(CHANCE.values()):
        axes.plot([place - 0.45, place + 0.45], [100 * share] * 2, color=ink(), linewidth=1, linestyle="--")
    axes.set(ylabel="right answers, %", ylim=(0, 105), xticks=range(len(CHANCE)), xticklabels=list(CHANCE))
    axes.tick_params(length=0)
    axes.legend(fontsize=8, framealpha=0.8, ncols=2)
    figure.savefig(file, dpi=130)
