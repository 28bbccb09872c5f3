"""A pass over a text by a model whose layers are put in codes, one after another.

While the codes of a layer are chosen, it is known what its linear maps are given on the text, by the layers before it
as they are in codes: so later layers make up for the errors of earlier ones, as in GPTQ (arXiv 2210.17323, section
4). Beside it the model runs as it was, so that at the end both losses on the text are known. Memory holds a layer
before and after; the activations between two layers are a file, and a pass that was killed continues at its layer.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from moe_jax.checks.streamed_layers import apply_final_norm, head_leaves, output_logits
from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.compression.calibration.embedded_rows import embedded_rows, eye_bytes
from moe_jax.compression.calibration.expert_statistics import moments, squares, tokens_per_expert, total_weights
from moe_jax.compression.calibration.placed_layer import PlacedLayer, batches_of, open_states
from moe_jax.compression.calibration.recording import (
    EYE,
    NEXT,
    NOT_YET_RECORDED,
    LayerRows,
    check_room,
    inputs_file,
    note_progress,
)
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.files.file_work import FileWorkplace
from moe_jax.files.staging import ANALYSIS
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.in_memory import SourceWithLeaves
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig
from moe_jax.models.linear_codes import HEAD_KERNEL

_WHOLE, _CODED = 0, 1  # of the two models whose activations a file has


class CodedPass:
    """The pass. Layers are asked for in order: `begin`, then `moments` or `squares` of its kernels, then `finish`.

    Attributes:
      next: the layer that comes next; those before are finished.
      folder: of this pass alone; what a caller keeps there lives as long as the pass.
      shape: how many rows the text has, and tokens in each.
    """

    def __init__(
        self,
        source: ModelSource,
        rows: CalibrationRows,
        folder: Path,
        *,
        mesh: Mesh,
        batch_size: int = 8,
        embedding: ModelSource | None = None,
        written: int | None = None,
    ):
        """Embeds the text, or continues an interrupted pass over the same one.

        Args:
          source: the model, with whole experts.
          rows: of the text.
          folder: of this pass alone.
          mesh: devices that share the rows of a batch.
          batch_size: rows computed at a time.
          embedding: the model with the embedding as it is stored now; None: it stays as it is.
          written: how many layers the caller still has; an interrupted pass that is further begins anew, for those that
            the caller lacks are made again. None: all that the pass has finished.

        Raises:
          InputError: if the model has an encoder, or there is no room on the disk.
        """
        source.config.check_no_encoder("a calibration")
        self._source, self._rows, self.folder, self._mesh = source, rows, folder, mesh
        self.shape = (len(rows), rows.length)
        config, tokens = source.config, rows.tokens.size
        # Activations of two models before and after a layer, and the inputs of a bank.
        needed = config.d_model * (4 * 2 * 2 * tokens + 2 * rows.count * bool(config.moe_layers))
        check_room(folder, needed + eye_bytes(config, rows), f"a calibration on {rows.count} tokens takes")
        self._size, self._batches = batches_of(len(rows), batch_size, mesh)
        self._programs: dict[Any, Any] = {}
        self._experts: SourceLayer | None = None  # of the layer that is begun, if it is an MoE
        self._states_shape = (2, *self.shape, config.d_model)
        self.next = int((folder / NEXT).read_text("utf-8")) if has_begun(folder) else 0
        if written is not None and self.next > written:
            (folder / NEXT).unlink()
            self.next = 0
        if not has_begun(folder):
            states = self._states(0, to_fill=True)
            for model, given in enumerate([source] if embedding is None else [source, embedding]):
                embedded = embedded_rows(given, rows, self._batches, self._size, folder=folder / EYE, mesh=mesh)
                for batch, x in embedded:
                    states[model:, batch] = x  # of the one in codes, too, unless there is another one
            note_progress(folder, states, "0")

    def begin(self, layer: int) -> None:
        """Runs a layer on what the layers before it give in codes."""
        assert layer == self.next, (layer, self.next)
        self._layer = PlacedLayer(self._source, layer, self._mesh, self._programs)
        self._moments: dict[str, Array] = {}
        inputs, experts, weights, start = None, [], [], 0
        if self._layer.moe:
            inputs = open_states(inputs_file(self.folder, 0), np.uint16, (self._rows.count, self._states_shape[-1]))
        states, self._after = self._states(layer)[_CODED], self._states(layer + 1, to_fill=True)
        with jax.set_mesh(self._mesh):
            for batch in self._batches:
                valid = self._rows.valid[batch]
                y, found, calls = self._layer.moments(np.asarray(states[batch]), self._size, valid)
                self._put(_CODED, batch, y)
                for path, moment in found.items():
                    self._moments[path] = self._moments[path] + moment if path in self._moments else moment
                for call in calls:
                    assert inputs is not None
                    counted = np.flatnonzero(valid)
                    inputs[start : start + len(counted)] = np.asarray(call.tokens)[counted].view(np.uint16)
                    start += len(counted)
                    experts.append(np.asarray(call.routing.experts)[counted])
                    weights.append(np.asarray(call.routing.weights)[counted])
        if inputs is not None:
            recorded = LayerRows(inputs.view(jnp.bfloat16), np.concatenate(experts), np.concatenate(weights))
            calibration = NOT_YET_RECORDED._replace(rows=recorded)
            self._experts = SourceLayer(self._source, layer, calibration=calibration)

    def rows_of_experts(self) -> LayerRows:
        """Returns the inputs of the experts of the layer, which is an MoE."""
        assert self._experts is not None and self._experts.rows is not None
        return self._experts.rows

    def moments(self, path: str) -> Iterator[Float[np.ndarray, "i i"]]:
        """Yields the second moment of what a kernel of the layer is given, or one for every expert; sums over tokens.

        The head's are known when all layers are finished.
        """
        if path == HEAD_KERNEL:
            yield self.moment_of_head()
        elif self._experts is not None and "/experts/" in path:
            yield from moments(self._experts, _matrix(path))
        else:
            yield np.asarray(self._moments[_below(path)])

    def squares(self, path: str) -> Iterator[Float[np.ndarray, " i"]]:
        """Yields the diagonals of `moments`."""
        if self._experts is not None and "/experts/" in path:
            yield from squares(self._experts, _matrix(path))
        else:
            yield from (np.diagonal(moment) for moment in self.moments(path))

    def counts(self, path: str) -> Iterator[tuple[int, float]]:
        """Yields of how many tokens `squares` are a sum, and the sum of the weights that these have in it.

        Of an expert, the tokens are those routed to it.
        """
        if self._experts is not None and "/experts/" in path:
            yield from zip(tokens_per_expert(self._experts).tolist(), total_weights(self._experts), strict=True)
        else:
            yield self._rows.count, float(self._rows.count)

    def finish(self, decoded: Mapping[str, np.ndarray]) -> None:
        """Ends a layer, given the leaves that are in codes now, by their paths: what the codes stand for.

        Raises:
          InputError: if what the layer gives is not finite.
        """
        leaves = {_below(path): leaf for path, leaf in decoded.items()}
        self._end(self._layer.with_leaves(leaves) if decoded else None)

    def finish_as(self, written: ModelSource) -> None:
        """Ends a layer, given a model that has it as it is stored now; errors as of `finish`."""
        self._end(PlacedLayer(written, self.next, self._mesh, self._programs))

    def _end(self, coded: PlacedLayer | None) -> None:
        before, after = self._states(self.next), self._after
        # What `begin` found is that of a layer without codes, after the coded layers before it.
        if all(np.array_equal(before[_WHOLE, batch], before[_CODED, batch]) for batch in self._batches):
            after[_WHOLE] = after[_CODED]
        else:
            self._apply(self._layer, before, _WHOLE)
        if coded is not None:
            self._apply(coded, before, _CODED)
        self.next += 1
        note_progress(self.folder, after, str(self.next))
        del self._layer, self._moments, self._after
        self._experts = None

    def _apply(self, layer: PlacedLayer, before: Float[np.ndarray, "2 N L d"], model: int) -> None:
        with jax.set_mesh(self._mesh):
            for batch in self._batches:
                y, _ = layer.apply(np.asarray(before[model, batch]), self._size, self._rows.valid[batch])
                self._put(model, batch, y)

    def _put(self, model: int, batch: slice, y: Float[np.ndarray, "B L d"]) -> None:
        """Stores what the layer gives to one of the two models; raises `InputError` if it is not finite."""
        if not np.isfinite(y).all():
            raise InputError(f"calibration: what layer {self.next} gives is not finite; mend the model")
        self._after[model, batch] = y

    def losses(self, decoded: Mapping[str, np.ndarray]) -> tuple[float, float]:
        """Returns the losses of the text, nats per token, of the model as it was, and in codes.

        They are known after the last layer, given the head if that is in codes.
        """
        before, after, _ = self.losses_of(SourceWithLeaves(self._source, self._source.config, decoded))
        return before, after

    def losses_of(self, written: ModelSource) -> tuple[float, float, float]:
        """Returns `losses`, given a model with the head as it is stored now, and KL(p || q) of what the two predict."""
        config, now = self._source.config, written.config
        leaves = {path: written.read(path) for path in head_leaves(now, written.specs())}

        @jax.jit
        def of_window(whole: Any, coded: Any, x: Array, y: Array, rows: tuple[Array, Array, Array]) -> Array:
            targets, weights, counted = rows
            p, q = (
                jax.nn.log_softmax(output_logits(one, own, states[None])[0].astype(jnp.float32))
                for one, own, states in ((config, whole, x), (now, coded, y))
            )
            likely = [-jnp.take_along_axis(told, targets[:, None], 1)[:, 0] @ weights for told in (p, q)]
            return jnp.stack([*likely, jnp.sum(jnp.sum(jnp.exp(p) * (p - q), axis=1), where=counted)])

        whole, coded = (jax.tree.map(jnp.asarray, own) for own in (self._last_leaves(), leaves))
        total, states, rows = np.zeros(3), self._states(self.next), self._rows
        for n in range(len(rows)):
            own = rows.targets[n], rows.weights[n], rows.predicting[n]
            total += np.asarray(of_window(whole, coded, *(np.asarray(one[n]) for one in states), own), np.float64)
        scored, counted = max(float(rows.weights.sum()), 1.0), max(float(rows.predicting.sum()), 1.0)
        before, after, divergence = (total / [scored, scored, counted]).tolist()
        return before, after, max(divergence, 0.0)

    def moment_of_head(self) -> Float[np.ndarray, "d d"]:
        """Returns the second moment of what the head is given, a sum over tokens, when all layers are finished."""
        states = self._states(self.next)[_CODED]
        return _moment_before_head(self._source.config, self._last_leaves(), states, self._rows, self._batches)

    def _last_leaves(self) -> dict[str, np.ndarray]:
        return {path: self._source.read(path) for path in head_leaves(self._source.config, self._source.specs())}

    def _states(self, layer: int, *, to_fill: bool = False) -> np.memmap:
        """Opens the inputs of a layer: of the whole model, and of the one in codes."""
        file = self.folder / f"states{layer % 2}.npy"
        return open_states(file, np.float32, self._states_shape if to_fill else None)


def has_begun(folder: Path) -> bool:
    """Whether the pass of this folder has embedded its text."""
    return (folder / NEXT).is_file()


def moment_of_head(
    source: ModelSource, rows: CalibrationRows, folder: Path, *, mesh: Mesh, batch_size: int = 8
) -> Float[np.ndarray, "d d"]:
    """Returns the second moment of what the head of a model is given on a text, a sum over tokens.

    The model runs over the text as it is, for the codes of an embedding that is also the head; `folder` is of the job
    alone, and keeps the result.
    """
    file = folder / "moment_of_head.npy"
    if not file.is_file():
        config, programs = source.config, {}
        size, batches = batches_of(len(rows), batch_size, mesh)
        with jax.set_mesh(mesh), tempfile.NamedTemporaryFile(dir=folder, suffix=".npy") as room:
            shape = (len(rows), rows.length, config.d_model)
            states = np.lib.format.open_memmap(room.name, mode="w+", dtype=np.float32, shape=shape)
            for batch, x in embedded_rows(source, rows, batches, size, mesh=mesh):
                states[batch] = x
            for i in range(config.num_layers):
                layer = PlacedLayer(source, i, mesh, programs)
                for batch in batches:
                    states[batch] = layer.apply(np.asarray(states[batch]), size, rows.valid[batch])[0]
            leaves = {path: source.read(path) for path in head_leaves(config, source.specs())}
            total = _moment_before_head(config, leaves, states, rows, batches)
        with as_path(file).replacing() as place:
            np.save(place, total, allow_pickle=False)
    return np.load(file, allow_pickle=False)


def _moment_before_head(
    config: ModelConfig,
    leaves: Mapping[str, np.ndarray],
    states: Float[np.ndarray, "N L d"],
    rows: CalibrationRows,
    batches: Sequence[slice],
) -> Float[np.ndarray, "d d"]:
    placed, total = jax.tree.map(jnp.asarray, dict(leaves)), jnp.zeros((config.d_model,) * 2, jnp.float32)

    @jax.jit
    def of_batch(leaves: Any, x: Array, valid: Array) -> Array:
        every = apply_final_norm(config, leaves, x).reshape(-1, config.d_model)
        counted = jnp.where(valid.reshape(-1, 1), every, 0.0)
        return jnp.matmul(counted.T, counted, precision="highest")

    for batch in batches:
        total = total + of_batch(placed, np.asarray(states[batch]), rows.valid[batch])
    return np.asarray(total)


@contextlib.contextmanager
def begun_pass(source: ModelSource, dst: Path, job: Any, *, rows: CalibrationRows, mesh: Mesh) -> Iterator[CodedPass]:
    """Begins the pass of a job that writes `dst`, in a folder beside it, or continues one that was killed.

    If `dst` is in a bucket, the folder is a temporary one, and an interrupted pass begins anew.
    """
    on_disk = as_path(dst).on_disk
    if on_disk is None:
        with tempfile.TemporaryDirectory(prefix="moe_jax_calibration_") as folder:
            yield CodedPass(source, rows, Path(folder), mesh=mesh)
        return
    # `dst` may be a file or a directory; nothing here becomes it.
    with FileWorkplace(on_disk, [job, rows.digest()], suffix=ANALYSIS) as work:
        yield CodedPass(source, rows, work.folder, mesh=mesh)


def _below(path: str) -> str:
    """Returns a path below its layer."""
    return path.split("/", 2)[2]


def _matrix(path: str) -> str:
    return path.removesuffix("/kernel").rpartition("/")[2]
