"""Questions to the models of a demo, and what each says."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.demo.folder import Steps
from moe_jax.demo.shell import Shell


class Answers(NamedTuple):
    """A question, and what each model said, by the name of the model."""

    question: str
    by_model: dict[str, str]


def ask(shell: Shell, done: Steps, name: str, model: Path, questions: Sequence[str], *options: object) -> list[str]:
    """Returns what a model says to every question, asked in one batch with `options` of `moe-jax generate`.

    The answers are kept under the `name` of the model, so that a demo that goes on need not ask it again.
    """

    def asked() -> list[str]:
        prompts = [word for question in questions for word in ("--prompt", question)]
        answers = shell.json("generate", model, *prompts, *options, "--json", shows=False)
        return [answer["text"].strip() or "(nothing)" for answer in answers]

    def are_answers(kept: Any) -> bool:
        return isinstance(kept, list) and len(kept) == len(questions) and all(isinstance(text, str) for text in kept)

    return done.kept(f"answers of {name}", asked, are_answers)


def by_question(questions: Sequence[str], said: Mapping[str, Sequence[str]]) -> list[Answers]:
    """Returns what models, by their names, `said` to all questions, question by question."""
    return [
        Answers(question, {name: answers[number] for name, answers in said.items()})
        for number, question in enumerate(questions)
    ]
