"""The analyses of the layers of a model: made by a method, by several processes together, and kept on the disk."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from moe_jax.compression.board import Board
from moe_jax.compression.methods.interface import Analysis, Method
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import Progress
from moe_jax.distributed.processes import fail_together, first_decides, gathered_arrays, is_first_process
from moe_jax.files.staging import ANALYSIS, Workplace
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.leaves_to_write import dealt


class AnalysisStore:
    """A context manager for the folder `.NAME.analysis`, a `Workplace` with a file for every analysed layer.

    With several processes the first one makes and removes the folder, and all of them enter the block.
    """

    def __init__(self, dst: Path, job: Mapping[str, Any]):
        self._work = Workplace(dst, job, suffix=ANALYSIS)

    def __enter__(self) -> Self:
        def begin() -> None:  # what it gives cannot be sent to other processes
            self._work.__enter__()

        first_decides(begin)
        return self

    @property
    def folder(self) -> Path:
        """The folder where analyses are kept."""
        return self._work.folder

    def known(self, layers: Iterable[int]) -> dict[int, Analysis]:
        """The stored analyses of some layers; only the first process returns them, and then sends them to others."""
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

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if is_first_process():
            if isinstance(error, InputError):
                fail_together(2, str(error))  # at once: the folder that the others work in is about to be removed
            self._work.__exit__(kind, error, traceback)

    def _file(self, layer: int) -> Path:
        return self._work.folder / f"{layer}.npz"


def analyse_layers(
    method: Method,
    open_layer: Callable[[int], SourceLayer],
    sizes: Mapping[int, int],
    store: AnalysisStore | None,
    progress: Progress,
    *,
    shared: bool,
) -> dict[int, Analysis]:
    """Returns the analyses of all layers, in every process."""
    if type(method).analyse is Method.analyse:
        return {i: {} for i in sizes}
    analyses: dict[int, Analysis] = {} if store is None else store.known(sizes)
    before = first_decides(lambda: sorted(analyses)) if shared else sorted(analyses)
    owners = dealt({i: size for i, size in sizes.items() if i not in before})
    board = Board("analysing", tuple(sizes), progress, shared=shared)
    for i in sizes:
        if i in before:
            if is_first_process():
                board.done(i, None)
        elif not shared or owners[i] == jax.process_index():
            analyses[i] = method.analyse(open_layer(i), board.working)
            if store is not None and analyses[i]:
                store.put(i, analyses[i])
            board.done(i, None)
    if not shared:
        return analyses
    board.wait()
    arrays = gathered_arrays({f"{i}/{name}": array for i, one in analyses.items() for name, array in one.items()})
    everywhere: dict[int, dict[str, np.ndarray]] = {i: {} for i in sizes}
    for path, array in arrays.items():
        layer, _, name = path.partition("/")
        everywhere[int(layer)][name] = array
    return {**everywhere}
