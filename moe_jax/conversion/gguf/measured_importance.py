"""The importance of inputs, measured: what the matrices of a GGUF file are given on a text, layer after layer."""

import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from moe_jax.conversion.table import Mapped
from moe_jax.conversion.writing.leaf_writing import CalibratingPass
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import progress_bars
from moe_jax.files.storage_path import as_path


class Measured(NamedTuple):
    """Squares of what matrices were given, by their names in GGUF files.

    Attributes:
      sums: of the squares of inputs, Float32[experts, in]; of a single matrix [1, in], and of a stack of heads, which
        have the same inputs, a row for each.
      counts: of how many tokens, Float32[experts]. An expert that no token came to counts as one, with the mean
        squares of the whole layer.
    """

    sums: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]

    @property
    def importance(self) -> dict[str, np.ndarray]:
        """The mean squares, Float32[experts, in], as `read_imatrix` makes them of these."""
        return {name: sums / self.counts[name][:, None] for name, sums in self.sums.items()}


def measure(
    mapped: Mapped, names: Collection[str], num_layers: int, calibration: CalibratingPass, console: Console
) -> Measured:
    """Runs a model over the text of a pass, and keeps what was found beside the pass, where it goes on after a kill.

    Args:
      mapped: the pieces of the model's leaves.
      names: of the tensors to measure; those whose inputs are no inputs of a linear map are left out.
      num_layers: of the model.
      calibration: the pass.
      console: shows the progress.
    """
    by_layer: dict[int | None, dict[str, dict[str, int]]] = {}
    for path, pieces in mapped.pieces.items():
        found = {
            piece.tensor: 1 if len(mapped.tensors[piece.tensor]) == 2 else mapped.tensors[piece.tensor][0]
            for piece in pieces
            if piece.transpose and piece.tensor in names
        }
        if path.endswith("/kernel") and found:
            layer = int(path.split("/")[1]) if path.startswith("layers/") else None
            by_layer.setdefault(layer, {})[path] = found
    every = Measured({}, {})
    with progress_bars(console) as progress:
        for layer in [*range(num_layers), None]:
            progress("calibrating", num_layers if layer is None else layer, num_layers)
            file = calibration.folder / f"{'head' if layer is None else layer}.squares.npz"
            if layer is not None and layer >= calibration.next:
                calibration.begin(layer)
                _write(file, _of_layer(by_layer.get(layer, {}), calibration))
                calibration.finish({})
            elif layer is None and not file.is_file():
                _write(file, _of_layer(by_layer.get(layer, {}), calibration))
            own = _read(file)
            every.sums.update(own.sums)
            every.counts.update(own.counts)
    return every


def _of_layer(paths: Mapping[str, Mapping[str, int]], calibration: CalibratingPass) -> Measured:
    """Measures the kernels of a layer, whose tensors are given with the number of matrices in each."""
    measured = Measured({}, {})
    for path, tensors in paths.items():
        squares = np.stack(list(calibration.squares(path)))
        tokens, weights = np.array(list(calibration.counts(path))).T
        # Readers know nothing of weights, and of experts without a token take nothing.
        counts = np.maximum(tokens, 1).astype(np.float32)
        sums = (squares * (counts / weights)[:, None]).astype(np.float32)
        for name, stacked in tensors.items():
            alike = stacked // len(sums)
            measured.sums[name], measured.counts[name] = np.repeat(sums, alike, axis=0), np.repeat(counts, alike)
    return measured


def _write(file: Path, measured: Measured) -> None:
    parts = {f"{part} {name}": values for part, own in measured._asdict().items() for name, values in own.items()}
    with as_path(file).replacing() as content:
        np.savez(content, **parts)


def _read(file: Path) -> Measured:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            parts = {tuple(name.split(" ")): arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"the calibration {file.parent} is damaged ({file.name}: {error}); remove it") from None
    own = {part: {name: values for (kind, name), values in parts.items() if kind == part} for part in Measured._fields}
    return Measured(**own)
