"""The recording of a model on a calibration text: for every MoE layer, the inputs of its bank."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from moe_jax.core.errors import InputError
from moe_jax.files.json_toml import ANYTHING, read_json
from moe_jax.files.storage_path import as_path
from moe_jax.nn.moe import RouterStatistics

FORMAT = 2
"""Version of the files of a recording. A recording of another version is made anew."""
KEY_FILE = "calibration.json"
# Sensitivities differ if tokens are weighted by gradients.
_SENSITIVITIES = {False: "sensitivities.json", True: "sensitivities-gradients.json"}


class LayerRows(NamedTuple):
    """The inputs of the bank of a layer, for T tokens.

    Attributes:
      inputs: bfloat16, on the disk.
      experts: of the bank; -1: none.
      weights: of these experts, float32.
      gradients: how much the loss depends on every token, see `sensitivities`; float32, 1 on average. None: all count
        alike.
    """

    inputs: Float[np.ndarray, "T d"]
    experts: Int[np.ndarray, "T k"]
    weights: Float[np.ndarray, "T k"]
    gradients: Float[np.ndarray, " T"] | None = None


class LayerCalibration(NamedTuple):
    """Calibration data of one layer.

    Attributes:
      statistics: of its router.
      rows: inputs of its bank; None: only the router was recorded.
      sensitivities: of every matrix, see `sensitivities`; None: not measured.
    """

    statistics: RouterStatistics
    rows: LayerRows | None = None
    sensitivities: Mapping[str, float] | None = None


NOT_YET_RECORDED = LayerCalibration(
    RouterStatistics(np.zeros(0), np.zeros(0), np.zeros((0, 0))),
    LayerRows(np.zeros((0, 0), np.float32), np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)),
)
"""Stands for a recording that does not exist yet, in checks beforehand; nobody reads its content."""


class Calibration(NamedTuple):
    """The recording of a model on a text.

    Attributes:
      text: the file.
      layers: by the index of the MoE layer.
      folder: of the recording; None: in memory.
      keep: an object that must live as long as this: its folder, if that is a temporary one.
    """

    text: Path
    layers: Mapping[int, LayerCalibration]
    folder: Path | None = None
    keep: Any = None


def inputs_file(folder: Path, layer: int) -> Path:
    """The file of the inputs of a layer's bank."""
    return folder / f"{layer}.inputs.npy"


def layer_file(folder: Path, layer: int) -> Path:
    """The file of a layer's other data; if it exists, the layer is complete."""
    return folder / f"{layer}.npz"


def create_inputs(folder: Path, layer: int, shape: tuple[int, int]) -> np.memmap:
    """Makes a new file of inputs, to be filled; bfloat16, which NumPy's format stores as 16 bits."""
    return np.lib.format.open_memmap(inputs_file(folder, layer), mode="w+", dtype=np.uint16, shape=shape)


def write_layer(
    folder: Path,
    layer: int,
    experts: Int[np.ndarray, "T k"],
    weights: Float[np.ndarray, "T k"],
    statistics: RouterStatistics,
) -> None:
    """Completes a layer whose inputs are on the disk."""
    with as_path(layer_file(folder, layer)).replacing() as file:
        np.savez(file, allow_pickle=False, experts=experts, weights=weights, **statistics._asdict())


def gradients_file(folder: Path, layer: int) -> Path:
    """The file of the weights of tokens, see `sensitivities`."""
    return folder / f"{layer}.gradients.npy"


def read_layer(folder: Path, layer: int, *, gradients: bool = False) -> LayerCalibration:
    """Reads a complete layer.

    Args:
      folder: of the recording.
      layer: its index.
      gradients: whether tokens are weighted by the loss's gradients, which must then be recorded.

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


def complete(folder: Path, key: Mapping[str, Any]) -> None:
    """Marks the recording as complete."""
    as_path(folder / KEY_FILE).write_durably(json.dumps(dict(key), indent=1).encode())
