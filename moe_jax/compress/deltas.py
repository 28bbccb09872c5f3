"""The loop that all methods with a shared base and one delta per expert have in common."""

from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Array

from moe_jax.compress.base import Base
from moe_jax.compress.figures import LayerFigures, Measure
from moe_jax.compress.source_layer import SourceLayer
from moe_jax.errors import InputError

Write = Callable[[str, np.ndarray], None]
"""Takes a leaf: its path below the layer's `mlp`, and the array."""

Encode = Callable[[str, int, np.ndarray], tuple[Mapping[str, np.ndarray], np.ndarray | Array]]
"""`encode(matrix, expert, delta)`: float32[in, out] -> the leaves that store it, and what they stand for, [in, out]."""


def compress_deltas(layer: SourceLayer, base: Base, encode: Encode, write: Write) -> LayerFigures:
    """Writes base, deltas and biases of a layer. Memory holds one matrix of all experts, and of one in float32.

    Raises:
      InputError: if a kernel, or what it becomes, is not finite.
    """
    measure = Measure(layer.num_experts, layer.moe.expert.dim)
    for name in layer.shapes:
        _compress_matrix(layer, name, base.kernel(name), encode, write, measure)
        biases = layer.biases(name)
        if biases is not None:
            write(f"experts/{name}/bias", biases)
    return measure.figures()


def _compress_matrix(
    layer: SourceLayer, name: str, base: np.ndarray, encode: Encode, write: Write, measure: Measure
) -> None:
    """A function of its own, so that nothing of one matrix is held while the next one is read."""
    write(f"experts/base/{name}/kernel", base)
    stacked: dict[str, np.ndarray] = {}
    for expert, kernel in enumerate(layer.kernels(name)):
        delta = kernel.astype(np.float32, copy=False) - base.astype(np.float32, copy=False)
        _check_finite(delta, layer, name, expert)
        leaves, approximation = encode(name, expert, delta)
        for leaf, array in leaves.items():
            if leaf not in stacked:
                stacked[leaf] = np.empty((layer.num_experts, *array.shape), array.dtype)
            stacked[leaf][expert] = array
        measure.add(expert, kernel, base, approximation)
    for leaf, array in stacked.items():
        write(f"experts/delta/{name}/{leaf}", array)


def _check_finite(delta: np.ndarray, layer: SourceLayer, name: str, expert: int) -> None:
    if not np.isfinite(delta).all():
        raise InputError(
            f"the {name} kernel of expert {expert} in layer {layer.index}, or its base, has entries that are not finite"
        )
