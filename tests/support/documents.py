"""Rows of packed documents, and whether results of them are close."""

import numpy as np


def documents_of(rng, count, length):
    """Rows of documents of any length, some of a token, with padding before, between and behind them."""
    rows = []
    for _ in range(count):
        runs, name = [], 0
        while len(runs) < length:
            name += 1
            runs += [name] * rng.integers(1, length + 1) + [0] * rng.integers(0, 4)
        start = rng.integers(0, 3)
        rows.append([0] * start + runs[: length - start])
    return np.array(rows, np.int32)


def close(got, expected, tolerance=1e-5):
    """Whether all entries are equal, to a share of the largest one, or of 1."""
    return bool(np.abs(np.asarray(got) - expected).max() <= tolerance * max(np.abs(expected).max(), 1.0))


def spoiled(inputs, documents):
    """Inputs of tokens [B, T, ...], a tuple with names, that are not finite at padding."""
    at_padding = np.asarray(documents) == 0
    return type(inputs)(
        *(np.where(at_padding.reshape(*at_padding.shape, *[1] * (one.ndim - 2)), np.nan, one) for one in inputs)
    )
