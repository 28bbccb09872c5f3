"""Activations of rows before the first layer of a model: its embeddings, and what its eye makes of their pictures.

The tower runs over all pictures one layer after another, as the layers of the language model do afterwards.
"""

import itertools
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from moe_jax.checks.streamed_layers import apply_final_norm, embed_tokens
from moe_jax.checks.streamed_vision import embed_patches, project_features
from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.compression.calibration.placed_layer import PlacedLayer, batches_of, open_states
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.model_io.loading import TOWER
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig
from moe_jax.nn.projector import tokens_per_picture

Room = Callable[[str, tuple[int, ...]], np.ndarray]
"""Returns a float32 array of a name and a shape; one of the same name before may be lost."""


def eye_bytes(config: ModelConfig, rows: CalibrationRows) -> int:
    """Returns the bytes that the activations of the eye take on the disk while rows are embedded."""
    if not rows.num_pictures:
        return 0
    vision = config.check_sees("pictures")
    assert vision.tower.patches is not None
    kept = (2 + len(set(vision.hidden_states))) * vision.tower.patches.num_positions * vision.tower.d_model
    return 4 * rows.num_pictures * (kept + tokens_per_picture(vision, config.d_model) * config.d_model)


def embedded_rows(
    source: ModelSource,
    rows: CalibrationRows,
    batches: list[slice],
    size: int,
    *,
    mesh: Mesh,
    folder: Path | None = None,
    progress: Progress = no_progress,
) -> Iterator[tuple[slice, Float[np.ndarray, "B L d"]]]:
    """Yields every batch of rows with its activations, float32, 0 at padding.

    Args:
      source: the model.
      rows: what it is run on.
      batches: of rows.
      size: number of pictures at a time.
      mesh: devices that share them.
      folder: where the activations of the eye lie meanwhile; None: in memory.
      progress: called after every layer of the eye.

    Raises:
      InputError: if the model takes no pictures, and there are some, or what it makes of them is not finite.
    """
    config = source.config
    features: np.ndarray | None = None
    if rows.num_pictures:
        if folder is not None:
            folder.mkdir(exist_ok=True)
        features = _features(source, rows, size, _room(folder), mesh, progress)
    embedding = {path: source.read(path) for path in source.specs() if path.startswith("embed/")}
    before = np.cumsum([0, *rows.pictures])  # pictures of the rows before
    for batch in batches:
        x = np.asarray(embed_tokens(config, embedding, rows.tokens[batch]), np.float32)
        if features is not None:
            slots, per_picture = rows.slots[batch], features.shape[1]
            which = before[batch.start : batch.stop, None] * per_picture + slots - 1
            x = x.copy()
            x[slots > 0] = features.reshape(-1, features.shape[2])[which[slots > 0]]
        yield batch, np.where(rows.valid[batch][:, :, None], x, 0)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _room(folder: Path | None) -> Room:
    if folder is None:
        return lambda name, shape: np.empty(shape, np.float32)
    return lambda name, shape: open_states(folder / f"{name}.npy", np.float32, shape)


def _features(
    source: ModelSource, rows: CalibrationRows, size: int, room: Room, mesh: Mesh, progress: Progress
) -> Float[np.ndarray, "P n d"]:
    """Returns what the projector makes of all pictures. Memory holds a layer of the tower and a batch of pictures."""
    config = source.config
    vision = config.check_sees("pictures")
    tower, stop, count = vision.tower, max(vision.hidden_states), rows.num_pictures
    size, batches = batches_of(count, size, mesh)

    def leaves(part: str) -> dict[str, jax.Array]:
        return {path: jnp.asarray(source.read(path)) for path in source.specs() if path.startswith(part)}

    def apply(function: Callable[..., Any], name: str, given: Iterator[tuple[slice, Any]]) -> np.ndarray:
        """Fills an array with a function of the batches."""
        made: np.ndarray | None = None
        for batch, x in given:
            y = np.asarray(function(x), np.float32)
            if not np.isfinite(y).all():
                raise InputError(f"calibration: {name} of the image encoder gives what is not finite; mend the model")
            made = room(name, (count, *y.shape[1:])) if made is None else made
            made[batch] = y
        assert made is not None, "there are pictures"
        return made

    def name_of(index: int) -> str:
        """A hidden state that is taken stays; of others, that of the layer before is whole until the next one is."""
        return f"layer {index}" if index in vision.hidden_states else f"every other layer {index % 2}"

    enter = partial(jax.jit(partial(embed_patches, vision)), leaves(f"{TOWER}patches/"))
    pictures = rows.each_picture()
    given = ((batch, np.stack(list(itertools.islice(pictures, batch.stop - batch.start)))) for batch in batches)
    states = {0: apply(enter, name_of(0), given)}
    programs: dict[Any, Any] = {}
    for index in range(min(stop, tower.num_layers)):
        progress("looking at pictures", index, stop)
        with jax.set_mesh(mesh):
            layer = PlacedLayer(source, index, mesh, programs, of_tower=True)
            before = states[index]
            given = ((batch, np.asarray(before[batch])) for batch in batches)
            states[index + 1] = apply(lambda x, layer=layer: layer.apply(x, size)[0], name_of(index + 1), given)
        if index not in vision.hidden_states:
            del states[index]
    if stop == tower.num_layers:
        where = f"{TOWER}final_norm/"
        norm = partial(jax.jit(partial(apply_final_norm, tower, where=where)), leaves(where))
        last = states[stop]
        states[stop] = apply(norm, "final norm", ((batch, np.asarray(last[batch])) for batch in batches))
    taken = [states[index] for index in vision.hidden_states]
    project = partial(jax.jit(partial(project_features, config)), leaves("vision/projector/"))
    return apply(project, "projector", ((batch, [np.asarray(one[batch]) for one in taken]) for batch in batches))
