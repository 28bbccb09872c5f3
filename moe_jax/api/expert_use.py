"""Measures which experts tokens of pictures and of texts are given to, and which patch each of them sees."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.figures.expert_use import MOST_PICTURES, ExpertUse, SeenPatches
from moe_jax.nn import Decoder
from moe_jax.nn.projector import grid_of_tokens


def measure_expert_use(
    model: Decoder, rows: CalibrationRows, *, batch_size: int, mesh: Mesh, progress: Progress = no_progress
) -> ExpertUse:
    """Runs a model over rows, and counts what its routers decide; all chosen experts of a token count alike.

    Args:
      model: a decoder with MoEs, on `mesh`.
      rows: of the data, with pictures or without.
      batch_size: rows computed at once; the devices of the mesh divide it.
      progress: called after every batch.
    """
    config, layers = model.config, model.config.moe_layers
    of_pictures = {layer: np.zeros(config.moe(layer).num_experts) for layer in layers}
    of_text = {layer: np.zeros(config.moe(layer).num_experts) for layer in layers}
    grid = None if config.vision is None else grid_of_tokens(config.vision, config.d_model)
    graphdef, state = nnx.split(model)

    @jax.jit
    def decide(state: nnx.State, batch: dict[str, Any]) -> dict[int, Any]:
        found = nnx.merge(graphdef, state).activations(**batch, routing=True)  # logits are not asked for
        return {layer: found.routing[layer].experts for layer in layers}

    seen: list[SeenPatches] = []
    done = 0
    for batch, slots, valid in _batches(rows, batch_size):
        with jax.set_mesh(mesh):
            decided = jax.tree.map(np.asarray, decide(state, batch))
        for layer, experts in decided.items():
            for counts, which in ((of_pictures, slots > 0), (of_text, slots == 0)):
                chosen = experts[which & valid].reshape(-1)
                counts[layer] += np.bincount(chosen[chosen >= 0], minlength=len(counts[layer]))
        if grid is not None and "pixels" in batch and len(seen) < MOST_PICTURES:
            seen += _patches(batch["pixels"], slots, decided, grid)
        done += len(slots)
        progress("running over rows", min(done, len(rows)) - 1, len(rows))
    tokens = int((rows.slots > 0).sum()), int(rows.predicting.sum())
    return ExpertUse(of_pictures, of_text, seen[:MOST_PICTURES], tokens)


def _batches(rows: CalibrationRows, size: int) -> Iterator[tuple[dict[str, Any], np.ndarray, np.ndarray]]:
    """Yields the arguments of the model, slots, and the tokens that are not padding; the last batch is filled up."""
    most, pixels = max(rows.pictures, default=0), iter(rows.pixels)
    for start in range(0, len(rows), size):
        stop = min(start + size, len(rows))
        fill = ((0, size - (stop - start)), (0, 0))
        tokens, slots, valid = (np.pad(one[start:stop], fill) for one in (rows.tokens, rows.slots, rows.valid))
        batch: dict[str, Any] = {"tokens": tokens, "valid": valid}
        if most:
            given = [next(pixels)() if count else None for count in rows.pictures[start:stop]]
            shape = next((one.shape[1:] for one in given if one is not None), None)
            if shape is not None:
                batch["pixels"] = np.zeros((size, most, *shape), np.uint8)
                for row, one in enumerate(given):
                    if one is not None:
                        batch["pixels"][row, : len(one)] = one
                batch["slots"] = slots
        yield batch, slots, valid


def _patches(
    pixels: np.ndarray, slots: np.ndarray, decided: dict[int, np.ndarray], grid: tuple[int, int]
) -> list[SeenPatches]:
    """Returns the pictures of a batch that stand whole in their rows."""
    found, each = [], grid[0] * grid[1]
    for row in range(len(slots)):
        for picture in range(int(slots[row].max()) // each):
            places = np.flatnonzero((slots[row] > picture * each) & (slots[row] <= (picture + 1) * each))
            experts = {layer: one[row, places, 0].reshape(grid) for layer, one in decided.items()}
            found.append(SeenPatches(pixels[row, picture], experts))
    return found
