"""Quantises numbers to the blocks Q2_K to Q6_K with a small weighted squared error.

For every run of numbers, scales from a grid are tried: each gives codes, and these the scale (and minimum) that fits
them best, by weighted least squares. The best become multiples of the block's numbers, for which the neighbouring
multiples are tried as well, with new codes each. A block for which plain rounding is better is rounded plainly.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moe_jax.conversion.gguf.k_layouts import BLOCK, K_LAYOUTS, KLayout, Parts
from moe_jax.core.errors import InputError

_AT_ONCE = 512  # blocks: a few of their arrays are in a core's cache together
_LARGEST_HALF = 65504.0
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


def k_quantized(rows: np.ndarray, kind: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Returns the blocks of rows, Float32[r, n] with n a multiple of 256, as UInt8[r * n / 256, bytes of a block].

    Args:
      rows: finite numbers.
      kind: `Q2_K`, `Q3_K`, `Q4_K`, `Q5_K` or `Q6_K`.
      importance: Float32[n], at least 0, how much the square of an error in each column counts, such as the second
        moments of what the columns are multiplied by; None: all count the same.

    Raises:
      InputError: if numbers are not finite, or so large that the number of a block, a half, cannot hold them.
    """
    layout = K_LAYOUTS[kind]
    blocks = np.ascontiguousarray(rows, np.float32).reshape(-1, BLOCK)
    weights = None if importance is None else _weights(importance)
    packed = []
    for start in range(0, max(1, len(blocks)), _AT_ONCE):
        some = blocks[start : start + _AT_ONCE]
        own = None if weights is None else weights[np.arange(start, start + len(some)) % len(weights)]
        packed.append(layout.pack(_coded(some, own, layout, kind)))
    return np.concatenate(packed)


def _weights(importance: np.ndarray) -> np.ndarray:
    """Returns weights of the columns, Float32[blocks of a row, 256]. What counts nothing is still rounded."""
    values = np.asarray(importance, np.float32).reshape(-1, BLOCK)
    if not np.isfinite(values).all() or (values < 0).any():
        raise InputError("the importance of columns must be finite and at least 0")
    most = values.max(initial=0.0)
    return np.ones_like(values) if most == 0 else np.maximum(values / most, 1e-6)


class _Runs(NamedTuple):
    """Numbers by run, with what all candidates share.

    The axis of the numbers of a run comes first, and that of blocks last, so that sums run over whole vectors.
    """

    x: np.ndarray  # [run, runs, n], at most 1 in a block
    w: np.ndarray | None  # the same, weights; None: all are 1
    sum_w: np.ndarray  # [runs, n]
    sum_x: np.ndarray  # [runs, n], weighted
    sum_xx: np.ndarray  # [runs, n], weighted


class _Choice(NamedTuple):
    """Scales of n blocks, and the codes that they give."""

    scales: np.ndarray  # [runs, n], integers
    minima: np.ndarray  # [runs, n], integers; zeros without minima
    codes: np.ndarray  # [run, runs, n], from 0 on
    scale: np.ndarray  # [n]: as the half will be, in units of the block's largest number
    minimum: np.ndarray  # [n]
    error: np.ndarray  # [runs, n], weighted


def _coded(blocks: np.ndarray, weights: np.ndarray | None, layout: KLayout, kind: str) -> Parts:
    largest = np.abs(blocks).max(axis=1, initial=0.0)
    if not np.isfinite(largest).all():
        raise InputError(f"numbers that are not finite cannot be stored as {kind}")
    steps = layout.most if layout.has_minima else layout.most * layout.levels // 2
    if largest.max(initial=0.0) > _LARGEST_HALF * steps:
        raise InputError(
            f"numbers as large as {largest.max():.3g} cannot be stored as {kind}, whose scales are halves; choose F32 "
            "or BF16"
        )
    units = np.where(largest > 0, largest, np.float32(1))
    with np.errstate(over="ignore", invalid="ignore"):  # of a choice that is far too large, and is not taken
        found = _best(_runs(blocks / units[:, None], weights, layout), layout, units)
    per_block = found.codes.transpose(2, 1, 0).reshape(len(blocks), BLOCK)
    offset = 32 if kind == "Q3_K" else 0
    return Parts(
        codes=per_block.astype(np.uint8),
        scales=(found.scales + offset).T.astype(np.int16).astype(np.uint8),
        minima=found.minima.T.astype(np.uint8) if layout.has_minima else None,
        scale=(found.scale * units).astype(np.float16),
        minimum=(found.minimum * units).astype(np.float16) if layout.has_minima else None,
    )


def _runs(blocks: np.ndarray, weights: np.ndarray | None, layout: KLayout) -> _Runs:
    def by_run(values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values.reshape(len(values), BLOCK // layout.run, layout.run).transpose(2, 1, 0))

    x = by_run(blocks)
    w = None if weights is None else by_run(weights)
    wx = x if w is None else w * x
    sum_w = np.full(x.shape[1:], layout.run, np.float32) if w is None else w.sum(axis=0)
    return _Runs(x, w, sum_w, wx.sum(axis=0), _dot(wx, x))


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("irn,irn->rn", a, b)


def _best(runs: _Runs, layout: KLayout, units: np.ndarray) -> _Choice:
    """Returns the better of a search and of plain rounding, block by block."""
    best: _Choice | None = None
    for scales, minima in (_searched(runs, layout), _plain(runs, layout)):
        for choice in _rounded(runs, layout, units, scales, minima):
            if best is None:
                best = choice
                continue
            better = choice.error.sum(axis=0) < best.error.sum(axis=0)
            best = _Choice(*(np.where(better, new, old) for new, old in zip(choice, best, strict=True)))
    assert best is not None
    return best


def _plain(runs: _Runs, layout: KLayout) -> tuple[np.ndarray, np.ndarray]:
    """Returns scales and minima [runs, n] that reach from the smallest to the largest number of each run."""
    if layout.has_minima:
        low = np.minimum(runs.x.min(axis=0), 0)
        return (np.maximum(runs.x.max(axis=0), 0) - low) / (layout.levels - 1), -low
    return _farthest(runs) / -(layout.levels // 2), np.zeros_like(runs.sum_x)


def _farthest(runs: _Runs) -> np.ndarray:
    """Returns the number of each run with the largest magnitude, with its sign."""
    high, low = runs.x.max(axis=0), runs.x.min(axis=0)
    return np.where(high > -low, high, low)


def _searched(runs: _Runs, layout: KLayout) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales and minima [runs, n] with the least weighted error, before they become integers."""
    least = np.full(runs.sum_x.shape, np.inf, np.float32)
    scales, minima = np.zeros_like(least), np.zeros_like(least)
    for scale, minimum, error in _fits(runs, layout):
        better = error < least
        least, scales, minima = (
            np.where(better, *pair) for pair in ((error, least), (scale, scales), (minimum, minima))
        )
    return scales, minima


def _fits(runs: _Runs, layout: KLayout) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields scales and minima that fit the codes of one spread after the other, and their weighted errors."""
    if layout.has_minima:
        most = layout.levels - 1
        low = np.minimum(runs.x.min(axis=0), 0)
        span = np.maximum(runs.x.max(axis=0), 0) - low
        for spread in _SPREADS[layout.levels]:
            codes = (runs.x - low) * _inverse(span / (most + spread))
            yield _fit_line(runs, np.clip(np.rint(codes, out=codes), 0, most, out=codes))
        return
    half, farthest = layout.levels // 2, _farthest(runs)
    for spread in _SPREADS[layout.levels]:
        for outer in (-half - spread, half - 1 + spread):  # there is one code more below 0 than above
            codes = runs.x * _inverse(farthest / outer)
            yield _fit_scale(runs, np.clip(np.rint(codes, out=codes), -half, half - 1, out=codes))


def _fit_line(runs: _Runs, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fits `scale * code - minimum` to the numbers, neither below 0."""
    weighted = codes if runs.w is None else codes * runs.w
    sum_q, sum_qq, sum_qx = weighted.sum(axis=0), _dot(weighted, codes), _dot(weighted, runs.x)
    through_zero = sum_qx * _inverse(sum_qq)
    # Equal codes make no line.
    determinant = runs.sum_w * sum_qq - sum_q**2
    is_line = determinant > 1e-5 * runs.sum_w * sum_qq
    inverse = _inverse(np.where(is_line, determinant, 0))
    scale = (runs.sum_w * sum_qx - sum_q * runs.sum_x) * inverse
    low = (sum_qq * runs.sum_x - sum_q * sum_qx) * inverse
    low = np.where(is_line, low, np.where(sum_qq > 0, 0, runs.sum_x / runs.sum_w))
    is_line &= (low < 0) & (scale > 0)
    scale = np.where(is_line, scale, np.maximum(through_zero, 0))
    low = np.where(is_line | (sum_qq == 0), np.minimum(low, 0), 0)
    error = runs.sum_xx - 2 * (scale * sum_qx + low * runs.sum_x) + scale**2 * sum_qq
    return scale, -low, error + 2 * scale * low * sum_q + low**2 * runs.sum_w


def _fit_scale(runs: _Runs, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fits `scale * code` to the numbers."""
    weighted = codes if runs.w is None else codes * runs.w
    sum_qx = _dot(weighted, runs.x)
    scale = sum_qx * _inverse(_dot(weighted, codes))
    return scale, np.zeros_like(scale), runs.sum_xx - scale * sum_qx


def _rounded(
    runs: _Runs, layout: KLayout, units: np.ndarray, scales: np.ndarray, minima: np.ndarray
) -> Iterator[_Choice]:
    """Yields the choice whose scales are the nearest multiples, and the one with the best of their neighbours."""
    if layout.has_minima:
        scale = _as_half(scales.max(axis=0) / layout.most, units)
        minimum = _as_half(minima.max(axis=0) / layout.most, units)
        least = 0
    else:
        high, low = scales.max(axis=0), scales.min(axis=0)
        # One more multiple below 0 than above, as for codes.
        scale = _as_half(np.where(high > -low, high, low) / -(layout.most + 1), units)
        minimum, least = np.zeros_like(scale), -layout.most - 1
    near = np.clip(np.rint(scales * _inverse(scale)), least, layout.most)
    near_minima = np.clip(np.rint(minima * _inverse(minimum)), 0, layout.most)
    best = first = _chosen(runs, layout, near, near_minima, scale, minimum)
    yield first
    for step in (-1, 0, 1):
        for step_of_minimum in (-1, 0, 1) if layout.has_minima else (0,):
            if step == step_of_minimum == 0:
                continue
            tried = _chosen(
                runs, layout, np.clip(near + step, least, layout.most),
                np.clip(near_minima + step_of_minimum, 0, layout.most), scale, minimum,
            )  # fmt: skip
            better = tried.error < best.error
            best = _Choice(
                np.where(better, tried.scales, best.scales),
                np.where(better, tried.minima, best.minima),
                np.where(better, tried.codes, best.codes),
                scale,
                minimum,
                np.where(better, tried.error, best.error),
            )
    yield best


def _chosen(
    runs: _Runs, layout: KLayout, scales: np.ndarray, minima: np.ndarray, scale: np.ndarray, minimum: np.ndarray
) -> _Choice:
    """Returns the nearest codes for integer scales and minima, with their weighted errors."""
    steps, low = scales * scale, minima * minimum
    offset = 0 if layout.has_minima else layout.levels // 2
    codes = (runs.x + low) * _inverse(steps)
    codes += offset
    np.clip(np.rint(codes, out=codes), 0, layout.levels - 1, out=codes)
    rest = (codes - offset) * steps - low - runs.x
    return _Choice(scales, minima, codes, scale, minimum, _dot(rest if runs.w is None else rest * runs.w, rest))


def _as_half(values: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Returns numbers, counted in units, as a half will hold them; one that is not 0 does not become 0."""
    halves = np.clip(values * units, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16).astype(np.float32)
    vanished = (halves == 0) & (values != 0)
    return np.where(vanished, np.copysign(np.float32(_SMALLEST_HALF), values), halves) / units


def _inverse(values: np.ndarray) -> np.ndarray:
    """Returns 1 / x, and 0 where that would not be a number to go on with."""
    return np.divide(1, values, out=np.zeros_like(values), where=np.abs(values) > _NOTHING)
