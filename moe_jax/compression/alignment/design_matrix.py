"""The design matrix of an expert: a row for every neuron (methods.md 5; ResMoE, arXiv 2503.06881, section 4.1).

Gated: [G^T | U^T | D], f x 3d; plain: [W1^T | W2], f x 2d; with biases, those of the input side are further columns.
The rows are points, an expert is a cloud of them, and their order has no meaning.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Float, Int

from moe_jax.compression.source_layer import SourceLayer
from moe_jax.compression.threads import ahead, in_threads

_SQUARE = 256


def design_matrices(layer: SourceLayer) -> list[Float[np.ndarray, "f D"]]:
    """Returns the design matrices of all experts, in the dtype in which the kernels are read.

    Raises:
      InputError: if a weight is not finite.
    """
    designs: list[np.ndarray] = []
    width = sum(_width(layer, name) for name in layer.shapes)
    start = 0
    for name in layer.shapes:
        biases = layer.biases(name) if name != "down" else None
        for expert, kernel in enumerate(ahead(layer.kernels(name))):
            rows = neuron_rows(name, kernel)
            if len(designs) == expert:
                designs.append(np.empty((len(rows), width), kernel.dtype))
            _copy(rows, designs[expert][:, start : start + rows.shape[1]])
            if biases is not None:
                designs[expert][:, start + rows.shape[1]] = biases[expert]
        start += _width(layer, name)
    return designs


def aligned_kernels(
    layer: SourceLayer, name: str, permutations: Int[np.ndarray, "E f"]
) -> Iterator[Float[np.ndarray, "i o"]]:
    """One matrix of all experts with the neurons in the given order; float32.

    Raises:
      InputError: if a weight is not finite.
    """
    for expert, kernel in enumerate(layer.kernels(name)):
        # Orders are in bounds; NumPy checking each index of each row takes three times as long, indexing nine times.
        ordered = np.take(kernel, permutations[expert], axis=0 if name == "down" else 1, mode="clip")
        yield ordered.astype(np.float32, copy=False)


def aligned_experts(
    layer: SourceLayer, permutations: Int[np.ndarray, "E f"]
) -> Iterator[dict[str, Float[np.ndarray, "i o"]]]:
    """Yields all matrices of one expert after another, aligned; float32. Memory holds their stored leaves."""
    every = [aligned_kernels(layer, name, permutations) for name in layer.shapes]
    for kernels in zip(*every, strict=True):
        yield dict(zip(layer.shapes, kernels, strict=True))


def aligned_biases(
    layer: SourceLayer, name: str, permutations: Int[np.ndarray, "E f"]
) -> Float[np.ndarray, "E o"] | None:
    """Returns the biases that belong to `aligned_kernels`; None if the FFN has none."""
    biases = layer.biases(name)
    if biases is None or name == "down":  # an output bias belongs to no neuron
        return biases
    return np.take_along_axis(biases, permutations, axis=1)


def unaligned(layer: SourceLayer) -> Int[np.ndarray, "E f"]:
    """Returns the orders that leave neurons where they are."""
    return np.tile(np.arange(layer.moe.expert.dim, dtype=np.int32), (layer.num_experts, 1))


def mean_kernel(kernels: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the mean of kernels, added up in float32 one after another; float32[in, out]."""
    kernels = iter(ahead(kernels))
    total, count = next(kernels).astype(np.float32), 1
    for kernel in kernels:
        total += kernel.astype(np.float32, copy=False)
        count += 1
    return total / np.float32(count)


def neuron_rows(name: str, kernel: Float[np.ndarray, "i o"]) -> Float[np.ndarray, "f d"]:
    """Returns a kernel with a row for every neuron; applied twice it returns the kernel."""
    return kernel if name == "down" else kernel.T


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copies the source into the target in squares that fit into the cache.

    One of the two may be the transpose of what is stored; plain copying would then take four times as long.
    """

    def fill(rows: slice) -> None:
        for start in range(0, source.shape[1], _SQUARE):
            columns = slice(start, start + _SQUARE)
            target[rows, columns] = source[rows, columns]

    in_threads(fill, (slice(start, start + _SQUARE) for start in range(0, len(source), _SQUARE)))


def _width(layer: SourceLayer, name: str) -> int:
    """Number of columns of the design matrix that a matrix of the FFN contributes."""
    rows, columns = layer.shapes[name]
    return columns if name == "down" else rows + layer.moe.expert.bias
