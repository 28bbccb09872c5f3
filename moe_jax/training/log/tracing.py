"""A profiler trace of chosen steps, for TensorBoard's profile plugin, XProf or Perfetto."""

import contextlib
from pathlib import Path
from typing import Any

import jax

from moe_jax.files.growing import LocalFolder
from moe_jax.files.storage_path import as_path


class StepTrace:
    """Traces steps `first` to `last`, both included; steps that are not run are not waited for. A context manager.

    Every process writes a trace of its own devices.

    Args:
      directory: made by the profiler, which writes `plugins/profile/TIME/` into it; in a bucket when the trace ends.
      steps: `(first, last)`, or empty for no trace.
    """

    def __init__(self, directory: Path, steps: tuple[int, ...]):
        self._directory = directory
        self._first, self._last = steps or (0, -1)
        self._traces = False
        self._folder: LocalFolder | None = None

    def __enter__(self) -> "StepTrace":
        return self

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Call before each step, and run the step inside."""
        if not self._traces and self._first <= number <= self._last:
            self._folder = as_path(self._directory).local_folder()
            jax.profiler.start_trace(self._folder.path)
            self._traces = True
        return jax.profiler.StepTraceAnnotation("train", step_num=number) if self._traces else contextlib.nullcontext()

    def after(self, number: int, result: Any) -> bool:
        """Ends the trace after its last step, when `result` is computed; returns whether it did."""
        if not self._traces or number < self._last:
            return False
        jax.block_until_ready(result)
        self._stop()
        return True

    def __exit__(self, *_: object) -> None:
        # The run ended, or stopped, during the trace.
        if self._traces:
            self._stop()

    def _stop(self) -> None:
        self._traces = False
        jax.profiler.stop_trace()
        if self._folder is not None:
            self._folder.close()
