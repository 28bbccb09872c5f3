"""The recording of a model on a calibration text: for every MoE layer, the inputs of its bank.

The pass that makes it runs the model over the text layer after layer, and before that its image encoder over the
pictures, if there are any. Memory holds one layer and one batch, whatever the sizes of model and text: the activations
between two layers are a file. So one pass over the model's files is enough, and a pass that was killed continues at
the layer where it was.
"""

import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from moe_jax.compression.calibration.calibration_rows import CalibrationRows, as_rows
from moe_jax.compression.calibration.embedded_rows import embedded_rows, eye_bytes
from moe_jax.compression.calibration.placed_layer import PlacedLayer, batches_of, open_states
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import show_bytes
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.files.json_toml import ANYTHING, read_json
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.model_source import ModelSource
from moe_jax.nn.moe import RouterStatistics, RouterSums

FORMAT = 2
"""Version of the files of a recording. A recording of another version is made anew."""
KEY_FILE = "calibration.json"
# Sensitivities differ if tokens are weighted by gradients.
_SENSITIVITIES = {False: "sensitivities.json", True: "sensitivities-gradients.json"}


class LayerRows(NamedTuple):
    """The inputs of the bank of a layer, for T tokens."""

    inputs: Float[np.ndarray, "T d"]  # bfloat16, on the disk
    experts: Int[np.ndarray, "T k"]  # of the bank; -1: none
    weights: Float[np.ndarray, "T k"]  # of these experts, float32
    # how much the loss depends on every token, see `sensitivities`; float32, 1 on average. None: all count alike.
    gradients: Float[np.ndarray, " T"] | None = None


class LayerCalibration(NamedTuple):
    """Calibration data of one layer."""

    statistics: RouterStatistics | None  # of its router; None: not known
    rows: LayerRows | None = None  # inputs of its bank; None: only the router was recorded
    sensitivities: Mapping[str, float] | None = None  # of every matrix, see `sensitivities`; None: not measured
    # Without rows: mean squares of the `inputs` Float32[E, d] of experts and their `hidden` activations Float32[E, f].
    squares: Mapping[str, np.ndarray] | None = None


NOT_YET_RECORDED = LayerCalibration(
    RouterStatistics(np.zeros(0), np.zeros(0), np.zeros((0, 0))),
    LayerRows(np.zeros((0, 0), np.float32), np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)),
)
"""Stands for a recording that does not exist yet, in checks beforehand; nobody reads its content."""


class Calibration(NamedTuple):
    """The recording of a model on texts.

    Attributes:
      files: that were read.
      layers: by the index of the MoE layer.
      folder: of the recording; None: in memory.
      keep: an object that must live as long as this: its folder, if that is a temporary one.
      rows: the rows that the model was run on; None: there is no text.
      sources: number of tokens of every source, in the order of the layers' rows; empty: not known.
    """

    files: tuple[Path, ...]
    layers: Mapping[int, LayerCalibration]
    folder: Path | None = None
    keep: Any = None
    rows: CalibrationRows | None = None
    sources: Mapping[str, int] = MappingProxyType({})


def inputs_file(folder: Path, layer: int) -> Path:
    """The file of the inputs of a layer's bank."""
    return folder / f"{layer}.inputs.npy"


def layer_file(folder: Path, layer: int) -> Path:
    """The file of a layer's other data; if it exists, the layer is complete."""
    return folder / f"{layer}.npz"


def gradients_file(folder: Path, layer: int) -> Path:
    """The file of the weights of tokens, see `sensitivities`."""
    return folder / f"{layer}.gradients.npy"


def read_layer(folder: Path, layer: int, *, gradients: bool = False) -> LayerCalibration:
    """Reads a complete layer; with `gradients`, which must then be recorded, tokens are weighted by the loss's.

    Raises:
      InputError: if the files are not those of a recording.
    """
    try:
        with np.load(layer_file(folder, layer), allow_pickle=False) as arrays:
            found = dict(arrays)
        inputs = np.load(inputs_file(folder, layer), mmap_mode="r", allow_pickle=False)
        rows = LayerRows(inputs.view(jnp.bfloat16), found.pop("experts"), found.pop("weights"))
        if gradients:
            rows = rows._replace(gradients=np.load(gradients_file(folder, layer), allow_pickle=False))
        if len({len(part) for part in rows if part is not None}) > 1:
            raise ValueError("its files are of different texts")
        return LayerCalibration(RouterStatistics(**found), rows)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"the calibration {folder} is damaged (layer {layer}: {error}); remove it") from None


def write_sensitivities(
    folder: Path, sensitivities: Mapping[int, Mapping[str, float]], *, gradients: bool = False
) -> None:
    """Writes the results of `sensitivities`, by layer index and matrix; `gradients` as for `read_layer`."""
    as_path(folder / _SENSITIVITIES[gradients]).replace_content(json.dumps(sensitivities).encode())


def read_sensitivities(folder: Path, *, gradients: bool = False) -> dict[int, dict[str, float]] | None:
    """Reads the results that `write_sensitivities` wrote; None: there are none. A damaged file is an `InputError`."""
    file = folder / _SENSITIVITIES[gradients]
    if not file.is_file():
        return None
    try:
        read = read_json(file, allow=ANYTHING).items()
        return {int(layer): {name: float(value) for name, value in own.items()} for layer, own in read}
    except (AttributeError, TypeError, ValueError):
        raise InputError(f"the calibration {folder} is damaged ({file.name}); remove it") from None


def is_complete(folder: Path, key: Mapping[str, Any]) -> bool:
    """Whether a folder holds the whole recording that `key` describes; `InputError` if it is another one."""
    file = folder / KEY_FILE
    if not file.is_file():
        return False
    found = read_json(file, allow=ANYTHING)
    if found != dict(key):
        raise InputError(f"{folder} is a calibration of something else; name another folder, or remove it")
    return True


def read_windows(folder: Path) -> tuple[int, int]:
    """Returns how many rows a complete recording was made on, and how many tokens the longest has."""
    try:
        count, length = map(int, read_json(folder / KEY_FILE, allow=ANYTHING)["windows"])
    except (KeyError, TypeError, ValueError):
        raise InputError(f"the calibration {folder} is damaged ({KEY_FILE}); remove it") from None
    return count, length


DEFAULT_SAMPLES = 128
"""Default number of windows, if the text has as many: as many as GPTQ's authors took."""


def sample_windows(
    ids: Int[np.ndarray, " n"],
    *,
    seq_len: int,
    samples: int | None = None,
    seed: int = 0,
    most: int = DEFAULT_SAMPLES,
    name: str = "the calibration text",
) -> Int[np.ndarray, "N L"]:
    """Draws N windows, none of them twice, in the order of the text; None: `most`, or as many as there are.

    Windows have `seq_len` tokens, of a shorter text all. Fewer of them than requested are an `InputError`,
    which calls the text by its name.
    """
    length = min(seq_len, len(ids))
    count = len(ids) // length
    if samples is not None and not 1 <= samples <= count:
        raise InputError(
            f"{name} has {len(ids)} tokens, which are {count} windows of {length}, and {samples} are asked for; ask "
            "for at most so many, or give a longer text"
        )
    wanted = min(most, count) if samples is None else samples
    chosen = np.sort(np.random.Generator(np.random.Philox(seed)).permutation(count)[:wanted])
    return ids[: count * length].reshape(count, length)[chosen].astype(np.int32)


NEXT = "next"
"""Name of the file that says where an unfinished pass continues."""
EYE = "eye"
"""Name of the folder of what the image encoder makes of pictures, as long as it is needed."""


def record(
    source: ModelSource,
    windows: Int[np.ndarray, "N L"] | CalibrationRows,
    folder: Path,
    key: Mapping[str, Any],
    *,
    mesh: Mesh,
    batch_size: int = 8,
    progress: Progress = no_progress,
) -> None:
    """Makes the recording of a model on a text, or continues it; activations are float32.

    Args:
      source: the model.
      windows: of the text, from `sample_windows`; or rows, of whose padding nothing is kept.
      folder: where it is written; of this recording alone.
      key: describes the recording; JSON.
      mesh: devices that share the windows of a batch; the weights of a layer are placed as in training.
      batch_size: windows at a time, rounded up to a multiple of what the mesh divides.
      progress: called after every layer.

    Raises:
      InputError: if the model has an encoder or no MoE layers, activations are not finite, or there is no room on the
        disk.
    """
    config = source.config
    config.check_no_encoder("a calibration")
    if not config.moe_layers:
        raise InputError("the model is dense: it has no experts to calibrate")
    folder.mkdir(parents=True, exist_ok=True)
    rows = as_rows(windows)
    # The inputs of all layers, and activations of two layers.
    needed = config.d_model * (2 * len(config.moe_layers) * rows.count + 8 * rows.tokens.size)
    check_room(folder, needed + eye_bytes(config, rows), f"a calibration on {rows.count} tokens takes")
    size, batches = batches_of(len(rows), batch_size, mesh)
    last = max(config.moe_layers)
    shape = (len(rows), rows.length, config.d_model)
    begin = int((folder / NEXT).read_text("utf-8")) if (folder / NEXT).is_file() else 0
    if begin == 0:
        states = _states(folder, 0, shape)
        for batch, x in embedded_rows(source, rows, batches, size, folder=folder / EYE, mesh=mesh, progress=progress):
            states[batch] = x
        note_progress(folder, states, "0")
    programs: dict[Any, Any] = {}
    with jax.set_mesh(mesh):
        for i in range(begin, last + 1):
            progress("calibrating", i, last + 1)
            before, after = _states(folder, i), _states(folder, i + 1, shape)
            layer = PlacedLayer(source, i, mesh, programs)
            _run(layer, rows, before, after, batches, size, folder)
            note_progress(folder, after, str(i + 1))
    progress("calibrating", last + 1, last + 1)
    for parity in (0, 1):  # a pass that is stopped from here on has nothing left to do
        (folder / f"states{parity}.npy").unlink(missing_ok=True)
    as_path(folder / KEY_FILE).write_durably(json.dumps(dict(key), indent=1).encode())
    (folder / NEXT).unlink(missing_ok=True)


def _run(
    layer: PlacedLayer,
    rows: CalibrationRows,
    before: Float[np.ndarray, "N L d"],
    after: Float[np.ndarray, "N L d"],
    batches: list[slice],
    size: int,
    folder: Path,
) -> None:
    """Applies a layer to all rows, and stores the inputs of its bank."""
    # If a pass was stopped, the layer may be complete while the next layer's input is not.
    recorded = layer_file(folder, layer.index).is_file()
    inputs = None
    if layer.moe and not recorded:  # bfloat16, which NumPy's format stores as 16 bits
        inputs = open_states(inputs_file(folder, layer.index), np.uint16, (rows.count, before.shape[-1]))
    experts, weights, sums, begin = [], [], RouterSums(), 0
    for batch in batches:
        valid = rows.valid[batch]
        y, calls = layer.apply(np.asarray(before[batch]), size, valid)
        if not np.isfinite(y).all():
            raise InputError(f"calibration: what layer {layer.index} gives is not finite; mend the model")
        after[batch] = y
        for call in calls:
            if inputs is None:
                break
            counted = np.flatnonzero(valid)
            inputs[begin : begin + len(counted)] = np.asarray(call.tokens)[counted].view(np.uint16)
            begin += len(counted)
            experts.append(np.asarray(call.routing.experts)[counted])
            weights.append(np.asarray(call.routing.weights)[counted])
            sums.add(call.stats, len(counted))
    if inputs is not None:
        inputs.flush()
        found = {"experts": np.concatenate(experts), "weights": np.concatenate(weights), **sums.statistics()._asdict()}
        with as_path(layer_file(folder, layer.index)).replacing() as file:
            np.savez(file, allow_pickle=False, **found)


def _states(folder: Path, index: int, shape: tuple[int, int, int] | None = None) -> np.memmap:
    """Opens the input of layer `index`. Two files in turn: that of the layer before is whole until the next one is."""
    return open_states(folder / f"states{index % 2}.npy", np.float32, shape)


def note_progress(folder: Path, states: np.memmap, where: str) -> None:
    """Notes that a file of activations is complete, and where the pass then continues."""
    states.flush()
    as_path(folder / NEXT).replace_content(where.encode())


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raises `InputError` unless there is room on the disk for what a folder needs beside what it has."""
    needed -= sum(file.stat().st_size for file in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{what} {show_bytes(needed)} in {folder}, where {show_bytes(free)} are free; ask for fewer samples, or "
            "make room"
        )
