"""A compressed model that is there as long as it is looked at."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_jax.compress import Method, compress
from moe_jax.compress.job.report import Report
from moe_jax.model_dir import ModelDirectory
from moe_jax.model_source import ModelSource


@contextlib.contextmanager
def compressed(source: ModelSource, method: Method, **options: Any) -> Iterator[tuple[ModelDirectory, Report]]:
    """Writes a compressed model, gives it and what was measured, and removes it in the end.

    Args:
      source: the model.
      method: what to do.
      **options: of `moe_jax.compress.compress`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        report = compress(source, folder, method, described={}, **options)
        yield ModelDirectory(folder), report
