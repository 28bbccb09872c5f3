"""Quantises numbers to the blocks Q2_K to Q6_K with a small weighted squared error.

The scales (and minima) that fit every run best (`run_fitting`) become multiples of the block's numbers, for which the
neighbouring multiples are tried as well, with new codes each. A block for which plain rounding is better is rounded
plainly.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moe_jax.conversion.gguf.blocks.k_layouts import BLOCK, K_LAYOUTS, KLayout, Parts
from moe_jax.conversion.gguf.blocks.run_fitting import (
    Runs,
    as_half,
    dot,
    inverse_of,
    packed_in_parts,
    plain,
    runs_of,
    searched,
    units_of,
)

_AT_ONCE = 512  # blocks: a few of their arrays are in a core's cache together


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

    def pack(blocks: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        return layout.pack(_coded(blocks, weights, layout, kind))

    return packed_in_parts(rows, BLOCK, importance, _AT_ONCE, pack)


class _Choice(NamedTuple):
    """Scales of n blocks, and the codes that they give."""

    scales: np.ndarray  # [runs, n], integers
    minima: np.ndarray  # [runs, n], integers; zeros without minima
    codes: np.ndarray  # [run, runs, n], from 0 on
    scale: np.ndarray  # [n]: as the half will be, in units of the block's largest number
    minimum: np.ndarray  # [n]
    error: np.ndarray  # [runs, n], weighted


def _coded(blocks: np.ndarray, weights: np.ndarray | None, layout: KLayout, kind: str) -> Parts:
    units = units_of(blocks, layout.most if layout.has_minima else layout.most * layout.levels // 2, kind)
    with np.errstate(over="ignore", invalid="ignore"):  # of a choice that is far too large, and is not taken
        found = _best(runs_of(blocks / units[:, None], weights, layout), layout, units)
    per_block = found.codes.transpose(2, 1, 0).reshape(len(blocks), BLOCK)
    offset = 32 if kind == "Q3_K" else 0
    return Parts(
        codes=per_block.astype(np.uint8),
        scales=(found.scales + offset).T.astype(np.int16).astype(np.uint8),
        minima=found.minima.T.astype(np.uint8) if layout.has_minima else None,
        scale=(found.scale * units).astype(np.float16),
        minimum=(found.minimum * units).astype(np.float16) if layout.has_minima else None,
    )


def _best(runs: Runs, layout: KLayout, units: np.ndarray) -> _Choice:
    """Returns the better of a search and of plain rounding, block by block."""
    best: _Choice | None = None
    for scales, minima in (searched(runs, layout), plain(runs, layout)):
        for choice in _rounded(runs, layout, units, scales, minima):
            if best is None:
                best = choice
                continue
            better = choice.error.sum(axis=0) < best.error.sum(axis=0)
            best = _Choice(*(np.where(better, new, old) for new, old in zip(choice, best, strict=True)))
    assert best is not None
    return best


def _rounded(
    runs: Runs, layout: KLayout, units: np.ndarray, scales: np.ndarray, minima: np.ndarray
) -> Iterator[_Choice]:
    """Yields the choice whose scales are the nearest multiples, and the one with the best of their neighbours."""
    if layout.has_minima:
        scale = as_half(scales.max(axis=0) / layout.most, units)
        minimum = as_half(minima.max(axis=0) / layout.most, units)
        least = 0
    else:
        high, low = scales.max(axis=0), scales.min(axis=0)
        # One more multiple below 0 than above, as for codes.
        scale = as_half(np.where(high > -low, high, low) / -(layout.most + 1), units)
        minimum, least = np.zeros_like(scale), -layout.most - 1
    near = np.clip(np.rint(scales * inverse_of(scale)), least, layout.most)
    near_minima = np.clip(np.rint(minima * inverse_of(minimum)), 0, layout.most)
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
    runs: Runs, layout: KLayout, scales: np.ndarray, minima: np.ndarray, scale: np.ndarray, minimum: np.ndarray
) -> _Choice:
    """Returns the nearest codes for integer scales and minima, with their weighted errors."""
    steps, low = scales * scale, minima * minimum
    offset = 0 if layout.has_minima else layout.levels // 2
    codes = (runs.x + low) * inverse_of(steps)
    codes += offset
    np.clip(np.rint(codes, out=codes), 0, layout.levels - 1, out=codes)
    rest = (codes - offset) * steps - low - runs.x
    return _Choice(scales, minima, codes, scale, minimum, dot(rest if runs.w is None else rest * runs.w, rest))
