"""Analyses of layers, kept beside the target until the job is done, so that a resumed job need not repeat them."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from moe_jax.compress.methods.interface import Analysis
from moe_jax.errors import InputError
from moe_jax.staging import lock_directory, remove_content, remove_directory, replacing, write_durably

_JOB = "job.sha256"


class AnalysisStore:
    """A context manager for the folder `.NAME.analysis`, which has a file for every analysed layer.

    The folder is removed when the block ends without an error, or with an `InputError`, which the same job would meet
    again. Files of another job are removed at the start. Files are never unpickled.
    """

    def __init__(self, dst: Path, job: Mapping[str, Any]):
        """Touches nothing yet.

        Args:
          dst: what the job writes.
          job: JSON-able, the same for the same job only.
        """
        self._dst = Path(dst).absolute()
        self._folder = self._dst.with_name(f".{self._dst.name}.analysis")
        self._job = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_directory(self._folder, self._dst)
        job = self._folder / _JOB
        if not (job.is_file() and job.read_text() == self._job):
            remove_content(self._folder)
            write_durably(job, self._job.encode())
        return self

    def get(self, layer: int) -> Analysis | None:
        """The analysis of a layer that this process, or an earlier one of the same job, has put; else None."""
        file = self._file(layer)
        if not file.is_file():
            return None
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)

    def put(self, layer: int, analysis: Analysis) -> None:
        """Keeps the analysis of a layer, whole or not at all."""
        with replacing(self._file(layer)) as file:
            np.savez(file, allow_pickle=False, **analysis)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, InputError):
            remove_directory(self._folder)
        os.close(self._lock)

    def _file(self, layer: int) -> Path:
        return self._folder / f"{layer}.npz"
