"""A part of an enlarged picture, equal to the last bit to that part of what Pillow's `resize` gives.

Pillow makes the whole enlarged picture before it can be cropped; of one pixel by 4,000, made 336 wide, these are 1.3
million rows, of which 336 are kept. The arithmetic here is that of Pillow's `Resample.c`: two passes, along the rows
first, of weights in fixed point of 22 bits, each rounded to a byte. (Where a picture becomes smaller, releases of
Pillow differ in which pass is first: such pictures are made whole.)
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

_BITS = 32 - 8 - 2


class Filter(NamedTuple):
    """Attributes:
    weight: of a source pixel at this distance, in source pixels.
    support: greatest distance with a weight.
    """

    weight: Callable[[Float[np.ndarray, "..."]], Float[np.ndarray, "..."]]
    support: float


def _cubic(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _triangle(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _lanczos(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    # The sine of the C library, as in Pillow: NumPy has its own.
    return np.asarray([_sinc(one) * _sinc(one / 3) if -3.0 <= one < 3.0 else 0.0 for one in x.tolist()])


def _sinc(x: float) -> float:
    return 1.0 if x == 0.0 else math.sin(x * math.pi) / (x * math.pi)


FILTERS = {"bicubic": Filter(_cubic, 2.0), "bilinear": Filter(_triangle, 1.0), "lanczos": Filter(_lanczos, 3.0)}


def enlarged_part(
    picture: UInt8[np.ndarray, "H W 3"], size: tuple[int, int], top: int, left: int, rows: int, columns: int, name: str
) -> UInt8[np.ndarray, "R C 3"]:
    """Returns rows `top` to `top + rows` and columns `left` to `left + columns` of the picture enlarged to `size`.

    Args:
      picture: RGB.
      size: height and width of the whole enlarged picture, which is not made; no side is smaller than the picture's.
      name: of the filter, one of `FILTERS`.
    """
    assert size[0] >= picture.shape[0] and size[1] >= picture.shape[1], "only for pictures that become larger"
    kind, height = FILTERS[name], len(picture)
    # Of a long picture only the lines that the second pass reads are widened by the first.
    begin, end = 0, height
    if rows:
        begin, end = _reach(height, size[0], top, kind)[0], _reach(height, size[0], top + rows - 1, kind)[1]
    needed = picture[begin:end].swapaxes(0, 1)
    across = _pass(needed, len(needed), 0, size[1], left, columns, kind).swapaxes(0, 1)
    return _pass(across, height, begin, size[0], top, rows, kind)


def _reach(lines: int, out: int, index: int, kind: Filter) -> tuple[int, int]:
    """Returns which of so many lines, from the first to before the last, make line `index` of `out`."""
    if out == lines:  # Pillow leaves out a pass that changes nothing
        return index, index + 1
    center = (index + 0.5) * (lines / out)
    return max(int(center - kind.support + 0.5), 0), min(int(center + kind.support + 0.5), lines)


def _pass(
    part: UInt8[np.ndarray, "N M 3"], lines: int, begin: int, out: int, start: int, count: int, kind: Filter
) -> UInt8[np.ndarray, "R M 3"]:
    """Enlarges the first axis from `lines`, of which `part` has those from `begin` on, to `out`.

    Returns `count` lines of it from `start` on.
    """
    if out == lines:
        return part[start - begin : start - begin + count]
    made = np.empty((count, *part.shape[1:]), np.uint8)
    for index in range(count):
        first, last = _reach(lines, out, start + index, kind)
        weights = kind.weight(np.arange(first, last) - (start + index + 0.5) * (lines / out) + 0.5)
        fixed = _fixed(weights / _sum(weights))
        total = np.tensordot(fixed, part[first - begin : last - begin].astype(np.int64), 1) + (1 << (_BITS - 1))
        made[index] = np.clip(total >> _BITS, 0, 255)
    return made


def _sum(weights: Float[np.ndarray, " n"]) -> float:
    """One after the other, as a loop in C adds: NumPy's sum is in another order."""
    total = 0.0
    for weight in weights.tolist():
        total += weight
    return total


def _fixed(weights: Float[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    return np.asarray([math.trunc(weight * (1 << _BITS) + math.copysign(0.5, weight)) for weight in weights.tolist()])
