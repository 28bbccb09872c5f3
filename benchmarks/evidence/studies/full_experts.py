"""The experts of a model as full kernels, whatever its banks, and models with other experts."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from evidence.studies.models import Leaves
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.model_io.in_memory import SourceWithLeaves
from moe_jax.model_io.model_source import ModelSource

Kernels = dict[str, Float[np.ndarray, "E i o"]]
"""[in, out] of every expert of a layer, by matrix."""


def full_experts(source: ModelSource, layer: int, width: int | None = None) -> Kernels:
    """Every expert that the router of a layer knows, float32; merged ones come as often as it knows them.

    Args:
      source: the model, whatever its banks.
      layer: one of its MoE layers.
      width: experts that lost neurons are filled up with zeros, which change nothing, to so many.
    """
    opened = SourceLayer(source, layer)
    groups = f"layers/{layer}/mlp/groups"
    of_router = source.read(groups) if groups in source.specs() else slice(None)
    found = {}
    for name in opened.shapes:
        kernels = np.stack([np.asarray(kernel, np.float32) for kernel in opened.kernels(name)])
        neurons = 1 if name == "down" else 2
        missing = max(0, (width or 0) - kernels.shape[neurons])
        padding = [(0, missing if axis == neurons else 0) for axis in range(3)]
        found[name] = np.pad(kernels, padding)[of_router]
    return found


def all_full_experts(source: ModelSource, widths: Mapping[int, int] | None = None) -> dict[int, Kernels]:
    """Those of all MoE layers, by index; filled up to `widths`."""
    return {layer: full_experts(source, layer, (widths or {}).get(layer)) for layer in source.config.moe_layers}


def widths_of(source: ModelSource) -> dict[int, int]:
    """The hidden width of the experts of every MoE layer."""
    return {layer: source.config.moe(layer).expert.dim for layer in source.config.moe_layers}


def experts_of(model: Leaves) -> dict[int, Kernels]:
    """The experts of a model of full ones, not copied, by layer."""
    return {
        layer: {name: model.leaves[_path(layer, name)] for name in SourceLayer(model, layer).shapes}
        for layer in model.config.moe_layers
    }


def with_experts(model: Leaves, experts: Mapping[int, Kernels]) -> Leaves:
    """The model, of full experts, with others of the same shapes."""
    own = {_path(layer, name): kernels for layer, by_name in experts.items() for name, kernels in by_name.items()}
    for path, kernels in own.items():
        assert kernels.shape == model.leaves[path].shape, (path, kernels.shape, model.leaves[path].shape)
    return Leaves(model.config, model.leaves | own)


def with_permuted_neurons(model: ModelSource, seed: int) -> SourceWithLeaves:
    """The model, of full experts without biases, which computes the same: those of each expert in an order of its own.

    Args:
      model: the neurons of whose experts are permuted.
      seed: of the orders.
    """
    rng, changed = np.random.default_rng(seed), {}
    for layer in model.config.moe_layers:
        neurons = model.config.moe(layer).expert.dim
        orders = rng.permuted(np.tile(np.arange(neurons), (model.config.moe(layer).num_experts, 1)), axis=1)
        for name in SourceLayer(model, layer).shapes:
            along = orders[:, :, None] if name == "down" else orders[:, None]
            changed[_path(layer, name)] = np.take_along_axis(
                model.read(_path(layer, name)), along, axis=1 if name == "down" else 2
            )
    return SourceWithLeaves(model, model.config, changed)


def count_of(experts: Mapping[int, Kernels]) -> int:
    """Parameters of the experts."""
    return sum(kernels.size for by_name in experts.values() for kernels in by_name.values())


def designs(experts: Kernels) -> Float[np.ndarray, "E f w"]:
    """The experts of a layer as design matrices, whose rows are neurons (methods.md 5)."""
    parts = [part if name == "down" else part.transpose(0, 2, 1) for name, part in experts.items()]
    return np.concatenate(parts, axis=2)


def _path(layer: int, name: str) -> str:
    return f"layers/{layer}/mlp/experts/{name}/kernel"
