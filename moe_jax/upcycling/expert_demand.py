"""How much each expert of an MoE calls for copies: by how often a text's tokens go to it, or by the loss's gradient."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.distributed.sharding import path_name
from moe_jax.evaluation.held_out import run_to_head
from moe_jax.model_io.loading import disk_paths, load_model
from moe_jax.model_io.model_source import ModelSource
from moe_jax.nn import Decoder
from moe_jax.nn.filters import experts as of_experts
from moe_jax.nn.moe import stats_per_layer


def measure_demand(
    source: ModelSource,
    rows: CalibrationRows,
    *,
    by: Literal["use", "gradient"],
    progress: Progress = no_progress,
) -> dict[int, Float[np.ndarray, " E"]]:
    """Measures the demand for copies of every expert, by layer; float64. The whole model is in memory, float32.

    Args:
      source: a model with MoEs, without adapters.
      rows: of a text; one after the other is computed.
      by: `use`: the number of tokens that go to an expert. `gradient`: the root of the sum over the rows of the squared
        norm of the gradient of a row's mean loss by all parameters that are the expert's own.
      progress: called after every row.

    Raises:
      InputError: if the model has an encoder, the rows have pictures, or what is measured is not finite.
    """
    source.config.check_no_encoder("measuring experts")
    if rows.num_pictures:
        raise InputError("experts are measured on texts, and the data have pictures; give rows without any")
    graphdef, params, rest = nnx.split(load_model(source, param_dtype="float32"), of_experts, ...)

    def use(params: nnx.State, rest: nnx.State, batch: dict[str, Array]) -> dict[int, Array]:
        model = nnx.merge(graphdef, params, rest)
        stats = stats_per_layer(model.config, run_to_head(model, batch).router)
        return {layer: one.load * one.tokens for layer, one in stats.items()}

    def gradient(params: nnx.State, rest: nnx.State, batch: dict[str, Array]) -> dict[int, Array]:
        def loss(params: nnx.State) -> Array:
            model = nnx.merge(graphdef, params, rest)
            weights = batch["weights"] / jnp.maximum(jnp.sum(batch["weights"]), 1.0)
            return model.weighted_loss(run_to_head(model, batch).x, batch["targets"], weights)

        return _squares_of_experts(nnx.merge(graphdef, params, rest), jax.grad(loss)(params))

    measure = jax.jit(use if by == "use" else gradient)
    found = {i: np.zeros(source.config.moe(i).num_experts) for i in source.config.moe_layers}
    for done in range(len(rows)):
        for layer, of_row in jax.device_get(measure(params, rest, _row(rows, done))).items():
            found[layer] += of_row
        progress("measuring experts", done + 1, len(rows))
    for layer, each in found.items():
        if not np.isfinite(each).all():
            raise InputError(f"what is measured of the experts of layer {layer} is not finite; mend the model")
    return found if by == "use" else {layer: np.sqrt(each) for layer, each in found.items()}


def _row(rows: CalibrationRows, index: int) -> dict[str, Any]:
    """Returns a batch of one row."""
    arrays = {"tokens": rows.tokens, "targets": rows.targets, "weights": rows.weights}
    batch = {name: jnp.asarray(array[index : index + 1]) for name, array in arrays.items()}
    return batch | {"segment_ids": jnp.asarray(rows.valid[index : index + 1], jnp.int32)}


def _squares_of_experts(model: Decoder, gradient: nnx.State) -> dict[int, Float[Array, " E"]]:
    """Returns the squared norm of every expert's part of a gradient, by layer."""
    found: dict[int, Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = path_name(path)
        layers = [int(one.split("/")[1]) for one in disk_paths(model.config, name, model=model)]
        moe = model.config.moe(layers[0])
        if "/experts/base/" in name or leaf.shape[1] != moe.bank_experts:
            continue  # all experts have it in common
        squares = jnp.sum(jnp.square(leaf), axis=tuple(range(2, leaf.ndim)))[:, : moe.num_experts]
        for layer, of_layer in zip(layers, squares, strict=True):
            found[layer] = found.get(layer, jnp.zeros(moe.num_experts)) + of_layer
    return found
