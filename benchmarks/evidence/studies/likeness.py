"""How alike experts are, and how far from what they were, without the library's own alignment.

The best permutation of the neurons comes from SciPy's assignment.
"""

import itertools

import numpy as np
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment

Designs = Float[np.ndarray, "E f w"]
"""Experts as design matrices, whose rows are neurons."""


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
    """eps / f with the neurons of every expert matched anew: no permutation that a method chose can be better."""
    count, width, _ = before.shape
    total = 0.0
    for one, other in zip(before, after, strict=True):
        squares = np.sum(one**2, 1)[:, None] + np.sum(other**2, 1)[None] - 2 * one @ other.T
        rows, columns = linear_sum_assignment(squares)
        total += float(np.sum((one[rows] - other[columns]).astype(np.float64) ** 2))
    return total / count / width
