"""Analyses of layers, kept beside the target until the job is done, so that a resumed job need not repeat them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from moe_jax.compression.methods.interface import Analysis
from moe_jax.core.errors import InputError
from moe_jax.distributed.processes import fail_together, first_decides, is_first_process
from moe_jax.files.resume import ANALYSIS, Workplace
from moe_jax.files.storage_path import as_path


class AnalysisStore:
    """A context manager for the folder `.NAME.analysis`, which has a file for every analysed layer.

    The folder is removed when the block ends without an error, or with an error that the same job would meet again; see
    `Workplace`. Files are never unpickled.

    With several processes the first one makes and removes the folder, and all of them enter the block.
    """

    def __init__(self, dst: Path, job: Mapping[str, Any]):
        """Changes nothing on the disk yet.

        Args:
          dst: the target of the job.
          job: JSON-able, equal only for the same job.
        """
        self._work = Workplace(dst, job, suffix=ANALYSIS)

    def __enter__(self) -> Self:
        first_decides(self._begin)
        return self

    def _begin(self) -> None:
        self._work.__enter__()

    def known(self, layers: Iterable[int]) -> dict[int, Analysis]:
        """Returns the stored analyses of some layers, from an earlier process of the same job.

        Only the first process returns them, and then sends them to the others.
        """
        found = {i: self.get(i) for i in layers} if is_first_process() else {}
        return {i: analysis for i, analysis in found.items() if analysis is not None}

    def get(self, layer: int) -> Analysis | None:
        """Returns the analysis of a layer stored by this process, or an earlier one of the same job; else None."""
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
