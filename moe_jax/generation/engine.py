"""One thread that answers all requests together: continuous batching.

A request waits until a seat is free, its prompt is read alone, and from then on it gets tokens with all others that
have a seat, in blocks of a tenth of a second. It leaves its seat when it has ended or nobody wants it any more.
"""

import collections
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.core.errors import InputError, first_line
from moe_jax.functional.buckets import bucket
from moe_jax.generation.rows import (
    MOST_STEPS,
    Asked,
    Doing,
    Rows,
    Scores,
    continue_all,
    empty_rows,
    leave,
    read_prompt,
    seat,
    with_slots,
)
from moe_jax.nn import Decoder, unstacked

MOST_STOP_IDS = 16
"""Tokens that may end a row."""
_SECONDS_A_BLOCK = 0.1
_LEAST_PROMPT = 32
# Caches grow by doubling: every size is a program of its own to compile.
_LEAST_SLOTS = 256


class Full(Exception):
    """There is no place left to wait."""


class Closed(Exception):
    """The engine takes no more requests."""


class Scored(NamedTuple):
    """Log-probabilities where a token stands.

    Attributes:
      chosen: of the token.
      top: of the most likely tokens, by id, the most likely one first.
    """

    chosen: float
    top: dict[int, float]


class News(NamedTuple):
    """What became of a request since the last news of it.

    Attributes:
      tokens: that it was given; the last is the one that ended it if it ended with `stop`.
      scores: of these tokens; empty if nobody asked.
      prompt_scores: of the prompt's tokens from the second on, with the first news; None if nobody asked.
      ended: why there will be no more news; None: there will be.
      problem: what went wrong, if it ended with an `error`.
    """

    tokens: list[int]
    scores: list[Scored]
    prompt_scores: list[Scored] | None = None
    ended: Literal["stop", "length", "error"] | None = None
    problem: str = ""


@dataclasses.dataclass(eq=False)
class Job:
    """A request.

    Attributes:
      ids: tokens of the prompt.
      most: tokens to add at most; 0: the prompt is only scored.
      on_news: called by the engine's thread.
      temperature, top_p, seed: see `functional.heads.sampling.sample_rows`.
      stop_ids: tokens that end it.
      scores, scores_prompt: whether tokens that are added, and those of the prompt, are scored.
      cancelled: set by anyone when nobody wants it any more.
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
    cancelled: bool = False
    added: int = 0

    def asked(self) -> Asked:
        """The request as a row's data."""
        stop_ids = np.full((1, MOST_STOP_IDS), -1, np.int32)
        stop_ids[0, : len(self.stop_ids)] = self.stop_ids
        return Asked(
            seeds=jnp.asarray([self.seed], jnp.uint32),
            temperature=jnp.asarray([self.temperature], jnp.float32),
            top_p=jnp.asarray([self.top_p], jnp.float32),
            stop_ids=jnp.asarray(stop_ids),
            most=jnp.asarray([self.most], jnp.int32),
        )


class Engine:
    """Answers requests with one model.

    Attributes:
      context: tokens of a prompt and what is added to it, at most.
    """

    def __init__(self, decoder: Decoder, *, seats: int = 8, waiting: int = 64, context: int | None = None):
        """Starts the thread.

        Args:
          decoder: the model; its layers are copied unless they are unstacked.
          seats: requests that are answered at the same time.
          waiting: requests that may wait for a seat.
          context: see the class; by default what the model was trained for.

        Raises:
          InputError: for a model that does not continue texts, or sizes that are not positive.
        """
        config = decoder.config
        config.check_scores_tokens("serving")
        config.check_no_encoder("serving")
        context = config.max_positions if context is None else context
        for name, value, least in (("seats", seats, 1), ("waiting", waiting, 1), ("context", context, 2)):
            if value < least:
                raise InputError(f"{name}={value} must be at least {least}")
        if config.bounded_positions and context > config.max_positions:
            raise InputError(f"context={context}, but the model has {config.max_positions} positions")
        self.context = context
        self._config, self._dtype = config, decoder.compute_dtype
        self._parts = nnx.split(unstacked(decoder))
        self._most_waiting = waiting
        self._waiting: collections.deque[Job] = collections.deque()
        self._seats: list[Job | None] = [None] * seats
        self._rows: Rows | None = None
        self._slots = 0
        self._steps = 1
        self._closing = False
        self._failure: str | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="moe-jax-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """What ended the thread, if it was not `close`."""
        return self._failure

    def load(self) -> dict[str, int]:
        """Requests that are answered, and that wait."""
        with self._changed:
            return {"running": sum(job is not None for job in self._seats), "waiting": len(self._waiting)}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes requests, all or none.

        Raises:
          Full: if they are more than may wait. What waits has a seat soon, so seats that are free count.
          Closed: if the engine has ended.
        """
        with self._changed:
            if self._closing or self._failure is not None:
                raise Closed(self._failure or "the server is shutting down")
            free = sum(job is None for job in self._seats)
            if len(self._waiting) + len(jobs) > self._most_waiting + free:
                raise Full
            self._waiting.extend(jobs)
            self._changed.notify()

    def warm(self) -> None:
        """Compiles what short requests need, so that the first of them need not wait for it.

        Raises:
          InputError: if the model fails.
        """
        for temperature, together in itertools.product((0.0, 1.0), (1, min(2, len(self._seats)))):
            told: queue.SimpleQueue[News] = queue.SimpleQueue()
            most = min(3, self.context - 1)
            self.submit([Job([0], most, told.put, temperature=temperature) for _ in range(together)])
            for _ in range(together):
                while (news := told.get()).ended is None:
                    pass
                if news.ended == "error":
                    raise InputError(f"the model cannot be served: {news.problem}")

    def close(self) -> None:
        """Ends the thread; requests that have not ended end with an error."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait():
                self._free_cancelled()
                for at in self._free_seats():
                    job = self._next()
                    if job is None:
                        break
                    self._admit(job, at)
                if any(self._seats):
                    self._continue()
                else:
                    self._rows, self._slots = None, 0  # caches of a long text are given back
            self._end_all("the server is shutting down")
        except BaseException as error:  # whatever it is, those who wait have to be told
            with self._changed:
                self._failure = f"{type(error).__name__}: {first_line(error)}"
            self._end_all(self._failure)
            raise

    def _wait(self) -> bool:
        """Waits for something to do; False: the engine is to end."""
        with self._changed:
            while not (self._closing or self._waiting or any(self._seats)):
                self._changed.wait()
            return not self._closing

    def _end_all(self, problem: str) -> None:
        with self._changed:
            jobs = [job for job in self._seats if job is not None] + list(self._waiting)
            self._seats = [None] * len(self._seats)
            self._waiting.clear()
        for job in jobs:
            job.on_news(News([], [], ended="error", problem=problem))

    def _free_seats(self) -> list[int]:
        return [at for at, job in enumerate(self._seats) if job is None]

    def _next(self) -> Job | None:
        with self._changed:
            while self._waiting:
                job = self._waiting.popleft()
                if not job.cancelled:
                    return job
        return None

    def _free_cancelled(self) -> None:
        if not any(job is not None and job.cancelled for job in self._seats):
            return
        with self._changed:
            self._seats = [None if job is None or job.cancelled else job for job in self._seats]
        if self._rows is not None:
            self._rows = leave(self._rows, np.array([job is not None for job in self._seats]))

    def _admit(self, job: Job, at: int) -> None:
        """Reads the prompt of a request, and seats it unless it has ended then."""
        size = self._prompt_bucket(len(job.ids))
        prompt = np.zeros((1, size), np.int32)
        prompt[0, : len(job.ids)] = job.ids
        try:
            row, scores, prompt_scores = read_prompt(
                *self._parts,
                jnp.asarray(prompt),
                jnp.asarray([len(job.ids)], jnp.int32),
                job.asked(),
                doing=_doing([job]),
                scores_prompt=job.scores_prompt,
            )
            tokens = np.asarray(row.tokens if job.most else np.full(1, -1))[None]
            finite = np.asarray(row.finite)
        except Exception as error:  # such as memory that a long prompt does not find
            job.on_news(News([], [], ended="error", problem=f"{type(error).__name__}: {first_line(error)}"))
            return
        before = None
        if prompt_scores is not None:
            before = _scored(prompt_scores, 0)[: len(job.ids) - 1]
        if self._tell(job, tokens, finite, 0, scores, before):
            return
        self._make_room(max(size, len(job.ids) + 1))
        assert self._rows is not None
        self._rows = seat(self._rows, row, jnp.int32(at))
        with self._changed:
            self._seats[at] = job

    def _continue(self) -> None:
        """Gives everyone who has a seat a block of tokens."""
        jobs = [job for job in self._seats if job is not None]
        self._make_room(max(len(job.ids) + min(job.added + self._steps, job.most) for job in jobs))
        assert self._rows is not None
        start = time.perf_counter()
        first = 1 if self._seats[0] in jobs and len(jobs) == 1 else len(self._seats)
        steps, doing = jnp.int32(self._steps), _doing(jobs)
        rows, block, scores = continue_all(*self._parts, self._rows, steps, doing=doing, first=first)
        self._rows, tokens, finite = rows, np.asarray(block), np.asarray(rows.finite)
        made = int((tokens >= 0).any(axis=1).sum())
        pace = (time.perf_counter() - start) / max(made, 1)
        self._steps = max(1, min(MOST_STEPS, int(_SECONDS_A_BLOCK / pace)))
        ended = [
            job is not None and self._tell(job, tokens, finite, at, scores, None) for at, job in enumerate(self._seats)
        ]
        with self._changed:
            self._seats = [None if over else job for over, job in zip(ended, self._seats, strict=True)]

    def _tell(
        self,
        job: Job,
        tokens: np.ndarray,
        finite: np.ndarray,
        at: int,
        scores: Scores | None,
        prompt_scores: list[Scored] | None,
    ) -> bool:
        """Tells a request what it was given; returns whether it has ended."""
        given = [int(token) for token in tokens[:, at] if token >= 0]
        job.added += len(given)
        if not finite[at]:
            problem = "the logits of the model are not finite; see moe-jax inspect --weights"
            job.on_news(News([], [], ended="error", problem=problem))
            return True
        scored = _scored(scores, at)[: len(given)] if scores is not None and job.scores else []
        ended = None
        if given and given[-1] in job.stop_ids:
            ended = "stop"
        elif job.added >= job.most:
            ended = "length"
        job.on_news(News(given, scored, prompt_scores, ended))
        return ended is not None

    def _make_room(self, length: int) -> None:
        """Caches in which a row of `length` tokens has room."""
        if self._rows is not None and length <= self._slots:
            return
        self._slots = _LEAST_SLOTS
        while self._slots < length:
            self._slots *= 2
        self._slots = min(self._slots, self._prompt_bucket(self.context))
        if self._rows is None:
            self._rows = empty_rows(self._config, len(self._seats), self._slots, MOST_STOP_IDS, self._dtype)
        else:
            self._rows = with_slots(self._rows, self._config, self._slots, self._dtype)

    def _prompt_bucket(self, length: int) -> int:
        size = bucket(length, least=_LEAST_PROMPT)
        return min(size, self._config.max_positions) if self._config.bounded_positions else size


def _doing(jobs: Sequence[Job]) -> Doing:
    drawing = [job for job in jobs if job.temperature > 0]
    return Doing(not drawing, any(job.top_p < 1 for job in drawing), any(job.scores for job in jobs))


def _scored(scores: Scores, at: int) -> list[Scored]:
    """The scores of a row, of every step."""
    chosen, top, top_ids = (np.asarray(leaf[:, at]) for leaf in scores)
    return [
        Scored(float(one), dict(zip(ids.tolist(), values.tolist(), strict=True)))
        for one, values, ids in zip(chosen, top, top_ids, strict=True)
    ]
