"""The bytes of the blocks Q2_K to Q6_K: 256 numbers of a row, in 16 runs of 16 or 8 of 32 with a scale each.

A run is `scale * code - minimum` or, in Q3_K and Q6_K, `scale * code`. The scales and minima of the runs are small
integers, multiples of one number each of the block, which is a half. Source: `block_q2_K` to `block_q6_K` in
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

BLOCK = 256


class Parts(NamedTuple):
    """The integers and numbers of n blocks.

    Attributes:
      codes: UInt8[n, 256], counted from 0.
      scales: UInt8[n, runs], of signed ones the two's complement or, in Q3_K, 32 more.
      minima: UInt8[n, runs]; None: the type has none.
      scale: Float16[n], what the scales are multiples of.
      minimum: Float16[n], what the minima are multiples of; None: the type has none.
    """

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None
    scale: np.ndarray
    minimum: np.ndarray | None


class KLayout(NamedTuple):
    """A type of blocks.

    Attributes:
      run: numbers that share a scale.
      levels: number of codes; without minima they count from -levels / 2.
      most: the largest scale and minimum of a run; without minima the smallest scale is -most - 1.
      has_minima: whether runs have a minimum.
      pack: the bytes of blocks, UInt8[n, bytes of a block].
      minima_are_signed: minima are never below 0.
    """

    run: int
    levels: int
    most: int
    has_minima: bool
    pack: Callable[[Parts], np.ndarray]
    minima_are_signed: bool = False


def _half(values: np.ndarray | None) -> np.ndarray:
    """Returns halves, Float16[n], as bytes [n, 2]."""
    assert values is not None
    return np.ascontiguousarray(values.astype("<f2")).view(np.uint8).reshape(-1, 2)


def _joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(
        [part.reshape(len(part), math.prod(part.shape[1:])) for part in parts], axis=1, dtype=np.uint8, casting="unsafe"
    )


def _two_bits(codes: np.ndarray) -> np.ndarray:
    """Returns the low two bits of codes, UInt8[n, 64]: a byte has those of 32 apart, in each half of the block."""
    quarters = (codes & 3).reshape(len(codes), 2, 4, 32)
    return quarters[:, :, 0] | quarters[:, :, 1] << 2 | quarters[:, :, 2] << 4 | quarters[:, :, 3] << 6


def _four_bits(codes: np.ndarray) -> np.ndarray:
    """Returns the low four bits of codes, UInt8[n, 128]: a byte has those of 32 apart, in each quarter."""
    halves = (codes & 15).reshape(len(codes), 4, 2, 32)
    return halves[:, :, 0] | halves[:, :, 1] << 4


def _scales_and_minima(parts: Parts) -> np.ndarray:
    """Returns 8 scales and 8 minima of six bits, UInt8[n, 12]. The last four of each are spread over two bytes."""
    scales, minima = parts.scales, parts.minima
    assert minima is not None
    return _joined(
        scales[:, :4] | scales[:, 4:] >> 4 << 6,
        minima[:, :4] | minima[:, 4:] >> 4 << 6,
        scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4,
    )


def _pack_q2(parts: Parts) -> np.ndarray:
    assert parts.minima is not None
    scales = parts.scales | parts.minima << 4
    return _joined(scales, _two_bits(parts.codes), _half(parts.scale), _half(parts.minimum))


def _pack_q3(parts: Parts) -> np.ndarray:
    # One byte for the third bits of eight codes, 32 apart.
    third = np.packbits((parts.codes >> 2).reshape(-1, 8, 32), axis=1, bitorder="little")
    low = parts.scales[:, :8] & 15 | (parts.scales[:, 8:] & 15) << 4
    fours = (parts.scales >> 4).reshape(-1, 4, 4)
    high = fours[:, 0] | fours[:, 1] << 2 | fours[:, 2] << 4 | fours[:, 3] << 6
    return _joined(third, _two_bits(parts.codes), low, high, _half(parts.scale))


def _pack_q4(parts: Parts) -> np.ndarray:
    return _joined(_half(parts.scale), _half(parts.minimum), _scales_and_minima(parts), _four_bits(parts.codes))


def _pack_q5(parts: Parts) -> np.ndarray:
    fifth = np.packbits((parts.codes >> 4).reshape(-1, 8, 32), axis=1, bitorder="little")
    return _joined(_half(parts.scale), _half(parts.minimum), _scales_and_minima(parts), fifth, _four_bits(parts.codes))


def _pack_q6(parts: Parts) -> np.ndarray:
    low = (parts.codes & 15).reshape(-1, 2, 2, 64)
    return _joined(low[:, :, 0] | low[:, :, 1] << 4, _two_bits(parts.codes >> 4), parts.scales, _half(parts.scale))


K_LAYOUTS = {
    "Q2_K": KLayout(run=16, levels=4, most=15, has_minima=True, pack=_pack_q2),
    "Q3_K": KLayout(run=16, levels=8, most=31, has_minima=False, pack=_pack_q3),
    "Q4_K": KLayout(run=32, levels=16, most=63, has_minima=True, pack=_pack_q4),
    "Q5_K": KLayout(run=32, levels=32, most=63, has_minima=True, pack=_pack_q5),
    "Q6_K": KLayout(run=16, levels=64, most=127, has_minima=False, pack=_pack_q6),
}
