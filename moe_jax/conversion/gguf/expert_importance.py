"""The importance of the inputs of experts, from an imatrix file of llama.cpp, for methods that compress them."""

import os
from collections.abc import Iterable, Mapping

import numpy as np

from moe_jax.conversion.gguf.architectures.gguf_architectures import check_written, only_moe
from moe_jax.conversion.gguf.gguf_metadata import described, tensor_shapes
from moe_jax.conversion.gguf.imatrix import read_imatrix
from moe_jax.conversion.hf_format import MergedModel, exported_config
from moe_jax.conversion.model_table import mapped as mapped_model
from moe_jax.conversion.table import FUSED
from moe_jax.core.errors import InputError
from moe_jax.model_io.model_source import ModelSource

_SEEN_BY = {"inputs": "up", "hidden": "down"}  # what is known, and a matrix that is given it


def read_expert_importance(
    path: str | os.PathLike[str], source: ModelSource, layers: Iterable[int]
) -> Mapping[int, Mapping[str, np.ndarray]]:
    """Reads the mean squares of what the experts of MoE layers are given.

    Args:
      path: the file, of either form.
      source: the model that it was made with, or one with the same experts.
      layers: indices of the MoE layers.

    Returns:
      By the index of the layer: `inputs` Float32[E, d] of the experts, and `hidden` Float32[E, f] activations.

    Raises:
      FileNotFoundError: if there is no such file.
      InputError: if it is no such file, or of another model, or lacks a layer, or if GGUF files, whose names of tensors
        it has, cannot hold the model.
    """
    check_written(source.config)
    config = exported_config(source.config, replicate_dense=True, all_moe=only_moe)
    description = described(config)
    leaves = MergedModel(source, description.config).specs()
    table = description.architecture.table_of(description.config)
    mapped = mapped_model(description.config, leaves, FUSED, table=table)
    shapes = tensor_shapes(mapped.tensors, description.architecture, description.factors)
    found = read_imatrix(path, shapes)
    importance: dict[int, dict[str, np.ndarray]] = {}
    for layer in layers:
        own = importance[layer] = {}
        for what, matrix in _SEEN_BY.items():
            (tensor,) = {piece.tensor for piece in mapped.pieces[f"layers/{layer}/mlp/experts/{matrix}/kernel"]}
            if tensor not in found:
                raise InputError(f"{path} says nothing of {tensor}; it was made with another model, or cut short")
            own[what] = found[tensor]
    return importance
