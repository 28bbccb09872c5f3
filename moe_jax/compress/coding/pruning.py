"""Pruning of residuals: which entries are kept, and the best centre for them (methods.md 5).

Functions take one matrix of all experts. Where one threshold holds for the whole design matrix of an expert (`concat`),
`concat_counts` says beforehand how many entries are kept of each matrix.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from moe_jax.finite import largest_magnitude

# Refitting ends when a round gains less than this part of the error, or after so many rounds.
LEAST_GAIN, MOST_ROUNDS = 1e-3, 20
_SAMPLED_ABOVE, _SAMPLE = 1 << 18, 1 << 14
# Squares of what is smaller come near the smallest number of float32; times this, they do not.
_TINY, _LARGE = 2.0**-50, np.float32(2.0**64)


class Refit(NamedTuple):
    """A centre and masks that go together.

    Attributes:
      centre: float32[...], the best one for the masks.
      masks: the entries of every expert that are kept.
      error: sum over the experts of the squared entries that are not.
      rounds: how often masks were chosen.
    """

    centre: Float[np.ndarray, "..."]
    masks: list[Bool[np.ndarray, "..."]]
    error: float
    rounds: int


def kept_entries(size: int, keep: float) -> int:
    """How many of `size` entries a share is; at least one."""
    return min(size, max(1, round(size * keep)))


def concat_counts(residuals: Mapping[str, Float[np.ndarray, "..."]], keep: float) -> dict[str, int]:
    """How many of the largest entries of one expert lie in each of its matrices.

    Args:
      residuals: the matrices.
      keep: share of all entries together that stays.
    """
    magnitudes = np.concatenate([np.abs(residual).reshape(-1) for residual in residuals.values()])
    mask = largest_mask(magnitudes, kept_entries(magnitudes.size, keep))
    counts, start = {}, 0
    for name, residual in residuals.items():
        counts[name] = int(mask[start : start + residual.size].sum())
        start += residual.size
    return counts


def common_counts(shares: Sequence[float], sizes: Sequence[int], keep: float) -> tuple[int, ...]:
    """Entries that every expert keeps of each matrix, so that the kept share is exact and storage has no gaps.

    Args:
      shares: of each matrix in what is kept, averaged over experts; they sum to 1.
      sizes: entries of each matrix.
      keep: share of all entries that stays.
    """
    total = kept_entries(sum(sizes), keep)
    counts = [min(size, max(1, math.floor(total * share))) for share, size in zip(shares, sizes, strict=True)]
    while (missing := total - sum(counts)) > 0:
        # What rounding took away, or a matrix had no room for, goes to those that have.
        open_ = [m for m, size in enumerate(sizes) if counts[m] < size]
        for m in open_:
            counts[m] += min(sizes[m] - counts[m], math.ceil(missing / len(open_)), total - sum(counts))
    return tuple(counts)


def largest_mask(residual: Float[np.ndarray, "..."], count: int) -> Bool[np.ndarray, "..."]:
    """The `count` entries of largest absolute value; of equal ones the first."""
    magnitude = np.abs(residual).reshape(-1)
    if count >= magnitude.size:
        return np.ones(residual.shape, bool)
    least = _nth_largest(magnitude, count)
    mask = magnitude > least
    equal = np.flatnonzero(magnitude == least)
    mask[equal[: count - int(mask.sum())]] = True
    return mask.reshape(residual.shape)


def _nth_largest(values: Float[np.ndarray, " n"], count: int) -> np.floating:
    """The `count`-th largest value. Of many, a sample says between which bounds it lies, and only these are sorted."""
    if values.size > _SAMPLED_ABOVE:
        sample = np.sort(values[:: values.size // _SAMPLE])
        at = (1 - count / values.size) * (sample.size - 1)
        margin = 6 * math.sqrt(sample.size) / 2  # six standard deviations: it is nearly always between them
        lower, upper = sample[max(0, int(at - margin))], sample[min(sample.size - 1, int(at + margin) + 1)]
        above = int(np.count_nonzero(values > upper))
        between = values[(values >= lower) & (values <= upper)]
        if above < count <= above + between.size:
            values, count = between, count - above
    return np.partition(values, values.size - count)[values.size - count]


def prune(
    kernels: Callable[[], Iterable[Float[np.ndarray, "..."]]],
    centre: Float[np.ndarray, "..."],
    count: int,
    *,
    refit: bool,
    importances: Sequence[np.ndarray | None] | None = None,
) -> Refit:
    """Chooses the largest residuals of every expert; with `refit`, alternately masks and centre.

    An entry that is kept is stored exactly, wherever the centre is. So the best centre is the mean of the entries that
    are *not* kept, and a better centre makes better masks. Neither step raises the error.

    Args:
      kernels: gives the aligned kernels of all experts, as often as it is called; float32.
      centre: the first one.
      count: entries that stay of each kernel.
      refit: without, the masks are those for the first centre, which stays.
      importances: of every expert, what an entry of each row counts for: errors are multiplied by it before they are
        compared, or squared. None: all entries count alike.
    """
    found = _choose(kernels(), centre, count, refit=refit, importances=importances)
    rounds = 1
    while refit and rounds < MOST_ROUNDS:
        before, found = found, _choose(kernels(), found.centre, count, refit=True, importances=importances)
        rounds += 1
        if found.error > before.error * (1 - LEAST_GAIN):
            break
    return found._replace(rounds=rounds)


def _choose(
    kernels: Iterable[Float[np.ndarray, "..."]],
    centre: Float[np.ndarray, "..."],
    count: int,
    *,
    refit: bool,
    importances: Sequence[np.ndarray | None] | None,
) -> Refit:
    """The best masks for a centre and, if asked for, the best centre for these masks."""
    masks, error = [], 0.0
    total, number = np.zeros_like(centre), np.zeros(centre.shape, np.uint16 if importances is None else np.float32)
    for expert, kernel in enumerate(kernels):
        residual, importance = kernel - centre, None if importances is None else importances[expert]
        weigh = partial(_by_rows, importance)
        mask = largest_mask(weigh(residual), count)
        masks.append(mask)
        residual[mask] = 0
        total += weigh(weigh(residual))
        number += weigh(weigh(~mask))
        error += squared(weigh(residual))
    if refit:
        moved = np.divide(total, number, out=np.zeros_like(total), where=number > 0)
        # Around its mean a set of numbers has less than around any other point: by the square of the distance, each.
        error -= float(np.sum(moved.astype(np.float64) ** 2 * number))
        centre = centre + moved
    return Refit(centre, masks, max(error, 0.0), 1)


def _by_rows(factors: Float[np.ndarray, " i"] | None, array: np.ndarray) -> np.ndarray:
    return array if factors is None else array * factors[:, None]


def squared(array: Float[np.ndarray, "..."]) -> float:
    """The sum of squares. Added up in pieces, for float32 would lose most of 10^8 terms."""
    flat = np.ascontiguousarray(array, np.float32).reshape(-1)
    if 0 < largest_magnitude(flat) < _TINY:
        return squared(flat * _LARGE) / float(_LARGE) ** 2
    return sum(float(np.dot(part, part)) for part in np.array_split(flat, max(1, flat.size >> 20)))
