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

from moe_jax.compression.threads import ahead, in_threads
from moe_jax.core.finite import largest_magnitude
from moe_jax.experts.forms.sparse import kept_entries

# Refitting ends when a round gains less than this part of the error, or after so many rounds.
LEAST_GAIN, MOST_ROUNDS = 1e-3, 20
_SAMPLED_ABOVE, _SAMPLE = 1 << 18, 1 << 14
# Experts, or blocks of rows of so many entries, that are worked on at a time: each takes twice the memory of a kernel.
_THREADS, _BLOCK = 4, 1 << 18
# Squares of what is smaller come near the smallest number of float32; times this, they do not.
_TINY, _LARGE = 2.0**-50, np.float32(2.0**64)


class Refit(NamedTuple):
    """A centre and masks that go together."""

    centre: Float[np.ndarray, "..."]  # float32[...], the best one for the masks
    masks: list[Bool[np.ndarray, "..."]]  # the entries of every expert that are kept
    error: float  # sum over the experts of the squared entries that are not
    rounds: int  # how often masks were chosen


def concat_counts(magnitudes: Mapping[str, Float[np.ndarray, "..."]], keep: float) -> dict[str, int]:
    """How many of the largest entries of one expert lie in each of its matrices, if a share `keep` of all stays."""
    magnitudes = {name: magnitude.reshape(-1) for name, magnitude in magnitudes.items()}
    size = sum(magnitude.size for magnitude in magnitudes.values())
    left = kept_entries(size, keep)
    if left == size:
        return {name: magnitude.size for name, magnitude in magnitudes.items()}
    least = _nth_largest(list(magnitudes.values()), left)
    counts = {name: int(np.count_nonzero(magnitude > least)) for name, magnitude in magnitudes.items()}
    left -= sum(counts.values())
    for name, magnitude in magnitudes.items():  # of equal ones the first
        equal = min(left, int(np.count_nonzero(magnitude == least)))
        counts[name], left = counts[name] + equal, left - equal
    return counts


def mean_shares(
    experts: Iterable[Mapping[str, np.ndarray]], centres: Mapping[str, np.ndarray], keep: float
) -> Float[np.ndarray, " m"]:
    """Share of every matrix in the largest residuals of an expert, averaged over the experts, which are overwritten."""
    shares = []
    for magnitudes in ahead(_magnitudes(kernels, centres) for kernels in experts):
        counts = concat_counts(magnitudes, keep)
        shares.append(np.array(list(counts.values())) / sum(counts.values()))
    return np.mean(shares, axis=0)


def _magnitudes(kernels: Mapping[str, np.ndarray], centres: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """The magnitudes of residuals, in the place of the kernels: two experts in memory are enough."""
    for name, kernel in kernels.items():
        np.abs(np.subtract(kernel, centres[name], out=kernel), out=kernel)
    return kernels


def largest_mask(residual: Float[np.ndarray, "..."], count: int) -> Bool[np.ndarray, "..."]:
    """The `count` entries of largest absolute value; of equal ones the first."""
    return _mask_of_largest(np.abs(residual), count)


def _mask_of_largest(magnitudes: Float[np.ndarray, "..."], count: int) -> Bool[np.ndarray, "..."]:
    magnitude = magnitudes.reshape(-1)
    if count >= magnitude.size:
        return np.ones(magnitudes.shape, bool)
    least = _nth_largest([magnitude], count)
    mask = magnitude >= least
    if more := int(np.count_nonzero(mask)) - count:
        mask[np.flatnonzero(magnitude == least)[-more:]] = False
    return mask.reshape(magnitudes.shape)


def _nth_largest(parts: Sequence[Float[np.ndarray, " n"]], count: int) -> np.floating:
    """The `count`-th largest value of all. Of many, a sample says between which bounds it lies, and only these are
    sorted."""
    size = sum(part.size for part in parts)
    values = parts
    if size > _SAMPLED_ABOVE:
        sample = np.sort(np.concatenate([part[:: size // _SAMPLE] for part in parts]))
        at = (1 - count / size) * (sample.size - 1)
        margin = 6 * math.sqrt(sample.size) / 2  # six standard deviations: it is nearly always between them
        lower, upper = sample[max(0, int(at - margin))], sample[min(sample.size - 1, int(at + margin) + 1)]
        above, between = 0, []
        # In blocks that stay in the cache, so that threads do not wait for each other's memory.
        for block in (part[start : start + _BLOCK] for part in parts for start in range(0, part.size, _BLOCK)):
            above += int(np.count_nonzero(block > upper))
            between.append(block[(block >= lower) & (block <= upper)])
        if above < count <= above + sum(part.size for part in between):
            values, count = between, count - above
    values = np.concatenate(values)
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
      centre: the first one; without `refit` the masks are those for it, and it stays.
      count: entries that stay of each kernel.
      importances: of every expert, by what the errors of a row are multiplied before they are compared, or squared.
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
    kernels = list(kernels)
    factors = [None] * len(kernels) if importances is None else importances

    def chosen(expert: tuple[np.ndarray, np.ndarray | None]) -> Bool[np.ndarray, "..."]:
        kernel, factor = expert
        residual = _by_rows(factor, kernel - centre)
        return _mask_of_largest(np.abs(residual, out=residual), count)

    def refitted(rows: slice) -> tuple[np.ndarray, float]:
        """Some rows of the best centre for the masks, and what is then left of the error."""
        before, error = centre[rows], 0.0
        total = np.zeros_like(before)
        number = np.zeros(before.shape, np.uint16 if importances is None else np.float32)
        for kernel, factor, mask in zip(kernels, factors, masks, strict=True):
            weigh = partial(_by_rows, None if factor is None else factor[rows])
            rest = kernel[rows] - before
            rest[mask[rows]] = 0
            total += weigh(weigh(rest))
            number += weigh(weigh(~mask[rows]))
            error += squared(weigh(rest))
        if not refit:
            return before, error
        moved = np.divide(total, number, out=np.zeros_like(total), where=number > 0)
        # Around its mean a set of numbers has less than around any other point: by the square of the distance, each.
        return before + moved, error - float(np.sum(moved.astype(np.float64) ** 2 * number))

    masks = in_threads(chosen, zip(kernels, factors, strict=True), most=_THREADS)
    size = max(1, _BLOCK * len(centre) // max(1, centre.size))  # blocks of rows stay in the cache
    parts = in_threads(refitted, (slice(at, at + size) for at in range(0, len(centre), size)), most=_THREADS)
    error = sum(error for _, error in parts)
    return Refit(np.concatenate([rows for rows, _ in parts]) if refit else centre, masks, max(error, 0.0), 1)


def _by_rows(factors: Float[np.ndarray, " i"] | None, array: np.ndarray) -> np.ndarray:
    return array if factors is None else array * factors[:, None]


def squared(array: Float[np.ndarray, "..."]) -> float:
    """The sum of squares. Added up in pieces, for float32 would lose most of 10^8 terms."""
    flat = np.ascontiguousarray(array, np.float32).reshape(-1)
    if 0 < largest_magnitude(flat) < _TINY:
        return squared(flat * _LARGE) / float(_LARGE) ** 2
    return sum(float(np.dot(part, part)) for part in np.array_split(flat, max(1, flat.size >> 20)))
