"""Scalars as TensorBoard events, by tensorboardX (extra `tensorboard`)."""

import importlib
import importlib.util
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_jax.files.storage_path import as_path

MISSING = "no TensorBoard events are written: pip install 'moe-jax[tensorboard]', or set log.tensorboard to false"
_SECONDS = 20.0


def is_installed() -> bool:
    """Whether tensorboardX is installed.

    It is imported only when events are written, because it imports PyTorch, too, where that is installed.
    """
    return importlib.util.find_spec("tensorboardX") is not None


class EventWriter:
    """Appends scalars to a new event file in a directory; needs tensorboardX.

    Its `EventsWriter` is used, and not its `SummaryWriter`: that queues every scalar as an event of its own, which
    takes longer than a step where layers have many experts, and its `flush` does not wait for the queue.

    Args:
      directory: created if necessary. In a bucket the file appears when it is flushed or closed.
      first_step: TensorBoard no longer shows steps from here on that are in older files of the directory.
    """

    def __init__(self, directory: Path, *, first_step: int):
        from tensorboardX.event_file_writer import EventsWriter

        event_pb2: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        summary_pb2: Any = importlib.import_module("tensorboardX.proto.summary_pb2")
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._folder = as_path(directory).local_folder()
        self._events = EventsWriter(str(self._folder.path / "events"), filename_suffix=f".{os.getpid()}.{first_step}")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._events.write_event(event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start))
        self._due = 0.0

    def write(self, step: int, scalars: Iterable[tuple[str, float]]) -> None:
        """Writes the scalars of a step, by tag; they are in the file some seconds later."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
        self._events.write_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        if time.monotonic() >= self._due:
            self._events.flush()
            self._due = time.monotonic() + _SECONDS

    def flush(self) -> None:
        """Returns when all events are in the file, or in the bucket."""
        self._events.flush()
        self._folder.flush()

    def close(self) -> None:
        """Closes the file; all is in its place."""
        self._events.close()
        self._folder.close()
