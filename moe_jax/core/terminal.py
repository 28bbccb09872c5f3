"""Output on the terminal: consoles, and bars of progress."""

import collections
import contextlib
import contextvars
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from moe_jax.core.data_sheets import peak_memory_bytes
from moe_jax.core.formatting import show_bytes, show_duration

# The time left is estimated from the last steps: those that a resumed job skips take no time, and layers differ.
_STEPS = 6
_LEAST_SHARE = 0.01
"""Share of a task, or else a step, that is done before the time left is told."""
SECONDS_BETWEEN_LINES = 30.0
_WIDTH_OF_FILES = 200


Progress = Callable[[str, float, float], object]
"""Called as work proceeds: `progress("writing layers", 3, 32)` says that 3 of 32 are done."""


def no_progress(what: str, done: float, total: float) -> None:
    """A `Progress` that shows nothing."""


class Bars(Protocol):
    """A `Progress` that can show a note beside a bar."""

    def __call__(self, what: str, done: float, total: float, note: str = "", /) -> None: ...


def console_for_tables(*, stderr: bool = False, cuts_nothing: bool = False) -> Console:
    """A console for tables. In a file or a pipe its lines are longer than on a terminal, so that nothing is cut off.

    With `cuts_nothing`, nothing is cut off on a terminal either: one that is too narrow wraps lines itself.
    """
    console = Console(stderr=stderr, highlight=False)
    if cuts_nothing:
        return Console(stderr=stderr, highlight=False, width=max(_WIDTH_OF_FILES, console.width))
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_WIDTH_OF_FILES)


def table_of_figures(*columns: str, words: Collection[str] = ("",)) -> Table:
    """A table without lines: the first column and those of `words` are aligned on the left, figures on the right."""
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        justify = "left" if index == 0 or column in words else "right"
        table.add_column(column, justify=justify, vertical="bottom", no_wrap=True)
    return table


_SHOWN = contextvars.ContextVar("shown", default=False)


@contextlib.contextmanager
def shown_work() -> Iterator[None]:
    """Within, verbs show on standard error what they do, with bars of progress: as commands do, and Python does not."""
    token = _SHOWN.set(True)
    try:
        yield
    finally:
        _SHOWN.reset(token)


def shows_work() -> bool:
    """Whether verbs show what they do: see `shown_work`."""
    return _SHOWN.get()


class Pace:
    """Elapsed time of a task of `total` steps, of which some are done already, and an estimate of the time left."""

    def __init__(self, done: float, total: float, clock: Callable[[], float] = time.monotonic):
        self.done = self._begun = done
        self._total = total
        self._clock = clock
        self._start = self._last = clock()
        # The times at which whole steps were completed.
        self._seen = collections.deque([(self._start, done)], maxlen=_STEPS + 1)

    def update(self, done: float) -> None:
        """Notes how many steps are done; fractions of a step count too."""
        if done > self.done:
            self._last = self._clock()
            if int(done) > int(self.done):
                self._seen.append((self._last, done))
            self.done = done

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    @property
    def left(self) -> float | None:
        """Estimated seconds until all steps are done; None if too little has been done since the start to tell."""
        start, before = self._seen[0]
        # Much of the time of the first part of a step goes into compiling.
        if self.done == before or self.done - self._begun < min(1.0, _LEAST_SHARE * self._total):
            return None
        since = self._clock() - self._last
        return max(0.0, (self._total - self.done) * (self._last - start) / (self.done - before) - since)


@contextlib.contextmanager
def progress_bars(
    console: Console | None = None,
    *,
    in_bytes: bool = False,
    shown: bool = True,
    lines: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Bars]:
    """Yields a `Progress` that draws a bar for each task; if the console is no terminal, it prints a line now and then.

    The first call with a new `what` starts its bar; made before the first step, it counts the time of that step.
    A bar disappears when its task is done.

    Args:
      console: where to draw; default standard error.
      in_bytes: whether bytes are counted, which are shown with the speed, and not steps.
      shown: whether anything is drawn: of several processes one does that.
      lines: whether there are lines, one in `SECONDS_BETWEEN_LINES`, on what is no terminal.
      clock: in seconds.
    """
    console = console or Console(stderr=True)
    lines = lines and shown and not console.is_terminal
    last_line = clock()
    paces: dict[str, Pace] = {}

    class Done(ProgressColumn):
        def render(self, task: Task) -> Text:
            if not in_bytes:
                return Text(f"{task.completed:.0f}/{task.total:.0f}")
            elapsed = paces[task.description].elapsed
            speed = f", {show_bytes(round(task.completed / elapsed))}/s" if elapsed else ""
            return Text(f"{show_bytes(round(task.completed))} of {show_bytes(round(task.total or 0))}{speed}")

    class Times(ProgressColumn):
        def render(self, task: Task) -> Text:
            pace = paces[task.description]
            left = "" if pace.left is None else f", {show_duration(pace.left)} left"
            return Text(show_duration(pace.elapsed) + left)

    bars = RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        Done(),
        TaskProgressColumn(),
        Times(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
        # Otherwise what is printed meanwhile would go to standard error with the bars, even if meant for a file.
        redirect_stdout=sys.stdout.isatty(),
    )
    tasks = {}

    def progress(what: str, done: float, total: float, note: str = "", /) -> None:
        nonlocal last_line
        if what not in tasks or done < paces[what].done:  # the task is done again, perhaps for another layer
            paces[what] = Pace(done, total, clock)
            if what in tasks:
                bars.remove_task(tasks[what])
            tasks[what] = bars.add_task(what, total=total, note=note)
        paces[what].update(done)
        bars.update(tasks[what], completed=done, visible=done < total, note=note)
        if lines and clock() - last_line >= SECONDS_BETWEEN_LINES and done < total:
            last_line, left = clock(), paces[what].left
            soon = "" if left is None else f", {show_duration(left)} left"
            console.print(f"{what}: {done / total:.0%}{soon}", highlight=False, markup=False, soft_wrap=True)

    with bars:
        yield progress


class ByteProgress:
    """A progress bar in bytes, with a summary at the end: time, speed and peak memory.

    A context manager; call `advance` as bytes are done, from any thread.
    """

    def __init__(self, console: Console, what: str, total: int):
        self._console = console
        self._what = what
        self._total = total
        self._done = self._skipped = 0
        self._start = time.perf_counter()
        self._lock = threading.Lock()
        self._bar = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._progress = self._bar.enter_context(progress_bars(self._console, in_bytes=True))
        self.advance(0)
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""
        with self._lock:
            self._done += count
            self._progress(self._what, self._done, self._total)

    def skip(self, count: int) -> None:
        """`count` bytes were done before: they are on the bar, and not in the figures."""
        self._skipped += count
        self.advance(count)

    def measured(self) -> dict[str, float]:
        """Bytes, seconds since the start, their ratio, and peak memory."""
        seconds = time.perf_counter() - self._start
        count = self._total - self._skipped
        return {
            "bytes": count,
            "seconds": round(seconds, 3),
            "bytes_per_second": round(count / seconds),
            "peak_memory_bytes": peak_memory_bytes(),
        }

    def summary(self) -> str:
        """The measured figures in one line."""
        measured = self.measured()
        names = ("bytes", "bytes_per_second", "peak_memory_bytes")
        count, speed, memory = (show_bytes(int(measured[name])) for name in names)
        return f"{count} in {measured['seconds']:.1f} s ({speed}/s), peak memory {memory}"
