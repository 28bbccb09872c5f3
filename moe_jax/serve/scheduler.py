"""One thread that answers all requests together: continuous batching.

A request waits until a slot is free, its prompt is read alone, and from then on it gets tokens with all others that
have a slot, in blocks of a tenth of a second. It leaves its slot when it has ended or nobody wants it any more. There
are as many rows as the next power of two has: rows move together when others end, and one request alone costs no more
than it does in `generate`.

Prompts of every length have a program of their own, and so have those that are scored, which takes seconds to compile.
That is done beside: the first prompt of its kind is read in another thread, and all others go on.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Literal, NamedTuple

import jax
import numpy as np

from moe_jax.core.errors import InputError, first_line
from moe_jax.generation.engine import Block, Engine, Rows, Scores, ask, move_rows, put_row
from moe_jax.nn import Decoder
from moe_jax.serve.beside import Beside

_LEAST_PROMPT = 32
# Caches grow by doubling: every length is a program of its own to compile.
_LEAST_CACHE = 256


class Full(Exception):
    """There is no place left to wait."""


class Closed(Exception):
    """The scheduler takes no more requests."""


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
      most: tokens to add at most; 0: the prompt is only scored.
      on_news: called by the scheduler's thread.
      stop_ids: tokens that end it, at most `engine.MOST_STOP_IDS`.
      scores, scores_prompt: whether tokens that are added, and those of the prompt, are scored.
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
    cancelled: bool = False
    added: int = 0
    read: Read | None = None

    def fail(self, problem: str) -> None:
        """Tells that the request has ended with an error."""
        self.on_news(News([], [], ended="error", problem=problem))


class Scheduler:
    """Answers requests with one model, in a thread that it starts.

    Args:
      decoder: the model; its layers are copied unless they are unstacked.
      slots: requests that are answered at the same time.
      waiting: requests that may wait for a slot.
      context: see the attribute; by default what the model was trained for.

    Attributes:
      context: tokens of a prompt and what is added to it, at most.
      most: requests that are answered or wait at the same time, at most.
      failure: what ended the thread, if it was not `close`; None: nothing has.
      on_compile: called before the first block of so many rows in caches of such a length, whose program has to be
        compiled; all requests wait for it.
      seconds_a_block: in which those who read along are given tokens.

    Raises:
      InputError: for a model that does not continue texts, or sizes that are not positive.
    """

    def __init__(self, decoder: Decoder, *, slots: int = 8, waiting: int = 64, context: int | None = None):
        config = decoder.config
        config.check_scores_tokens("serving")
        config.check_no_encoder("serving")
        context = config.max_positions if context is None else context
        for name, value, least in (("seats", slots, 1), ("waiting", waiting, 1), ("context", context, 2)):
            if value < least:
                raise InputError(f"{name}={value} must be at least {least}")
        if config.bounded_positions and context > config.max_positions:
            raise InputError(f"context={context}, but the model has {config.max_positions} positions")
        self.context, self.most = context, slots + waiting
        self.failure: str | None = None
        self.on_compile: Callable[[int, int], object] = lambda width, length: None
        self.seconds_a_block = 0.1
        self._engine = Engine(decoder, draws=True, scores=True)
        self._most_slots, self._most_waiting = slots, waiting
        self._waiting: collections.deque[Job] = collections.deque()
        # The request of every row; None: the row is free.
        self._jobs: list[Job | None] = []
        self._rows: Rows | None = None
        self._cache_length = 0
        # Requests whose prompts are read beside, and have been; they wait as the others do.
        self._apart: list[Job] = []
        self._beside = Beside(self._stir)
        self._compiled = set[tuple[int, int]]()
        self._closing = self._stirred = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="moe-jax-scheduler", daemon=True)
        self._thread.start()

    def load(self) -> dict[str, int]:
        """Returns the numbers of requests that are answered and that wait."""
        with self._changed:
            self._forget_cancelled()
            return {"running": len(self._running()), "waiting": len(self._waiting) + len(self._apart)}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes requests, all or none; raises `Full` or `Closed`. What waits has a slot soon: free slots count."""
        with self._changed:
            if self._closing or self.failure is not None:
                raise Closed(self.failure or "the server is shutting down")
            self._forget_cancelled()
            free = self._most_slots - len(self._running())
            if len(self._waiting) + len(self._apart) + len(jobs) > self._most_waiting + free:
                raise Full
            self._waiting.extend(jobs)
        self._stir()

    def _forget_cancelled(self) -> None:
        """Frees the places of those that nobody waits for any more."""
        self._waiting = collections.deque(job for job in self._waiting if not job.cancelled)
        self._apart = [job for job in self._apart if not job.cancelled]

    def warm(self) -> None:
        """Compiles what a short request needs, so that the first need not wait; `InputError` if the model fails."""
        told: SimpleQueue[News] = SimpleQueue()
        self.submit([Job([0], min(3, self.context - 1), told.put)])
        while (news := told.get()).ended is None:
            pass
        if news.ended == "error":
            raise InputError(f"the model cannot be served: {news.problem}")

    def close(self) -> None:
        """Ends the thread; requests that have not ended end with an error."""
        with self._changed:
            self._closing = True
        self._stir()
        self._thread.join()
        self._beside.close()

    def _stir(self) -> None:
        """Has the thread look again at who waits."""
        with self._changed:
            self._stirred = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                self._set_jobs([None if job is None or job.cancelled else job for job in self._jobs])
                while len(self._running()) < self._most_slots and (job := self._next()) is not None:
                    self._admit(job)
                if self._running():
                    self._continue()
                    self._stir()  # perhaps there is a slot now
                else:
                    self._rows, self._cache_length = None, 0  # caches of a long text are given back
            self._end_all("the server is shutting down")
        except BaseException as error:  # whatever it is, those who wait have to be told
            with self._changed:
                self.failure = f"{type(error).__name__}: {first_line(error)}"
            self._end_all(self.failure)
            raise

    def _wait(self) -> bool:
        """Waits for something to do; False: the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._stirred or self._running())
            self._stirred = False
            return not self._closing

    def _end_all(self, problem: str) -> None:
        with self._changed:
            jobs = [*self._running(), *self._apart, *self._waiting]
            self._jobs, self._apart = [], []
            self._waiting.clear()
        for job in jobs:
            job.fail(problem)

    def _running(self) -> list[Job]:
        return [job for job in self._jobs if job is not None]

    def _set_jobs(self, jobs: list[Job | None]) -> None:
        with self._changed:
            self._jobs = jobs

    def _next(self) -> Job | None:
        """Takes the first request whose prompt was read, or can be now; programs for others are compiled beside."""
        with self._changed:
            self._forget_cancelled()
            apart, waiting = list(self._apart), list(self._waiting)
        for job in apart:
            if job.read is not None:
                return self._taken(job)
        for job in waiting:
            if not self._beside.has(program := self._reading(job)):
                with self._changed:
                    self._apart = [*self._apart, self._taken(job)]
                self._beside.begin(program, partial(self._read_beside, job))
            elif self._beside.is_done(program):
                return self._taken(job)
        return None

    def _taken(self, job: Job) -> Job:
        """Takes a request from those that wait, if it is still there."""
        with self._changed:
            self._waiting = collections.deque(one for one in self._waiting if one is not job)
            self._apart = [one for one in self._apart if one is not job]
        return job

    def _reading(self, job: Job) -> tuple[str, int, bool]:
        """The program that reads the prompt of a request."""
        return "read", self._length(job), job.scores_prompt

    def _length(self, job: Job) -> int:
        """Tokens that the prompt of a request is padded to."""
        return self._engine.room(len(job.ids), least=_LEAST_PROMPT)

    def _read_beside(self, job: Job) -> None:
        job.read = None if job.cancelled or self._closing else self._read(job)
        if job.read is None:  # so the program may not be there: the next request finds out
            self._beside.forget(self._reading(self._taken(job)))

    def _read(self, job: Job) -> Read | None:
        """Reads the prompt of a request; None: it has failed, and was told so."""
        try:
            asked = ask(
                1,
                job.most,
                key=jax.random.key(np.uint32(job.seed))[None],
                temperature=job.temperature,
                top_p=job.top_p,
                stop_ids=job.stop_ids,
                scores=job.scores,
            )
            row, block, scores = self._engine.read(
                [job.ids], asked, least=_LEAST_PROMPT, scores_prompt=job.scores_prompt
            )
            return Read(row, block, None if scores is None else _scored(scores, 0, len(job.ids) - 1))
        except Exception as error:  # such as memory that a long prompt does not find
            job.fail(f"{type(error).__name__}: {first_line(error)}")
            return None

    def _admit(self, job: Job) -> None:
        """Gives a request a slot, unless it ends with its first token."""
        read, job.read = job.read or self._read(job), None
        if read is None or self._tell(job, read.block, 0, read.prompt_scores):
            return
        length = self._length(job)
        coming = min(len(self._running()) + 1 + len(self._waiting) + len(self._apart), self._most_slots)
        if self._rows is None:
            self._rows, self._cache_length = read.row, 0
            self._set_jobs([job])
            self._arrange(coming, length)
        else:
            self._arrange(coming, length)
            slot = self._jobs.index(None)
            self._rows = put_row(self._rows, read.row, slot)
            self._set_jobs([*self._jobs[:slot], job, *self._jobs[slot + 1 :]])

    def _continue(self) -> None:
        """Gives everyone who has a slot a block of tokens."""
        jobs, steps = self._running(), self._engine.steps_in(self.seconds_a_block)
        self._arrange(len(jobs), max(len(job.ids) + min(job.added + steps, job.most) for job in jobs))
        assert self._rows is not None
        if (program := (len(self._jobs), self._cache_length)) not in self._compiled:
            self._compiled.add(program)
            self.on_compile(*program)
        stay = np.array([job is not None for job in self._jobs])
        # Who waits is given the first slot that is left.
        least = len(jobs) if self._waiting or self._apart else 1
        self._rows, block = self._engine.advance(self._rows, steps, stay=stay, least=least)
        self._set_jobs(
            [None if job is None or self._tell(job, block, at, None) else job for at, job in enumerate(self._jobs)]
        )

    def _arrange(self, count: int, length: int) -> None:
        """Makes as many rows as `count` requests need, in caches in which a row of `length` tokens has room."""
        width = min(1 << (count - 1).bit_length(), self._most_slots)
        longer = self._cache_length or _LEAST_CACHE
        while longer < length:
            longer *= 2
        longer = min(longer, self._engine.room(self.context, least=_LEAST_PROMPT))
        if (width, longer) == (len(self._jobs), self._cache_length):
            return
        assert self._rows is not None
        kept = [at for at, job in enumerate(self._jobs) if job is not None]
        moved = [self._jobs[at] for at in kept]
        self._rows = move_rows(self._rows, [*kept, *[-1] * (width - len(kept))], self._engine.config, longer)
        self._set_jobs([*moved, *[None] * (width - len(kept))])
        self._cache_length = longer

    def _tell(self, job: Job, block: Block, row: int, prompt_scores: list[Scored] | None) -> bool:
        """Tells a request what it was given; returns whether it has ended."""
        given = [int(token) for token in block.tokens[:, row] if token >= 0]
        job.added += len(given)
        if not block.finite[row]:
            job.fail("the logits of the model are not finite; see moe-jax inspect --weights")
            return True
        scored = _scored(block.scores, row, len(given)) if job.scores and block.scores is not None else []
        ended = None
        if given and given[-1] in job.stop_ids:
            ended = "stop"
        elif job.added >= job.most:
            ended = "length"
        job.on_news(News(given, scored, prompt_scores, ended))
        return ended is not None


def _scored(scores: Scores, row: int, count: int) -> list[Scored]:
    """The scores of a row, of its first `count` tokens."""
    chosen, top, top_ids = (np.asarray(leaf)[:count, row] for leaf in scores)
    return [
        Scored(float(one), dict(zip(ids.tolist(), values.tolist(), strict=True)))
        for one, values, ids in zip(chosen, top, top_ids, strict=True)
    ]
