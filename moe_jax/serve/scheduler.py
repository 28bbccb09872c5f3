"""One thread that answers all requests together: continuous batching.

A request waits until a slot is free, its prompt is read alone, and from then on it gets tokens with all others that
have a slot, in blocks of a tenth of a second, and of less while somebody reads along. It leaves its slot when it has
ended or nobody wants it any more. There are as many rows as the next power of two has: rows move together when others
end, and one request alone costs no more than it does in `generate`.

Prompts of every length have a program of their own, and so have those that are scored, and rows of every number in
caches of every length, which takes seconds to compile. That is done beside, in other threads, while all others go on:
the first prompt of its kind is read there, and rows stay as they are until the program for more, fewer or longer ones
is there. Only where nobody is answered is a program compiled in between.

A program that fails, or that cannot be compiled, ends the requests that need it, and no others: such as a long text
for whose caches there is no memory. What fails while it runs takes all rows with it.
"""

import collections
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import jax
import numpy as np

from moe_jax.core.errors import InputError, first_line
from moe_jax.generation.continued_rows import Rows, ask
from moe_jax.generation.engine import SECONDS_SEEN, Block, Engine
from moe_jax.generation.eye import Eye, room_for
from moe_jax.generation.sizes import Size, shapes_of
from moe_jax.nn import Decoder
from moe_jax.serve.beside import Beside
from moe_jax.serve.jobs import Job, News, Read, Scored, scored_of

_LEAST_PROMPT = 32
# Caches grow by doubling: every length is a program of its own to compile.
_LEAST_CACHE = 256
_STOPPED = "the server is shutting down"


class Full(Exception):
    """There is no place left to wait."""


class Closed(Exception):
    """The scheduler takes no more requests."""


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
      on_compile: called when the program for so many rows in caches of such a length has to be compiled.
      seconds_a_block: that a block of tokens takes, if nobody reads along.

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
        self._eye = None if config.vision is None else Eye(decoder)
        self._most_slots = slots
        self._waiting: collections.deque[Job] = collections.deque()
        # The request of every row; None: the row is free.
        self._jobs: list[Job | None] = []
        self._rows: Rows | None = None
        self._size = Size(0, 0)
        # Requests whose prompts are read beside, and have been; they wait as the others do.
        self._apart: list[Job] = []
        self._beside = Beside(self._stir)
        # Programs for rows of a size. What moves rows there is compiled with them, for the size before and for the row
        # that comes; for others it takes less than a second, in between.
        self._compiling = Beside(self._stir)
        self._told, self._ran = set[Size](), set[Size]()
        self._closing = self._stirred = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="moe-jax-scheduler", daemon=True)
        self._thread.start()

    @property
    def looked(self) -> int:
        """Number of pictures that the image encoder looked at; one whose features are kept is not looked at again."""
        return 0 if self._eye is None else self._eye.looked

    def load(self) -> dict[str, int]:
        """Returns the numbers of requests that are answered and that wait."""
        with self._changed:
            self._forget_cancelled()
            running = len(self._running())
            return {"running": running, "waiting": len(self._all()) - running}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes requests, all or none; raises `Full` or `Closed`. What waits has a slot soon: free slots count."""
        with self._changed:
            if self._closing or self.failure is not None:
                raise Closed(self.failure or _STOPPED)
            self._forget_cancelled()
            if len(self._all()) + len(jobs) > self.most:
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
        self.submit([self._short_job(told.put)])
        while (news := told.get()).ended is None:
            pass
        if news.ended == "error":
            raise InputError(f"the model cannot be served: {news.problem}")

    def stop(self) -> None:
        """Takes no more requests; those that have not ended end with an error now, whatever is being compiled."""
        with self._changed:
            self._closing = True
            jobs = self._all()
        for job in jobs:
            job.fail(_STOPPED)
        self._stir()

    def close(self, seconds: float | None = None) -> bool:
        """Stops, and ends the threads.

        Returns whether they have ended within so many seconds each: a compiler is not interrupted. None: waits for it.
        """
        self.stop()
        self._thread.join(seconds)
        ended = [beside.close(seconds) for beside in (self._beside, self._compiling)]
        return all(ended) and not self._thread.is_alive()

    def _stir(self) -> None:
        """Has the thread look again at who waits."""
        with self._changed:
            self._stirred = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                try:
                    self._go_on()
                except Exception as error:  # such as memory that is not found
                    self._give_up_rows(error)
            self._end_all(_STOPPED)
        except BaseException as error:  # whatever it is, those who wait have to be told
            with self._changed:
                self.failure = _said(error)
            self._end_all(self.failure)
            raise

    def _go_on(self) -> None:
        """Gives slots to who waits, and a block of tokens to everyone who has one."""
        self._set_jobs([None if job is None or job.cancelled else job for job in self._jobs])
        while self._has_a_slot() and (found := self._next()) is not None:
            try:
                self._admit(*found)
            except BaseException as error:
                found[0].fail(_said(error))
                raise
            finally:
                self._taken(found[0])
        if not self._running():
            self._forget_rows()  # caches of a long text are given back
            self._compiling.forget_errors()
        elif self._continue():
            self._stir()  # perhaps there is a slot now

    def _give_up_rows(self, error: Exception) -> None:
        """Ends all requests that have a slot, for their caches may be gone.

        Raises the error of a short request that is tried then: if that fails too, no other will succeed.
        """
        jobs = self._running()
        self._forget_rows()
        for job in jobs:
            job.fail(_said(error))
        told: list[News] = []
        self._admit(self._short_job(told.append), self._size_for(1, _LEAST_PROMPT))
        if self._running():
            self._continue()
        self._forget_rows()
        if told[-1].ended == "error":
            raise error
        self._stir()

    def _forget_rows(self) -> None:
        self._rows, self._size = None, Size(0, 0)
        self._set_jobs([])

    def _short_job(self, on_news: Callable[[News], object]) -> Job:
        return Job([0], min(3, self.context - 1), on_news)

    def _wait(self) -> bool:
        """Waits for something to do; False: the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._stirred)
            self._stirred = False
            return not self._closing

    def _end_all(self, problem: str) -> None:
        with self._changed:
            jobs = self._all()
            self._jobs, self._apart = [], []
            self._waiting.clear()
        for job in jobs:
            job.fail(problem)

    def _all(self) -> list[Job]:
        return list(dict.fromkeys([*self._running(), *self._apart, *self._waiting]))

    def _has_a_slot(self) -> bool:
        return not self._closing and len(self._running()) < self._most_slots

    def _running(self) -> list[Job]:
        return [job for job in self._jobs if job is not None]

    def _set_jobs(self, jobs: list[Job | None]) -> None:
        with self._changed:
            self._jobs = jobs

    def _next(self) -> tuple[Job, Size] | None:
        """Returns the first request whose prompt was read, or can be now, and which there can be a row for.

        It comes with the size of the rows then. It waits until it has its row: if that fails, it has to be told.
        Programs for others are compiled beside.
        """
        with self._changed:
            self._forget_cancelled()
            apart, waiting = list(self._apart), list(self._waiting)
        for job in (*(job for job in apart if job.read is not None), *waiting):
            if job.read is None and not self._beside.has(program := self._reading(job)):
                with self._changed:
                    self._apart = [*self._apart, self._taken(job)]
                self._beside.begin(program, partial(self._read_beside, job))
            elif job.read is not None or self._beside.is_done(program):
                try:
                    size = self._size_with(job)
                except Exception as error:  # its program cannot be compiled
                    self._taken(job).fail(_said(error))
                    continue
                if size is not None:
                    return job, size
        return None

    def _taken(self, job: Job) -> Job:
        """Takes a request from those that wait, if it is still there."""
        with self._changed:
            self._waiting = collections.deque(one for one in self._waiting if one is not job)
            self._apart = [one for one in self._apart if one is not job]
        return job

    def _reading(self, job: Job) -> tuple[str, int, bool, int]:
        """The program that reads the prompt of a request."""
        return "read", self._length(job), job.scores_prompt, room_for(len(job.pictures))

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
                [job.ids],
                asked,
                least=_LEAST_PROMPT,
                scores_prompt=job.scores_prompt,
                pictures=self._eye and self._eye.see(job.pictures, job.slots),
            )
            return Read(row, block, None if scores is None else scored_of(scores, 0, len(job.ids) - 1))
        except Exception as error:  # such as memory that a long prompt does not find
            job.fail(_said(error))
            return None

    def _admit(self, job: Job, size: Size) -> None:
        """Gives a request a slot, unless it ends with its first token, in rows of a size."""
        read, job.read = job.read or self._read(job), None
        if read is None or self._tell(job, read.block, 0, read.prompt_scores):
            return
        if self._rows is None:
            self._rows, self._size = read.row, Size(1, self._length(job))
            self._set_jobs([job])
            self._move(size)
        else:
            self._move(size)
            slot = self._jobs.index(None)
            self._rows = self._engine.mover.put(self._rows, read.row, slot)
            self._set_jobs([*self._jobs[:slot], job, *self._jobs[slot + 1 :]])

    def _continue(self) -> bool:
        """Gives everyone who has a slot a block of tokens; returns whether there was room for any.

        A row whose cache is full waits for the program of a longer one.
        """
        is_seen = any(job.streams for job in self._running())
        steps = self._engine.steps_in(min(self.seconds_a_block, SECONDS_SEEN) if is_seen else self.seconds_a_block)
        self._resize(steps)
        room = [0 if job is None else self._size.length - len(job.ids) - job.added for job in self._jobs]
        goes_on = np.array([job is not None and left > 0 for job, left in zip(self._jobs, room, strict=True)])
        if not goes_on.any():
            return False
        assert self._rows is not None
        self._tell_size(self._size)
        self._ran.add(self._size)
        # Who waits is given the first slot that is left.
        least = int(goes_on.sum()) if self._waiting or self._apart else 1
        # The first row to fill its cache ends the block.
        steps = min(steps, *(left for left in room if left > 0))
        self._rows, block = self._engine.advance(self._rows, steps, stay=goes_on, least=least)
        jobs = list(self._jobs)
        for at in np.flatnonzero(goes_on):
            job = jobs[at]
            assert job is not None
            jobs[at] = None if self._tell(job, block, int(at), None) else job
        self._set_jobs(jobs)
        return True

    def _resize(self, steps: int) -> None:
        """Makes as many rows as there are requests, in caches with room for so many tokens more, if it can be done now.

        Programs for longer caches are compiled before they are needed.
        """
        jobs, present = self._running(), self._size
        wanted = self._size_for(len(jobs), max(len(job.ids) + min(job.added + steps, job.most) for job in jobs))
        if wanted.length == present.length and self._is_filling():
            self._is_ready(self._size_for(len(jobs), present.length + 1))
        if self._is_ready(wanted):
            self._move(wanted)
        elif wanted.length > present.length:
            if (larger := self._larger(wanted)) is not None:
                self._move(larger)
            elif (error := self._compiling.error(wanted)) is not None:
                self._end_full(error)

    def _end_full(self, error: BaseException) -> None:
        """Ends the requests whose caches are full, and for which there are no longer ones."""
        full = [job for job in self._running() if len(job.ids) + job.added >= self._size.length]
        self._set_jobs([None if job in full else job for job in self._jobs])
        for job in full:
            job.fail(_said(error))
        self._stir()

    def _is_filling(self) -> bool:
        """Whether a row whose cache may become too short has used up a quarter of it."""
        length = self._size.length
        return any(len(job.ids) + job.most > length < 4 * (len(job.ids) + job.added) for job in self._running())

    def _size_for(self, count: int, length: int) -> Size:
        """Returns the size for so many requests, in caches, not shorter than now, with room for so many tokens."""
        longer = self._size.length if self._rows is not None else _LEAST_CACHE
        while longer < length:
            longer *= 2
        longest = self._engine.room(self.context, least=_LEAST_PROMPT)
        return Size(min(1 << (count - 1).bit_length(), self._most_slots), min(longer, longest))

    def _size_with(self, job: Job) -> Size | None:
        """Returns the size of the rows with one request more; None: what it takes is being compiled.

        Raises what the compiler raised if no such program can be had.
        """
        running, length = len(self._running()), self._length(job)
        coming = max(running + 1, min(running + len(self._waiting) + len(self._apart), self._most_slots))
        wanted = self._size_for(coming, length)
        if self._is_ready(wanted, begins=False):
            return wanted
        if running < self._size.width and length <= self._size.length:
            return self._size
        if self._is_filling():  # one program for both
            wanted = self._size_for(coming, max(length, self._size.length + 1))
        least = self._size_for(running + 1, length)
        errors = []
        for size in dict.fromkeys((wanted, least)):
            if self._is_ready(size, length):
                return size
            if (error := self._compiling.error(size)) is None:
                return self._larger(least)
            errors.append(error)
        larger = self._larger(least)
        if larger is None:
            raise errors[-1]
        return larger

    def _larger(self, size: Size) -> Size | None:
        """Returns the smallest size whose programs are there and in which there is room for rows of a size."""
        fits = (one for one in self._told if one.width >= size.width and one.length >= size.length)
        return min((one for one in fits if self._is_ready(one, begins=False)), default=None)

    def _is_ready(self, size: Size, row_length: int | None = None, *, begins: bool = True) -> bool:
        """Whether the rows can be moved to a size, and a row be put there, and go on, with nobody waiting for programs.

        If not, this is begun to be compiled beside, unless something else is: then it is asked again who needs what.
        """
        if size in (self._size, *self._ran) or not self._running() or not self._engine.compiles_ahead:
            return True
        if begins and not self._compiling.has(size) and self._compiling.is_idle:
            assert self._rows is not None
            self._tell_size(size)
            self._compiling.begin(size, partial(self._engine.compile, shapes_of(self._rows), size, row_length))
        return self._compiling.is_done(size)

    def _tell_size(self, size: Size) -> None:
        if size not in self._told:
            self._told.add(size)
            self.on_compile(*size)

    def _move(self, size: Size) -> None:
        """Moves the rows of requests to the first slots of rows of a size."""
        if size == self._size:
            return
        assert self._rows is not None
        kept = [at for at, job in enumerate(self._jobs) if job is not None]
        moved, free = [self._jobs[at] for at in kept], size.width - len(kept)
        self._rows, self._size = self._engine.mover.move(self._rows, [*kept, *[-1] * free], size), size
        self._set_jobs([*moved, *[None] * free])

    def _tell(self, job: Job, block: Block, row: int, prompt_scores: list[Scored] | None) -> bool:
        """Tells a request what it was given; returns whether it has ended."""
        given = [int(token) for token in block.tokens[:, row] if token >= 0]
        job.added += len(given)
        if not block.finite[row]:
            job.fail("the logits of the model are not finite; see moe-jax inspect --weights")
            return True
        scored = scored_of(block.scores, row, len(given)) if job.scores and block.scores is not None else []
        ended = None
        if given and given[-1] in job.stop_ids:
            ended = "stop"
        elif job.added >= job.most:
            ended = "length"
        job.on_news(News(given, scored, prompt_scores, ended))
        return ended is not None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
