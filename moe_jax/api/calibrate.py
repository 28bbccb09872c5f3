"""Records the inputs of a model's experts on a text, for the methods of compression."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from moe_jax.api.model import Model
from moe_jax.api.run import default_seq_len, read_ids
from moe_jax.compression.calibration.layerwise_pass import record, sample_windows
from moe_jax.compression.calibration.recorded import (
    FORMAT,
    Calibration,
    is_complete,
    read_layer,
    read_sensitivities,
    write_sensitivities,
)
from moe_jax.compression.calibration.sensitivities import has_gradients, measure_sensitivities, record_gradients
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.distributed.sharding import make_mesh
from moe_jax.evaluation.held_out import check_seq_len
from moe_jax.files.staging import lock_directory
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.model_source import ModelSource

Place = Callable[[str], Path]
"""Returns the folder of a recording with a given name."""


def calibrate(
    source: ModelSource,
    text: str | os.PathLike[str],
    *,
    samples: int | None = None,
    seq_len: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    place: Place | None = None,
    mesh: Mesh | None = None,
    sensitivities: bool = False,
    gradients: bool = False,
    progress: Progress = no_progress,
) -> Calibration:
    """Runs a model over windows of a text, layer after layer, and keeps the inputs of its experts.

    Args:
      source: a model with MoE layers.
      text: a text file.
      samples: number of windows that are drawn from it; None: 128, or as many as it has.
      seq_len: number of tokens of a window; by default as for `evaluate`.
      batch_size: number of windows computed at once. Changes the result in the last bits only.
      seed: seed of the draw.
      place: returns the folder of the recording by its name, in which it is found again later; None: the recording
        lies in a temporary folder that lives as long as the result.
      mesh: devices that share the work; None: the first one.
      sensitivities: whether to measure also how much the loss depends on each matrix of each layer.
      gradients: whether to weight tokens by the squared gradients of the text's loss with respect to a layer's output.
      progress: called after every layer.

    Raises:
      FileNotFoundError: if there is no text.
      InputError: if the model is dense, has an encoder or no tokenizer; the text is not UTF-8 or shorter than asked
        for; activations are not finite; another process makes the same recording; or there is no room on the disk.
    """
    if batch_size < 1:
        raise InputError(f"{batch_size=} must be at least 1")
    if seed < 0:
        raise InputError(f"{seed=} must not be negative")
    if not source.config.moe_layers:
        raise InputError("the model is dense: it has no experts to calibrate")
    source.config.check_no_encoder("a calibration")
    length = default_seq_len(source.config) if seq_len is None else seq_len
    check_seq_len(length)
    windows = sample_windows(read_ids(Model.of_source(source), text), seq_len=length, samples=samples, seed=seed)
    digest = hashlib.sha256(np.ascontiguousarray(windows).tobytes()).hexdigest()
    key = {"format": FORMAT, "model": source.fingerprint(), "windows": list(windows.shape), "tokens": digest}
    name = hashlib.sha256(repr(sorted(key.items())).encode()).hexdigest()[:16]
    keep = None
    if place is None:
        keep = tempfile.TemporaryDirectory(prefix="moe_jax_calibration_")
        place = Path(keep.name).joinpath
    folder = place(name)
    how: dict[str, Any] = {"mesh": _mesh(mesh), "batch_size": batch_size, "progress": progress}
    _complete(folder, lambda: is_complete(folder, key), lambda: record(source, windows, folder, key, **how))
    layers = source.config.moe_layers
    if gradients:
        _complete(
            folder, lambda: has_gradients(folder, layers), lambda: record_gradients(source, windows, folder, **how)
        )
    if sensitivities and read_sensitivities(folder, gradients=gradients) is None:
        recorded = partial(read_layer, folder, gradients=gradients)
        write_sensitivities(folder, measure_sensitivities(source, windows, recorded, **how), gradients=gradients)
    return open_calibration(folder, text, layers, gradients=gradients, keep=keep)


def _complete(folder: Path, is_done: Callable[[], bool], do: Callable[[], None]) -> None:
    """Does a part of a recording unless it is done; meanwhile no other command can do it."""
    if is_done():
        return
    folder.mkdir(parents=True, exist_ok=True)
    # Two commands on one text would go on with each other's activations.
    lock = lock_directory(folder, folder)
    try:
        if not is_done():  # another command may just have done it
            do()
    finally:
        os.close(lock)


def open_calibration(
    folder: Path,
    text: str | os.PathLike[str],
    layers: tuple[int, ...],
    *,
    gradients: bool = False,
    keep: Any = None,
) -> Calibration:
    """Opens a complete recording.

    Args:
      folder: the folder of the recording.
      text: the text that it was made from.
      layers: the MoE layers of the model.
      gradients: whether the recording has gradients; as in `calibrate`.
      keep: an object that must live as long as the recording, such as its temporary folder.
    """
    known = read_sensitivities(folder, gradients=gradients) or {}
    found = {i: read_layer(folder, i, gradients=gradients)._replace(sensitivities=known.get(i)) for i in layers}
    return Calibration(as_path(text), found, folder, keep)


def _mesh(mesh: Mesh | None) -> Mesh:
    return make_mesh({}, jax.local_devices()[:1]) if mesh is None else mesh
