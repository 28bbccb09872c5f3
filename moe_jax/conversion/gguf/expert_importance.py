"""The importance of the inputs of experts in imatrix files of llama.cpp, for methods that compress them."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from moe_jax.conversion.gguf.architectures.gguf_architectures import check_written, only_moe
from moe_jax.conversion.gguf.gguf_metadata import described, tensor_shapes
from moe_jax.conversion.gguf.imatrix import read_imatrix, write_imatrix
from moe_jax.conversion.hf_format import MergedModel, exported_config
from moe_jax.conversion.model_table import mapped as mapped_model
from moe_jax.conversion.table import FUSED
from moe_jax.core.errors import InputError
from moe_jax.model_io.model_source import ModelSource

_SEEN_BY = {"inputs": "up", "hidden": "down"}  # what is known, and a matrix that is given it
_GIVEN = {"gate": "inputs", "up": "inputs", "down": "hidden"}


class ExpertTensors(NamedTuple):
    """The tensors of a GGUF file that hold experts.

    Attributes:
      shapes: of all tensors of the file, by name.
      names: of the tensors of experts, by layer and matrix.
    """

    shapes: Mapping[str, tuple[int, ...]]
    names: Mapping[int, Mapping[str, str]]


def expert_tensors(source: ModelSource, layers: Iterable[int]) -> ExpertTensors:
    """Returns the tensors of the experts of MoE layers; `InputError` if GGUF files cannot hold the model."""
    check_written(source.config)
    config = exported_config(source.config, replicate_dense=True, all_moe=only_moe)
    description = described(config)
    leaves = MergedModel(source, description.config).specs()
    table = description.architecture.table_of(description.config)
    mapped = mapped_model(description.config, leaves, FUSED, table=table)
    shapes = tensor_shapes(mapped.tensors, description.architecture, description.factors)
    names: dict[int, dict[str, str]] = {}
    for layer in layers:
        paths = {matrix: f"layers/{layer}/mlp/experts/{matrix}/kernel" for matrix in _GIVEN}
        pieces = {matrix: mapped.pieces[path] for matrix, path in paths.items() if path in mapped.pieces}
        names[layer] = {matrix: own[0].tensor for matrix, own in pieces.items()}
    return ExpertTensors(shapes, names)


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
    tensors = expert_tensors(source, layers)
    found = read_imatrix(path, tensors.shapes)
    importance: dict[int, dict[str, np.ndarray]] = {}
    for layer, names in tensors.names.items():
        own = importance[layer] = {}
        for what, matrix in _SEEN_BY.items():
            if (tensor := names[matrix]) not in found:
                raise InputError(f"{path} says nothing of {tensor}; it was made with another model, or cut short")
            own[what] = found[tensor]
    return importance


class ExpertSums(NamedTuple):
    """The squares of what the experts of a layer were given.

    Attributes:
      inputs, hidden: sums of the squares of their inputs Float32[E, d] and hidden activations Float32[E, f].
      counts: of how many tokens, Float32[E], above 0.
    """

    inputs: Float[np.ndarray, "E d"]
    hidden: Float[np.ndarray, "E f"]
    counts: Float[np.ndarray, " E"]


def write_expert_importance(
    path: str | os.PathLike[str], tensors: ExpertTensors, sums: Mapping[int, ExpertSums], **about: Any
) -> None:
    """Writes what was measured of experts as an imatrix file; `about` and errors are those of `write_imatrix`.

    Args:
      path: of the file, which must not be there.
      tensors: of the model's experts.
      sums: by the index of the layer.

    Raises:
      InputError: also if the experts of a GGUF file of the model are not those that were measured.
    """
    squares, counts = {}, {}
    for layer, own in sums.items():
        for matrix, tensor in tensors.names[layer].items():
            found = getattr(own, _GIVEN[matrix])
            experts, *_, inputs = tensors.shapes[tensor]
            if found.shape != (experts, inputs):
                raise InputError(
                    f"{path}: layer {layer} has {[experts, inputs]} experts and inputs in a GGUF file, and "
                    f"{list(found.shape)} here: no imatrix can be written of merged experts"
                )
            squares[tensor], counts[tensor] = found, own.counts
    write_imatrix(path, squares, counts, **about)
