"""Requests as the scheduler has them, and the news that they get."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from moe_jax.generation.continued_rows import Rows
from moe_jax.generation.engine import Block, Scores
from moe_jax.generation.eye import SeenPicture


class Scored(NamedTuple):
    """Log-probabilities where a token stands: of it, and of the most likely ones by id, the most likely one first."""

    chosen: float
    top: dict[int, float]


class News(NamedTuple):
    """Tokens that a request was given since the last news of it, and whether it has ended.

    Attributes:
      tokens: the last is the one that ended it if it ended with `stop`.
      scores: of these tokens; empty if nobody asked.
      prompt_scores: of the prompt's tokens from the second on, with the first news; None if nobody asked.
      ended: why there will be no more news; None: there will be. `problem` says what went wrong with an `error`.
    """

    tokens: list[int]
    scores: list[Scored]
    prompt_scores: list[Scored] | None = None
    ended: Literal["stop", "length", "error"] | None = None
    problem: str = ""

    def one_by_one(self) -> Iterator["News"]:
        """Yields the same news, of one token each."""
        last = len(self.tokens) - 1
        if last < 1:
            yield self
            return
        for at, token in enumerate(self.tokens):
            prompt_scores, ended = self.prompt_scores if at == 0 else None, self.ended if at == last else None
            yield News([token], self.scores[at : at + 1], prompt_scores, ended)


class Read(NamedTuple):
    """A prompt that was read: the row that continues it, its first token, and the prompt's scores if it is scored."""

    row: Rows
    block: Block
    prompt_scores: list[Scored] | None


@dataclasses.dataclass(eq=False)
class Job:
    """A request.

    Attributes:
      ids: tokens of the prompt.
      pictures, slots: in the prompt, and for every token of it which of their features takes its place, counted from 1.
      most: tokens to add at most; 0: the prompt is only scored.
      on_news: called by the scheduler's threads, and by the one that stops it; what comes after the end is no news.
      stop_ids: tokens that end it, at most `continued_rows.MOST_STOP_IDS`.
      scores, scores_prompt: whether tokens that are added, and those of the prompt, are scored.
      streams: whether somebody reads along.
      cancelled: set by anyone when nobody wants it any more.
      added: how many tokens it was given.
      read: its prompt, if that was read before there was a slot.
    """

    ids: Sequence[int]
    most: int
    on_news: Callable[[News], object]
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: Sequence[int] = ()
    scores: bool = False
    scores_prompt: bool = False
    streams: bool = False
    pictures: Sequence[SeenPicture] = ()
    slots: Sequence[int] = ()
    cancelled: bool = False
    added: int = 0
    read: Read | None = None

    def fail(self, problem: str) -> None:
        """Tells that the request has ended with an error."""
        self.on_news(News([], [], ended="error", problem=problem))


def scored_of(scores: Scores, row: int, count: int) -> list[Scored]:
    """Returns the scores of a row, of its first `count` tokens."""
    chosen, top, top_ids = (np.asarray(leaf)[:count, row] for leaf in scores)
    return [
        Scored(float(one), dict(zip(ids.tolist(), values.tolist(), strict=True)))
        for one, values, ids in zip(chosen, top, top_ids, strict=True)
    ]
