"""What the user sees while gigabytes move: a bar with GB/s, and at the end time, speed and peak memory."""

import contextlib
import resource
import sys
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

GB = 1e9


def console_for(*, dry_run: bool) -> Console:
    """Where a command prints: progress goes to standard error, the answer of a dry run to standard output."""
    console = Console(stderr=not dry_run, highlight=False)
    # Piped into a file or a pager, nothing is cut off.
    return console if console.is_terminal else Console(stderr=not dry_run, highlight=False, width=200)


def peak_memory_bytes() -> int:
    """Highest resident memory of this process so far."""
    with contextlib.suppress(OSError, StopIteration):
        # Linux; the figure below also counts what the parent process had when it started this one.
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


class ByteProgress:
    """A bar over bytes that are read and written. A context manager; call `advance` as they are done."""

    def __init__(self, console: Console, label: str, total: int):
        self._start = time.perf_counter()
        self._total = total
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            _Speed(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task(label, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""
        self._progress.advance(self._task, count)

    def measured(self) -> dict[str, float]:
        """Bytes, seconds since the start, their ratio, and peak memory."""
        seconds = time.perf_counter() - self._start
        return {
            "bytes": self._total,
            "seconds": round(seconds, 3),
            "gb_per_s": round(self._total / GB / seconds, 3),
            "peak_memory_bytes": peak_memory_bytes(),
        }

    def summary(self) -> str:
        """The measured figures in one line."""
        measured = self.measured()
        return (
            f"{self._total / GB:.2f} GB in {measured['seconds']:.1f} s ({measured['gb_per_s']:.2f} GB/s), "
            f"peak memory {measured['peak_memory_bytes'] / GB:.2f} GB"
        )


class _Speed(ProgressColumn):
    """GB/s since the start."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.completed / GB / task.elapsed:.2f} GB/s" if task.elapsed else "- GB/s")
