"""Questions to the models of a demo, and what each says."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moe_jax.demo.shell import Shell


class Answers(NamedTuple):
    """A question, and what each model said, by the name of the model."""

    question: str
    by_model: dict[str, str]


def ask(shell: Shell, model: Path, questions: Sequence[str], *options: object) -> list[str]:
    """Returns what a model says to every question, asked in one batch with `options` of `moe-jax generate`."""
    prompts = [word for question in questions for word in ("--prompt", question)]
    answers = shell.json("generate", model, *prompts, *options, "--json", shows=False)
    return [answer["text"].strip() or "(nothing)" for answer in answers]


def by_question(questions: Sequence[str], said: Mapping[str, Sequence[str]]) -> list[Answers]:
    """Returns what models, by their names, `said` to all questions, question by question."""
    return [
        Answers(question, {name: answers[number] for name, answers in said.items()})
        for number, question in enumerate(questions)
    ]
