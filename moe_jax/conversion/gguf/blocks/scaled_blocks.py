"""Quantises numbers to the blocks Q4_0, Q4_1, Q5_0 and Q5_1 with a small weighted squared error.

A block has 32 numbers of a row, `scale * code` with codes from -8 or -16 on or, in Q4_1 and Q5_1, `scale * code +
minimum`; scale and minimum are halves. Low four bits of codes are stored in pairs that are 16 numbers apart, the fifth
ones in four bytes before them. Source: `block_q4_0` to `block_q5_1` in
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

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

_AT_ONCE = 4096  # blocks


class _Steps(NamedTuple):
    """The codes of a type; see `run_fitting.Steps`."""

    levels: int
    has_minima: bool
    run: int = 32
    minima_are_signed: bool = True


_STEPS = {
    "Q4_0": _Steps(16, False),
    "Q4_1": _Steps(16, True),
    "Q5_0": _Steps(32, False),
    "Q5_1": _Steps(32, True),
}
SCALED_BLOCKS = tuple(_STEPS)
"""The types, by name."""


def scaled_blocks(rows: np.ndarray, kind: str, importance: np.ndarray) -> np.ndarray:
    """Returns the blocks of rows, Float32[r, n] with n a multiple of 32, as UInt8[r * n / 32, bytes of a block].

    Args:
      rows: finite numbers.
      kind: one of `SCALED_BLOCKS`.
      importance: Float32[n], at least 0, how much the square of an error in each column counts.

    Raises:
      InputError: if numbers are not finite, or so large that the numbers of a block, which are halves, cannot hold
        them.
    """
    steps = _STEPS[kind]
    return packed_in_parts(rows, steps.run, importance, _AT_ONCE, partial(_packed, steps=steps, kind=kind))


class _Choice(NamedTuple):
    """Halves of n blocks, in units of each block's largest number, and the codes that they give."""

    scale: np.ndarray  # [1, n]
    minimum: np.ndarray  # [1, n], what is subtracted
    codes: np.ndarray  # [32, 1, n], from 0 on
    error: np.ndarray  # [1, n], weighted


def _packed(blocks: np.ndarray, weights: np.ndarray | None, *, steps: _Steps, kind: str) -> np.ndarray:
    units = units_of(blocks, 1 if steps.has_minima else steps.levels // 2, kind)
    with np.errstate(over="ignore", invalid="ignore"):  # of a choice that is far too large, and is not taken
        found = _best(runs_of(blocks / units[:, None], weights, steps), steps, units)
    numbers = [found.scale * units, -found.minimum * units] if steps.has_minima else [found.scale * units]
    halves = np.ascontiguousarray(np.concatenate(numbers).T, "<f2").view(np.uint8)
    codes = found.codes[:, 0].T.astype(np.uint8)
    fifth = np.packbits(codes >> 4, axis=1, bitorder="little")[:, : 4 if steps.levels == 32 else 0]
    return np.concatenate([halves, fifth, codes[:, :16] & 15 | (codes[:, 16:] & 15) << 4], axis=1)


def _best(runs: Runs, steps: _Steps, units: np.ndarray) -> _Choice:
    """Returns the better of a search and of plain rounding, block by block."""
    first, second = (_rounded(runs, steps, units, *how(runs, steps)) for how in (searched, plain))
    better = second.error < first.error
    return _Choice(*(np.where(better, new, old) for new, old in zip(second, first, strict=True)))


def _rounded(runs: Runs, steps: _Steps, units: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> _Choice:
    """Returns the nearest codes for scales and minima that are rounded to halves."""
    scale, minimum = as_half(scales, units), as_half(minima, units)
    offset = 0 if steps.has_minima else steps.levels // 2
    codes = np.clip(np.rint((runs.x + minimum) * inverse_of(scale)) + offset, 0, steps.levels - 1)
    rest = (codes - offset) * scale - minimum - runs.x
    return _Choice(scale, minimum, codes, dot(rest if runs.w is None else rest * runs.w, rest))
