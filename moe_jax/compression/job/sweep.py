"""Quality against bytes: compresses a model by many methods, and scores and removes every result."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_jax.compression.job.report import Point, Sweep
from moe_jax.compression.job.stream import compress
from moe_jax.compression.job.sweep_plot import plot_sweep
from moe_jax.compression.methods.interface import Method
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.distributed.processes import first_decides
from moe_jax.files.resume import staged_directory
from moe_jax.files.staging import check_target
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.model_io.model_source import ModelSource

Score = Callable[[ModelSource], float]
"""Returns the mean negative log-likelihood per token of a text, natural log; not finite for a ruined model."""

WORST_NLL = math.log(1e30)
"""Largest value of a point, and the value of a ruined model: it must still fit a picture."""


def sweep(
    source: ModelSource,
    dst: Path,
    methods: Sequence[tuple[str, Method]],
    score: Score,
    *,
    described: Mapping[str, Any],
    sources: Sequence[ModelSource | Path],
    progress: Progress = no_progress,
    **options: Any,
) -> Sweep:
    """Writes a folder with `sweep.json` and `sweep.png`. Several processes compress and score together.

    Args:
      source: the model.
      dst: the folder, which appears when all is done.
      methods: methods to try, by name; those of one name differ in the option that is varied.
      score: see `Score`.
      described: the options as the user gave them.
      sources: the models and the text that were read.
      progress: called at the start and after every model.
      **options: of `compress`: base, extended, layers, calibration.

    Raises:
      InputError: see `compress`, or the model itself has no finite score. Nothing is left behind.
    """
    first_decides(lambda: check_target(dst))
    nll = score(source)
    if not math.isfinite(nll):
        raise InputError(f"the perplexity of the model itself is not finite (nll {nll}): there is nothing to compare")
    points: list[Point] = []
    warnings: dict[str, None] = {}
    progress("compressing and scoring", 0, len(methods))
    with _staged(dst) as folder:
        for done, (name, method) in enumerate(methods, start=1):
            report = compress(source, folder / "model", method, described={}, **options)
            warnings |= dict.fromkeys(report.warnings)
            option, found = method.swept[0], score(ModelDirectory(folder / "model"))
            found = min(found, WORST_NLL) if math.isfinite(found) else WORST_NLL
            first_decides(lambda: as_path(folder / "model").remove_tree())
            points.append(
                Point(
                    method=name,
                    option=option,
                    value=getattr(method, option),
                    expert_bytes=report.expert_bytes_after,
                    kept=report.expert_bytes_after / report.expert_bytes_before,
                    relative_error=sum(layer.relative_error for layer in report.layers) / len(report.layers),
                    nll=found,
                    perplexity=math.exp(found),
                )
            )
            progress("compressing and scoring", done, len(methods))
        result = Sweep(
            nll=nll,
            perplexity=math.exp(min(nll, WORST_NLL)),
            expert_bytes=report.expert_bytes_before,
            points=tuple(points),
            warnings=tuple(warnings),
        )
        entry = new_lineage_entry("compress --sweep", described, sources, dataclasses.asdict(result))

        def write() -> None:
            as_path(folder / "sweep.json").write_durably(json.dumps(entry, indent=2).encode())
            plot_sweep(result, folder / "sweep.png", title=str(source.path))

        first_decides(write)
    return result


@contextlib.contextmanager
def _staged(dst: Path) -> Iterator[Path]:
    """As `staged_directory`, for several processes: the first makes the folder, and moves it to its place."""
    with contextlib.ExitStack() as stack:
        folder = first_decides(lambda: str(stack.enter_context(staged_directory(dst))))
        yield Path(folder)
        first_decides(stack.close)
