"""How alike experts are, and what became of them: on design matrices, without the library's own alignment.

Rows of a design matrix are neurons (METHODS 5). The best permutation of the neurons comes from SciPy's assignment.
"""

import itertools

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

from moe_jax.compress.source_layer import SourceLayer
from moe_jax.model_source import ModelSource

Designs = Float[np.ndarray, "E f w"]


def designs(source: ModelSource, layer: int) -> Designs:
    """The design matrices of all experts that the router of a layer knows, float32. Merged experts come repeatedly."""
    opened = SourceLayer(source, layer)
    parts = []
    for name in opened.shapes:
        kernels = np.stack([np.asarray(kernel, np.float32) for kernel in opened.kernels(name)])
        parts.append(kernels if name == "down" else kernels.transpose(0, 2, 1))
    stored = np.concatenate(parts, axis=2)
    return stored[groups(source, layer)]


def groups(source: ModelSource, layer: int) -> Int[np.ndarray, " E"]:
    """The stored expert of every output of the router."""
    path = f"layers/{layer}/mlp/groups"
    if path in source.specs():
        return source.read(path)
    return np.arange(source.config.layers[layer].mlp.num_experts)


def squared_norm(experts: Designs) -> float:
    """Of an expert, on average."""
    return float(np.sum(np.square(experts, dtype=np.float64))) / len(experts)


def cosines(experts: Designs) -> tuple[float, float]:
    """Mean cosine between two experts: as they are, and with their neurons matched."""
    as_they_are, matched = [], []
    norms = np.linalg.norm(experts, axis=(1, 2))
    for i, k in itertools.combinations(range(len(experts)), 2):
        products = experts[i] @ experts[k].T
        rows, columns = linear_sum_assignment(products, maximize=True)
        as_they_are.append(np.trace(products) / (norms[i] * norms[k]))
        matched.append(products[rows, columns].sum() / (norms[i] * norms[k]))
    return float(np.mean(as_they_are)), float(np.mean(matched))


def least_error_per_neuron(before: Designs, after: Designs) -> float:
    """eps / f with the neurons of every expert matched anew: no permutation a method chose can be better.

    Experts that lost neurons are filled up with zeros.
    """
    count, width, _ = before.shape
    after = np.pad(after, ((0, 0), (0, width - after.shape[1]), (0, 0)))
    total = 0.0
    for one, other in zip(before, after, strict=True):
        squares = np.sum(one**2, 1)[:, None] + np.sum(other**2, 1)[None] - 2 * one @ other.T
        rows, columns = linear_sum_assignment(squares)
        total += float(np.sum((one[rows] - other[columns]).astype(np.float64) ** 2))
    return total / count / width
