"""Measures how much the loss depends on what MoE layers give for each token, and predictions on each matrix of experts.

*Tokens*: an error e of the experts' output for a token changes the loss by about `g . e`, where g is the gradient of
the loss with respect to the layer's output for that token. If e is unknown, the square of this is `|g|^2 |e|^2 / d` on
average. So tokens are weighted by `|g|^2`, the trace of the empirical Fisher information of that output. If a norm
stands between the experts and the layer's output, its scale is ignored. The model runs forwards over the text, and the
input of every layer is stored on the disk, in bfloat16; then the gradients run backwards. Memory holds one layer and
one batch, and a pass that was killed continues at the layer where it was.

*Matrices*: one matrix of the experts of one layer at a time is coded in a few bits, as it may be later. The divergence
KL(p || q) of the model's predictions from the original ones is divided by the error of that matrix's outputs. All
matrices are tried in one pass (`divergences`).
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from moe_jax.checks.streamed_layers import head_leaves, text_loss
from moe_jax.compression.calibration.calibration_rows import CalibrationRows, as_rows
from moe_jax.compression.calibration.divergences import divergences, few_rows
from moe_jax.compression.calibration.embedded_rows import embedded_rows, eye_bytes
from moe_jax.compression.calibration.placed_layer import PlacedLayer, batches_of, open_states
from moe_jax.compression.calibration.recording import (
    EYE,
    NEXT,
    LayerCalibration,
    check_room,
    gradients_file,
    note_progress,
)
from moe_jax.compression.coding.coder import LeastOutputError, expert_coders
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.core.finite import cast
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models.config import ModelConfig

# Below the folder of the recording, as long as the pass is not complete.
_STATES = "gradients"
_FORWARDS, _BACKWARDS = "forwards", "backwards"


def has_gradients(folder: Path, layers: tuple[int, ...]) -> bool:
    """Whether a recording has the gradients of all these layers."""
    return not (folder / _STATES / NEXT).exists() and all(gradients_file(folder, i).is_file() for i in layers)


def record_gradients(
    source: ModelSource,
    windows: Int[np.ndarray, "N L"] | CalibrationRows,
    folder: Path,
    *,
    mesh: Mesh,
    batch_size: int = 8,
    progress: Progress = no_progress,
) -> None:
    """Adds the weights of tokens by their squared gradients to a recording, or continues an interrupted pass.

    The arguments are those of `recording.record`; layers are passed forwards and backwards.

    Raises:
      InputError: if windows have a single token, gradients are not finite or all zero, or there is no room on the disk.
    """
    rows = as_rows(windows)
    if rows.length < 2:
        raise InputError("gradients need windows of two tokens and more: nothing follows on a single one")
    states = folder / _STATES
    states.mkdir(exist_ok=True)
    # The inputs of all layers, and gradients of two layers.
    needed = rows.tokens.size * source.config.d_model * (2 * (source.config.num_layers + 1) + 8)
    check_room(states, needed + eye_bytes(source.config, rows), f"gradients of {rows.count} tokens take")
    work = _GradientPass(
        source=source,
        rows=rows,
        folder=folder,
        states=states,
        mesh=mesh,
        batch_size=batch_size,
        progress=progress,
    )
    direction, begin = _FORWARDS, 0
    if (states / NEXT).is_file():
        direction, layer = (states / NEXT).read_text("utf-8").split()
        begin = int(layer)
    if direction == _FORWARDS:
        work.forwards(begin)
        work.begin_backwards()
        begin = source.config.num_layers
    work.backwards(begin)
    (states / NEXT).unlink()  # from here on a pass that is stopped has nothing left to do
    shutil.rmtree(states)


@dataclasses.dataclass(kw_only=True)
class _GradientPass:
    """The steps of the pass; each continues at a layer and ends with everything on the disk that the next one needs."""

    source: ModelSource
    rows: CalibrationRows
    folder: Path
    states: Path
    mesh: Mesh
    batch_size: int
    progress: Progress

    def __post_init__(self) -> None:
        config = self.config = self.source.config
        self.size, self.batches = batches_of(len(self.rows), self.batch_size, self.mesh)
        self.shape = (*self.rows.tokens.shape, config.d_model)
        self.first, self.layers = min(config.moe_layers), config.num_layers
        self.programs: dict[Any, Any] = {}

    def forwards(self, begin: int) -> None:
        """Stores the input of every layer from layer `begin` on, and the output of the last one."""
        if begin == 0:
            given = self.inputs_of(0, to_fill=True)
            folder = self.states / EYE
            for batch, x in embedded_rows(
                self.source, self.rows, self.batches, self.size, folder=folder, mesh=self.mesh, progress=self.progress
            ):
                given[batch] = _bits(x)
            note_progress(self.states, given, f"{_FORWARDS} 0")
        with jax.set_mesh(self.mesh):
            for i in range(begin, self.layers):
                self.tell(i)
                layer = PlacedLayer(self.source, i, self.mesh, self.programs)
                given, after = self.inputs_of(i), self.inputs_of(i + 1, to_fill=True)
                for batch in self.batches:
                    after[batch] = _bits(layer.apply(_floats(given[batch]), self.size, self.rows.valid[batch])[0])
                note_progress(self.states, after, f"{_FORWARDS} {i + 1}")

    def begin_backwards(self) -> None:
        """Stores the gradient of the loss with respect to the output of the last layer.

        The logits of one window are in memory at a time.
        """
        leaves = {path: self.source.read(path) for path in head_leaves(self.config, self.source.specs())}
        placed = jax.tree.map(jnp.asarray, leaves)

        def loss(x: jax.Array, placed: dict[str, jax.Array], targets: jax.Array, weights: jax.Array) -> jax.Array:
            return text_loss(self.config, placed, x[None], targets[None], weights[None])

        of_window = jax.jit(jax.grad(loss))
        given, gradients = self.inputs_of(self.layers), self.gradients(self.layers, to_fill=True)
        for n, (targets, weights) in enumerate(zip(self.rows.targets, self.rows.weights, strict=True)):
            gradients[n] = np.asarray(of_window(_floats(given[n]), placed, targets, weights))
        note_progress(self.states, gradients, f"{_BACKWARDS} {self.layers}")

    def backwards(self, begin: int) -> None:
        """Takes the gradient with respect to the input of layer `begin` back to the first MoE layer."""
        with jax.set_mesh(self.mesh):
            for i in range(begin - 1, self.first - 1, -1):
                self.tell(2 * self.layers - 1 - i)
                after = self.gradients(i + 1)
                if i in self.config.moe_layers:
                    _write(self.folder, i, after, self.rows)
                if i == self.first:
                    break
                layer = PlacedLayer(self.source, i, self.mesh, self.programs)
                given, before = self.inputs_of(i), self.gradients(i, to_fill=True)
                for batch in self.batches:
                    gradient, valid = np.asarray(after[batch]), self.rows.valid[batch]
                    before[batch] = layer.gradient_before(_floats(given[batch]), gradient, self.size, valid)
                note_progress(self.states, before, f"{_BACKWARDS} {i}")
        self.tell(2 * self.layers - self.first)

    def inputs_of(self, layer: int, *, to_fill: bool = False) -> np.memmap:
        """Opens the input of a layer, bfloat16 as 16 bits."""
        return open_states(self.states / f"{layer}.npy", np.uint16, self.shape if to_fill else None)

    def gradients(self, layer: int, *, to_fill: bool = False) -> np.memmap:
        """Opens the gradients with respect to the input of a layer, float32.

        Two files in turn: that of the layer after is whole until this one is.
        """
        return open_states(self.states / f"backwards{layer % 2}.npy", np.float32, self.shape if to_fill else None)

    def tell(self, done: int) -> None:
        self.progress("measuring what depends on tokens", done, 2 * self.layers - self.first)


def _write(folder: Path, layer: int, gradients: Float[np.ndarray, "N L d"], rows: CalibrationRows) -> None:
    """Writes the squared norms of gradients, of all tokens but padding, divided by their mean."""
    squares = np.concatenate(
        [np.sum(np.square(g[valid], dtype=np.float64), axis=1) for g, valid in zip(gradients, rows.valid, strict=True)]
    )
    mean = float(squares.mean())
    if not np.isfinite(mean):
        raise InputError(f"calibration: the gradients at what layer {layer} gives are not finite; mend the model")
    if mean <= 0:
        raise InputError(f"calibration: the loss of the text does not depend on what layer {layer} gives")
    with as_path(gradients_file(folder, layer)).replacing() as file:
        np.save(file, (squares / mean).astype(np.float32), allow_pickle=False)


def _bits(x: Any) -> np.ndarray:
    return np.asarray(x).astype(jnp.bfloat16).view(np.uint16)


def _floats(bits: np.ndarray) -> Float[np.ndarray, "... d"]:
    return np.asarray(bits).view(jnp.bfloat16).astype(np.float32)


TRIED_BITS, TRIED_GROUP_SIZE = 3, 128
LEAST_DIVERGENCE = 1e-9
"""Nats per token; float32 cannot tell less from nothing."""


def measure_sensitivities(
    source: ModelSource,
    windows: Int[np.ndarray, "N L"] | CalibrationRows,
    calibration: Callable[[int], LayerCalibration],
    *,
    mesh: Mesh,
    batch_size: int = 8,
    progress: Progress = no_progress,
) -> dict[int, dict[str, float]]:
    """Returns the divergence, nats per token, per unit of `output_error(...)`; by layer index and name of the matrix.

    The source has full experts, and `calibration` gives that of an MoE layer. Of the windows the first 1024 tokens are
    enough. The other arguments are those of `recording.record`.

    Raises:
      InputError: if experts are not full, a divergence is not finite, or there is no room in memory.
    """
    config = source.config
    check_full_experts(config)
    errors: dict[tuple[int, str], float] = {}

    def try_layer(layer: PlacedLayer, given: Float[np.ndarray, "N L d"]) -> Iterator[tuple[str, PlacedLayer]]:
        if not layer.moe:
            return
        source_layer = SourceLayer(source, layer.index, calibration=calibration(layer.index))
        for name in source_layer.shapes:
            coded, errors[layer.index, name] = _coded(source_layer, name)
            yield name, layer.with_leaves({f"mlp/experts/{name}/kernel": coded})

    counts = [len(config.moe(i).expert.matrices) if i in config.moe_layers else 0 for i in range(config.num_layers)]
    how: Any = {"mesh": mesh, "batch_size": batch_size, "progress": progress}
    measured = divergences(source, few_rows(as_rows(windows)), try_layer, counts, **how)
    found: dict[int, dict[str, float]] = {i: {} for i in config.moe_layers}
    for (i, name), divergence in measured.items():
        found[i][name] = sensitivity_of(divergence, errors[i, name])
    return found


def sensitivity_of(divergence: float, error: float) -> float:
    """Returns a divergence per unit of the error that made it.

    Less than `LEAST_DIVERGENCE` counts as that: it is lost in the rounding of float32. A sensitivity of zero would say
    that all codes are equally good, however large their errors.
    """
    return max(divergence, LEAST_DIVERGENCE) / max(error, LEAST_DIVERGENCE)


def check_full_experts(config: ModelConfig) -> None:
    """Raises `InputError` for a model that `measure_sensitivities` cannot measure."""
    for i in config.moe_layers:
        bank = config.moe(i).bank
        if bank.form.over_base:
            raise InputError(
                f"layer {i}: how much depends on it can only be measured of full experts, and it has {bank.kind} ones; "
                "write the model with moe-jax export, and compress that"
            )


def output_error(error: float, norm: float) -> float:
    """Returns the squared relative error of a matrix's outputs."""
    return error / norm if norm > 0 else 0.0


def _coded(layer: SourceLayer, name: str) -> tuple[Float[np.ndarray, "E i o"], float]:
    """The kernels of a matrix in codes, and the error of their outputs."""
    stacked, error, norm = [], 0.0, 0.0
    next_coder = iter(expert_coders(layer, name)).__next__
    for kernel in layer.kernels(name):
        coder = next_coder()
        assert isinstance(coder, LeastOutputError)
        wide = kernel.astype(np.float32)
        made = coder.quantize(wide, bits=TRIED_BITS, group_size=TRIED_GROUP_SIZE).approximation
        error += coder.squared(made - wide)
        norm += coder.squared(wide)
        del coder  # with its moment, which is large, before the next one is made
        stacked.append(cast(f"the {name} kernels of layer {layer.index}", made, kernel.dtype))
    return np.stack(stacked), output_error(error, norm)
