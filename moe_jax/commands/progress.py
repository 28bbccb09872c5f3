"""A bar per thing that is being done, on a terminal and nowhere else."""

import collections
import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Progress = Callable[[str, float, int], None]

# Time left is guessed from the last steps: those that a resumed job finds done take no time, and layers differ.
_STEPS = 6


class Pace:
    """How long something has taken, and a guess how long the rest takes."""

    def __init__(self, done: float, total: int, clock: Callable[[], float] = time.monotonic):
        """Starts the clock.

        Args:
          done: steps that are done already.
          total: all of them.
          clock: seconds.
        """
        self.done = done
        self._total = total
        self._clock = clock
        self._start = self._last = clock()
        # When steps were done as a whole.
        self._seen = collections.deque([(self._start, done)], maxlen=_STEPS + 1)

    def update(self, done: float) -> None:
        """Notes how many steps are done; a part of one counts as well."""
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
        """Seconds until all steps are done; None: nothing has been done since the start."""
        start, before = self._seen[0]
        if self.done == before:
            return None
        since = self._clock() - self._last
        return max(0.0, (self._total - self.done) * (self._last - start) / (self.done - before) - since)


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yields `progress(what, done, total)`; the first call with a new `what` starts its bar on standard error.

    A first call with nothing done is best: the time of the first step then counts. A bar goes when all is done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    paces: dict[str, Pace] = {}

    class Times(ProgressColumn):
        def render(self, task: Task) -> Text:
            pace = paces[task.description]
            return Text(_clock(pace.elapsed) + ("" if pace.left is None else f", {_clock(pace.left)} left"))

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TaskProgressColumn(), Times())
    terminal = Console(stderr=True)
    bars = Bars(
        *columns,
        console=terminal,
        transient=True,
        disable=not terminal.is_terminal,
        # What is printed meanwhile would go to standard error with the bars, also where it is meant for a file.
        redirect_stdout=sys.stdout.isatty(),
    )
    tasks = {}

    def progress(what: str, done: float, total: int) -> None:
        if what not in tasks or done < paces[what].done:  # the same is done again, for another layer perhaps
            paces[what] = Pace(done, total)
            if what in tasks:
                bars.remove_task(tasks[what])
            tasks[what] = bars.add_task(what, total=total)
        paces[what].update(done)
        bars.update(tasks[what], completed=done, visible=done < total)

    with bars:
        yield progress


def _clock(seconds: float) -> str:
    """`1:02:03`, or `2:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
