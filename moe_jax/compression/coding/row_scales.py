"""Scales of the rows of a kernel, one for every input, beside those that groups of a column share (methods.md 4).

With them a code stands for `r_i s_go level`. Choosing codes for W with row scales r is choosing them for `W / r`, where
an error of row i counts `r_i` times: every method that codes a kernel can be used as it is.
"""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float

from moe_jax.functional.codes import SCALE_DTYPE

_ROUNDS = 10
_POWERS = tuple(n / 10 for n in range(1, 11))
# The errors of candidates are compared on so many columns.
_COLUMNS = 128


def scales_of_magnitudes(
    kernel: Float[np.ndarray, "i o"], group_size: int | None, weights: Float[np.ndarray, " i"] | None = None
) -> Float[np.ndarray, " i"]:
    """r for which `r_i s_go` comes nearest to `|W_io|`, by alternating least squares; as stored, float32.

    For codes of one bit, whose levels are -1 and 1, this is the least squared error of all (as in OneBit, arXiv
    2402.11295, section 3.2, but with a scale for every group of a column).

    Args:
      kernel: W.
      group_size: rows that share scales s; None: all, of all columns.
      weights: of the squared errors of rows, not negative; None: all alike.
    """
    rows = len(kernel)
    size, sizes = group_size or rows, np.abs(kernel)
    weights = np.ones(rows, np.float32) if weights is None else weights
    scales = np.ones(rows, np.float32)
    for start in range(0, rows, size):
        part, counted = sizes[start : start + size], weights[start : start + size, None]
        if group_size is None:
            scales[:] = part.mean(axis=1)  # one s for all columns: the mean is the least squares
            continue
        own = np.sqrt(np.mean(part**2, axis=1))
        for _ in range(_ROUNDS):
            columns = _ratio((counted * own[:, None] * part).sum(axis=0), (counted[:, 0] * own**2).sum())
            own = _ratio((part * columns).sum(axis=1), (columns**2).sum())
        scales[start : start + size] = own
    return as_stored(scales)


def candidates(
    kernel: Float[np.ndarray, "i o"], group_size: int | None, moment: Float[np.ndarray, "i i"]
) -> Iterator[Float[np.ndarray, " i"]]:
    """Row scales to choose from: none, those of the entries' sizes, and `a^-p` for the sizes a of the inputs.

    The latter are AWQ's (arXiv 2306.00978, section 3.2): rows of large inputs get finer codes.

    Args:
      kernel, group_size: see `scales_of_magnitudes`.
      moment: H, the second moment of the inputs.
    """
    diagonal = np.diagonal(moment).astype(np.float32)
    yield np.ones(len(kernel), np.float32)
    yield scales_of_magnitudes(kernel, group_size, diagonal if diagonal.any() else None)
    inputs = np.sqrt(diagonal)
    if inputs.any():
        # An input that is never there would get the coarsest codes, and its group with it.
        inputs = np.maximum(inputs, 1e-4 * inputs.max())
        for power in _POWERS:
            yield as_stored(inputs**-power)


def best_row_scales(
    kernel: Float[np.ndarray, "i o"],
    group_size: int | None,
    moment: Float[np.ndarray, "i i"],
    coded: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Float[np.ndarray, " i"]:
    """Returns the `candidates` with which codes change the outputs least, tr(E^T H E), on some of the columns.

    Args:
      kernel, group_size, moment: see `candidates`.
      coded: of a kernel that is divided by row scales, and these, what its codes stand for.
    """
    columns = np.unique(np.linspace(0, kernel.shape[1] - 1, min(kernel.shape[1], _COLUMNS)).astype(int))
    some = np.ascontiguousarray(kernel[:, columns])
    best, least = np.ones(len(kernel), np.float32), np.inf
    for scales in candidates(some, group_size, moment):
        error = coded(some / scales[:, None], scales) * scales[:, None] - some
        cost = float(np.sum(error * (moment @ error), dtype=np.float64))
        if cost < least:
            best, least = scales, cost
    return best


def as_stored(scales: Float[np.ndarray, " i"]) -> Float[np.ndarray, " i"]:
    """Around 1, in `SCALE_DTYPE`'s precision; next to nothing for rows of zeros, which have nothing but signs."""
    there = scales > 0
    if not there.any():
        return np.ones_like(scales)
    scales = np.clip(scales / np.exp(np.mean(np.log(scales[there]))), 1e-6, 1e6)
    return scales.astype(SCALE_DTYPE).astype(np.float32)


def _ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return (top / bottom if bottom > 0 else np.zeros_like(top)).astype(np.float32)
