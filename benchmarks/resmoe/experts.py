"""The experts of a model as design matrices, whose rows are neurons (methods.md 5), and models with other experts."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from moe_jax.compress.source_layer import SourceLayer
from moe_jax.model_source import ModelSource
from moe_jax.nn import Decoder
from moe_jax.sharding import path_name

Designs = Float[np.ndarray, "E f w"]


def designs(source: ModelSource, layer: int, width: int | None = None) -> Designs:
    """Every expert that the router of a layer knows, float32; merged ones come as often as it knows them.

    Args:
      source: the model, whatever its banks.
      layer: one of its MoE layers.
      width: experts that lost neurons are filled up with zeros, which change nothing, to so many.
    """
    opened = SourceLayer(source, layer)
    parts = []
    for name in opened.shapes:
        kernels = np.stack([np.asarray(kernel, np.float32) for kernel in opened.kernels(name)])
        parts.append(kernels if name == "down" else kernels.transpose(0, 2, 1))
    stored = np.concatenate(parts, axis=2)
    missing = max(0, (width or 0) - stored.shape[1])
    return np.pad(stored, ((0, 0), (0, missing), (0, 0)))[_stored_experts(source, layer)]


def _stored_experts(source: ModelSource, layer: int) -> Int[np.ndarray, " E"]:
    """The stored expert of every output of the router."""
    path = f"layers/{layer}/mlp/groups"
    if path in source.specs():
        return source.read(path)
    return np.arange(source.config.layers[layer].mlp.num_experts)


def with_experts(model: Decoder, experts: Sequence[Designs]) -> Decoder:
    """The model with other experts of the same shape: those of all its layers, which are MoE layers."""
    graphdef, state = nnx.split(model)
    matrices = ("gate", "up", "down")
    parts = dict(zip(matrices, np.split(np.stack(experts), len(matrices), axis=3), strict=True))

    def replaced(path: tuple, leaf: jax.Array) -> jax.Array:
        name = path_name(path)
        if "/experts/" not in name:
            return leaf
        matrix = name.split("/")[-2]
        # [L, E, f, d]
        kernels = parts[matrix] if matrix == "down" else parts[matrix].swapaxes(2, 3)
        assert kernels.shape == leaf.shape, (name, kernels.shape, leaf.shape)
        # In float32: rounded, small residuals would be lost.
        return jnp.asarray(kernels, jnp.float32)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(replaced, state))
