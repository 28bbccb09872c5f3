"""Progress of layers that several processes work on, each on its own layers, as the first process shows it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from moe_jax.compression.methods.interface import Analysis
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.distributed.processes import (
    fail_together,
    first_decides,
    has_coordination,
    is_first_process,
    news,
    tell_first,
)
from moe_jax.files.staging import ANALYSIS, Workplace
from moe_jax.files.storage_path import as_path

# Seconds between two looks of the first process for messages of the others, while it waits for them.
_LOOKS_EVERY = 0.5


class Board:
    """The progress of the work on layers, in all processes that share it.

    The first process is told of the layers of the others while it works, and shows them as its own. If the work is not
    shared, one process has all layers.

    Args:
      what: the work, as `Progress` calls it.
      layers: all of them, in order.
      progress: called in the first process.
      in_turn: called there for every layer, in order, with its result, as soon as the layers before it are done.
      shared: whether other processes share the work.
    """

    def __init__(
        self,
        what: str,
        layers: Sequence[int],
        progress: Progress,
        *,
        in_turn: Callable[[int, Any], object] = lambda layer, found: None,
        shared: bool,
    ):
        self._what, self._layers, self._in_turn = what, tuple(layers), in_turn
        self._shared = shared and jax.process_count() > 1
        self._shows = is_first_process() or not self._shared
        self._progress = progress if self._shows else no_progress
        self._found: dict[int, Any] = {}
        self._shown = 0
        self._progress(what, 0, len(layers))

    def working(self, share: float) -> None:
        """Reports what share of the next layer this process has done."""
        self._hear()
        self._progress(self._what, min(len(self._found) + share, len(self._layers)), len(self._layers))

    def done(self, layer: int, found: Any) -> None:
        """Reports that a layer is done: by this process, or before. Its result is JSON-able if the work is shared."""
        if self._shows:
            self._hear()
            self._put(layer, found)
        else:
            tell_first([self._what, layer, found])

    def wait(self) -> None:
        """Waits, in the first process, for the others, and shows their progress."""
        while self._shows and self._shared and has_coordination() and len(self._found) < len(self._layers):
            self._hear(_LOOKS_EVERY)

    def complete(self, found: Mapping[int, Any]) -> None:
        """Shows all layers that have not been shown yet."""
        for layer in self._layers:
            if self._shows and layer not in self._found:
                self._put(layer, found[layer])

    def _hear(self, seconds: float = 0.0) -> None:
        for what, layer, found in news(seconds) if self._shared else ():
            if what == self._what:
                self._put(layer, found)

    def _put(self, layer: int, found: Any) -> None:
        self._found[layer] = found
        self._progress(self._what, len(self._found), len(self._layers))
        while self._shown < len(self._layers) and self._layers[self._shown] in self._found:
            layer = self._layers[self._shown]
            self._shown += 1
            self._in_turn(layer, self._found[layer])


class AnalysisStore:
    """A context manager for the folder `.NAME.analysis`, which has a file for every analysed layer.

    The folder is removed when the block ends without an error, or with an error that the same job would meet again; see
    `Workplace`. Files are never unpickled.

    With several processes the first one makes and removes the folder, and all of them enter the block.
    """

    def __init__(self, dst: Path, job: Mapping[str, Any]):
        """Changes nothing on the disk yet. The job is JSON-able, equal only for the same job."""
        self._work = Workplace(dst, job, suffix=ANALYSIS)

    def __enter__(self) -> Self:
        def begin() -> None:  # what it gives cannot be sent to other processes
            self._work.__enter__()

        first_decides(begin)
        return self

    def known(self, layers: Iterable[int]) -> dict[int, Analysis]:
        """The stored analyses of some layers, from an earlier process of the same job.

        Only the first process returns them, and then sends them to the others.
        """
        found = {i: self.get(i) for i in layers} if is_first_process() else {}
        return {i: analysis for i, analysis in found.items() if analysis is not None}

    def get(self, layer: int) -> Analysis | None:
        """The analysis of a layer stored by this process, or an earlier one of the same job; else None."""
        file = self._file(layer)
        if not file.is_file():
            return None
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)

    def put(self, layer: int, analysis: Analysis) -> None:
        """Stores the analysis of a layer, whole or not at all."""
        with as_path(self._file(layer)).replacing() as file:
            np.savez(file, allow_pickle=False, **analysis)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if is_first_process():
            if isinstance(error, InputError):
                fail_together(2, str(error))  # at once: the folder that the others work in is about to be removed
            self._work.__exit__(kind, error, traceback)

    def _file(self, layer: int) -> Path:
        return self._work.folder / f"{layer}.npz"
