"""A compression, and after it the recovery: the compressed model learns from the one that it was made of.

Meanwhile the compressed model and the checkpoints lie beside the target, in `.NAME.recovery`. The tuned model appears
at the target as a whole.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moe_jax.api.model import Model, ModelOrPath, open_model, work_bars
from moe_jax.api.read_calibration import calibration_folder, read_rows
from moe_jax.compression.in_order import OnLayer
from moe_jax.compression.report import LayerFigures, Report
from moe_jax.compression.spec import CompressSpec
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import Progress
from moe_jax.files.staging import RECOVERY, Workplace
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.in_memory import Destination, InMemory, open_writer, write_each
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.model_io.model_source import ModelSource
from moe_jax.training.recovery.recovery_run import Limit, run_recovery
from moe_jax.training.recovery.text_batches import divide_rows

# Tokens of a window, for most of what is learnt is in short ones; and windows, or rows, at most.
_SEQ_LEN, _MOST_ROWS = 256, 8192
_COMPRESSED, _CHECKPOINTS = "compressed", "checkpoints"


class Recovering:
    """A compression with a recovery, whose options and text have been checked."""

    def __init__(self, model: ModelOrPath, spec: CompressSpec, target: Destination):
        """Reads the text, before the compression begins.

        Raises:
          FileNotFoundError: if there is no such model or text.
          InputError: if the target is in a bucket, there are several processes, or the text or the model does not do.
        """
        if jax.process_count() > 1:
            raise InputError("--recover works in one process: compress without it in several, and tune by a recipe")
        if isinstance(target, Path) and as_path(target).on_disk is None:
            raise InputError("--recover needs OUT on a disk: in a bucket nothing can be put together first")
        assert spec.calibrate is not None
        self._target, self._spec = target, spec
        self._original = open_model(model, spec.model_base)
        self._original.config.check_no_encoder("a recovery")
        # Another draw than that of the calibration.
        self._seed = 1 + (spec.calibration_seed or 0)
        length = spec.seq_len or min(_SEQ_LEN, self._original.config.max_positions)
        folder = calibration_folder(model) if spec.calibration_dir is None else Path(spec.calibration_dir)
        with work_bars() as progress:
            rows = read_rows(
                self._original,
                spec.calibrate,
                seq_len=length,
                samples=None,
                most=_MOST_ROWS,
                seed=self._seed,
                image_folder=spec.image_folder,
                place=None if folder is None else folder.joinpath,
                progress=progress,
            )
        self._rows = divide_rows(rows, seed=self._seed)
        self._mesh, self._devices = _devices_of(model)

    def run(
        self,
        make: Callable[[Destination], Report],
        *,
        described: Mapping[str, Any],
        sources: Sequence[ModelSource | Path],
        on_layer: OnLayer,
        progress: Progress,
    ) -> Report:
        """Makes the compressed model by `make`, tunes it, and writes the target.

        Args:
          make: writes the compressed model at a destination.
          described: options of the command, by which an interrupted one is recognised.
          sources: what it reads, likewise.
          on_layer: called for the layers that an interrupted command had compressed.
          progress: called as work proceeds.

        Raises:
          InputError: as `make` and `run_recovery`. Nothing is left behind.
          OSError: if the disk is full. Finished work stays beside the target, to be continued.
        """
        if isinstance(self._target, InMemory):
            staged = InMemory()
            report = make(staged)
            assert staged.source is not None
            return self._recover(staged.source, report, None, progress)
        entry = new_lineage_entry("compress", described, sources)
        with Workplace(self._target, {name: entry[name] for name in ("options", "sources")}, suffix=RECOVERY) as work:
            place = work.folder / _COMPRESSED
            if place.is_dir():
                report = Report.from_json(ModelDirectory(place).lineage[-1]["measured"])
                for layer in report.layers:
                    figures = {field.name: getattr(layer, field.name) for field in dataclasses.fields(LayerFigures)}
                    on_layer(layer.layer, LayerFigures(**figures), layer.bytes_after)
            else:
                report = make(place)
            return self._recover(ModelDirectory(place), report, work.folder / _CHECKPOINTS, progress)

    def _recover(self, compressed: ModelSource, report: Report, folder: Path | None, progress: Progress) -> Report:
        found = run_recovery(
            compressed,
            self._original,
            self._rows,
            Limit(self._spec.recover_steps, self._spec.recover),
            batch_size=self._spec.batch_size or 8,
            seed=self._seed,
            mesh=self._mesh,
            devices=self._devices,
            folder=folder,
            progress=progress,
        )
        report = dataclasses.replace(report, recovery=found.report)
        *before, entry = compressed.lineage
        writer = open_writer(
            self._target,
            compressed.config,
            tokenizer_files=compressed.tokenizer_files,
            lineage=[*before, {**entry, "measured": report.to_json()}],
        )

        def leaf(path: str) -> np.ndarray:
            return found.leaves[path] if path in found.leaves else compressed.read(path)

        with writer:
            write_each(writer, writer.expected, leaf, doing="writing", progress=progress)
        return report


def _devices_of(model: ModelOrPath) -> tuple[dict[str, int] | None, list[Any] | None]:
    """Returns the mesh of a model in memory, as its sizes and devices, or the first device; for a path, None: all."""
    if not isinstance(model, Model):
        return None, None
    if model.mesh is None:
        return None, jax.devices()[:1]
    return dict(model.mesh.shape), list(model.mesh.devices.flat)
