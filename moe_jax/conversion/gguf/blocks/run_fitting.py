"""Scales of runs of numbers, by weighted least squares: what all quantised blocks of GGUF files are made with.

For every run, scales from a grid are tried: each gives codes, and these the scale (and minimum) that fits them best.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from moe_jax.core.errors import InputError

LARGEST_HALF = 65504.0
_SMALLEST_HALF = 2.0**-24
_NOTHING = 1e-30  # beside the largest number of a block, which is 1
# By how many codes the numbers of a run are spread more than there are, which cuts the outer ones off.
_SPREADS = {
    4: (-0.45, -0.2, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    8: (-0.9, -0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6, 0.9, 1.2),
    16: (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9, 1.3),
    32: (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9),
    64: (-0.8, -0.4, 0.0, 0.4, 0.8),
}


class Steps(Protocol):
    """How many codes a run has, and whether beside its scale it has a minimum."""

    @property
    def run(self) -> int:
        """Numbers that share a scale."""
        ...

    @property
    def levels(self) -> int:
        """Number of codes; without minima they count from -levels / 2."""
        ...

    @property
    def has_minima(self) -> bool:
        """Whether runs have a minimum."""
        ...

    @property
    def minima_are_signed(self) -> bool:
        """Whether the minimum of a run can be any number; else zero is among the numbers that codes reach."""
        ...


def weights_of(importance: np.ndarray, block: int) -> np.ndarray:
    """Returns weights of the columns, Float32[blocks of a row, block]. What counts nothing is still rounded.

    Raises:
      InputError: if numbers are not finite, or negative.
    """
    values = np.asarray(importance, np.float32).reshape(-1, block)
    if not np.isfinite(values).all() or (values < 0).any():
        raise InputError("the importance of columns must be finite and at least 0")
    most = values.max(initial=0.0)
    return np.ones_like(values) if most == 0 else np.maximum(values / most, 1e-6)


def packed_in_parts(
    rows: np.ndarray,
    block: int,
    importance: np.ndarray | None,
    at_once: int,
    pack: Callable[[np.ndarray, np.ndarray | None], np.ndarray],
) -> np.ndarray:
    """Returns the blocks of rows, Float32[r, n], a part after the other.

    Args:
      rows: n is a multiple of a block.
      block: numbers of a block.
      importance: of the columns, Float32[n]; None: all count the same.
      at_once: blocks of a part.
      pack: returns blocks UInt8[b, bytes], given their numbers and the weights of these, Float32[b, block].
    """
    blocks = np.ascontiguousarray(rows, np.float32).reshape(-1, block)
    weights = None if importance is None else weights_of(importance, block)
    packed = []
    for start in range(0, max(1, len(blocks)), at_once):
        some = blocks[start : start + at_once]
        own = None if weights is None else weights[np.arange(start, start + len(some)) % len(weights)]
        packed.append(pack(some, own))
    return np.concatenate(packed)


def units_of(blocks: np.ndarray, most: float, kind: str) -> np.ndarray:
    """Returns the largest number of each block, or 1 for one of zeros.

    Raises:
      InputError: if numbers are not finite, or larger than `most` halves.
    """
    largest = np.abs(blocks).max(axis=1, initial=0.0)
    if not np.isfinite(largest).all():
        raise InputError(f"numbers that are not finite cannot be stored as {kind}")
    if largest.max(initial=0.0) > LARGEST_HALF * most:
        raise InputError(
            f"numbers as large as {largest.max():.3g} cannot be stored as {kind}, whose scales are halves; choose F32 "
            "or BF16"
        )
    return np.where(largest > 0, largest, np.float32(1))


class Runs(NamedTuple):
    """Numbers by run, with what all candidates share.

    The axis of the numbers of a run comes first, and that of blocks last, so that sums run over whole vectors.
    """

    x: np.ndarray  # [run, runs, n], at most 1 in a block
    w: np.ndarray | None  # the same, weights; None: all are 1
    sum_w: np.ndarray  # [runs, n]
    sum_x: np.ndarray  # [runs, n], weighted
    sum_xx: np.ndarray  # [runs, n], weighted


def runs_of(blocks: np.ndarray, weights: np.ndarray | None, steps: Steps) -> Runs:
    """Returns the runs of blocks, Float32[n, numbers], with weights of the same shape."""

    def by_run(values: np.ndarray) -> np.ndarray:
        count, size = values.shape
        return np.ascontiguousarray(values.reshape(count, size // steps.run, steps.run).transpose(2, 1, 0))

    x = by_run(blocks)
    w = None if weights is None else by_run(weights)
    wx = x if w is None else w * x
    sum_w = np.full(x.shape[1:], steps.run, np.float32) if w is None else w.sum(axis=0)
    return Runs(x, w, sum_w, wx.sum(axis=0), dot(wx, x))


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums products over the numbers of each run."""
    return np.einsum("irn,irn->rn", a, b)


def plain(runs: Runs, steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """Returns scales and minima [runs, n] that reach from the smallest to the largest number of each run."""
    if steps.has_minima:
        low, span = _reach(runs, steps)
        return span / (steps.levels - 1), -low
    return _farthest(runs) / -(steps.levels // 2), np.zeros_like(runs.sum_x)


def _reach(runs: Runs, steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """Returns the smallest number of each run, and how far the largest is from it."""
    low, high = runs.x.min(axis=0), runs.x.max(axis=0)
    if not steps.minima_are_signed:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    return low, high - low


def _farthest(runs: Runs) -> np.ndarray:
    """Returns the number of each run with the largest magnitude, with its sign."""
    high, low = runs.x.max(axis=0), runs.x.min(axis=0)
    return np.where(high > -low, high, low)


def searched(runs: Runs, steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales and minima [runs, n] with the least weighted error, before they become integers."""
    least = np.full(runs.sum_x.shape, np.inf, np.float32)
    scales, minima = np.zeros_like(least), np.zeros_like(least)
    for scale, minimum, error in _fits(runs, steps):
        better = error < least
        least, scales, minima = (
            np.where(better, *pair) for pair in ((error, least), (scale, scales), (minimum, minima))
        )
    return scales, minima


def _fits(runs: Runs, steps: Steps) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields scales and minima that fit the codes of one spread after the other, and their weighted errors."""
    if steps.has_minima:
        most = steps.levels - 1
        low, span = _reach(runs, steps)
        for spread in _SPREADS[steps.levels]:
            codes = (runs.x - low) * inverse_of(span / (most + spread))
            codes = np.clip(np.rint(codes, out=codes), 0, most, out=codes)
            yield _fit_line(runs, codes, np.inf if steps.minima_are_signed else 0.0)
        return
    half, farthest = steps.levels // 2, _farthest(runs)
    for spread in _SPREADS[steps.levels]:
        for outer in (-half - spread, half - 1 + spread):  # there is one code more below 0 than above
            codes = runs.x * inverse_of(farthest / outer)
            yield _fit_scale(runs, np.clip(np.rint(codes, out=codes), -half, half - 1, out=codes))


def _fit_line(runs: Runs, codes: np.ndarray, highest: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fits `low + scale * code` to the numbers, with a low number of at most `highest` and no scale below 0.

    Returns the scale, -low, and the error.
    """
    weighted = codes if runs.w is None else codes * runs.w
    sum_q, sum_qq, sum_qx = weighted.sum(axis=0), dot(weighted, codes), dot(weighted, runs.x)
    through_zero = sum_qx * inverse_of(sum_qq)
    # Equal codes make no line.
    determinant = runs.sum_w * sum_qq - sum_q**2
    is_line = determinant > 1e-5 * runs.sum_w * sum_qq
    inverse = inverse_of(np.where(is_line, determinant, 0))
    scale = (runs.sum_w * sum_qx - sum_q * runs.sum_x) * inverse
    low = (sum_qq * runs.sum_x - sum_q * sum_qx) * inverse
    low = np.where(is_line, low, np.where(sum_qq > 0, 0, runs.sum_x / runs.sum_w))
    is_line &= (low < highest) & (scale > 0)
    scale = np.where(is_line, scale, np.maximum(through_zero, 0))
    low = np.where(is_line | (sum_qq == 0), np.minimum(low, highest), 0)
    error = runs.sum_xx - 2 * (scale * sum_qx + low * runs.sum_x) + scale**2 * sum_qq
    return scale, -low, error + 2 * scale * low * sum_q + low**2 * runs.sum_w


def _fit_scale(runs: Runs, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fits `scale * code` to the numbers."""
    weighted = codes if runs.w is None else codes * runs.w
    sum_qx = dot(weighted, runs.x)
    scale = sum_qx * inverse_of(dot(weighted, codes))
    return scale, np.zeros_like(scale), runs.sum_xx - scale * sum_qx


def as_half(values: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Returns numbers, counted in units, as a half will hold them; one that is not 0 does not become 0."""
    halves = np.clip(values * units, -LARGEST_HALF, LARGEST_HALF).astype(np.float16).astype(np.float32)
    vanished = (halves == 0) & (values != 0)
    return np.where(vanished, np.copysign(np.float32(_SMALLEST_HALF), values), halves) / units


def inverse_of(values: np.ndarray) -> np.ndarray:
    """Returns 1 / x, and 0 where that would not be a number to go on with."""
    return np.divide(1, values, out=np.zeros_like(values), where=np.abs(values) > _NOTHING)
