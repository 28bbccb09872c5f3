"""Reads boxes of an array that lies in a file in C order, and no bytes but those of the box."""

import math
import mmap
from collections.abc import Iterator, Sequence

import numpy as np

from moe_jax.files.regular_files import BucketDirectory, Directory

_GAP = 256 << 10  # bytes that a bucket sends in the time that it takes to ask it once more
_BLOCK = 8 << 20
_OWN_MEMORY = 1 << 20


def read_box(directory: Directory, file: str, shape: Sequence[int], box: Sequence[slice], out: np.ndarray) -> None:
    """Reads a box of an array.

    Args:
      directory: where the file is.
      file: it holds the array's bytes in C order and nothing else.
      shape: shape of the array.
      box: a slice with both ends for each axis.
      out: filled; it has the shape of the box and the dtype of the array.
    """
    direct = out.flags.c_contiguous
    content = out if direct else fresh(out.shape, out.dtype)
    itemsize = out.dtype.itemsize
    target = content.reshape(-1).view(np.uint8)
    run, starts = _runs(shape, box)
    starts = [start * itemsize for start in starts]
    run *= itemsize
    if isinstance(directory, BucketDirectory) and len(starts) > 1 and starts[1] - starts[0] - run <= _GAP:
        _read_spans(directory, file, starts, run, target)
    else:
        parts = [(start, target[i * run : (i + 1) * run]) for i, start in enumerate(starts)]
        directory.read_ranges(file, parts)
    if not direct:
        out[...] = content


def fresh(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an array to be filled. A large one has memory of its own, which returns to the system with it.

    The allocator would keep memory for every size that it has seen, hundreds of megabytes.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _OWN_MEMORY:
        return np.empty(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8).view(dtype).reshape(shape)


def _runs(shape: Sequence[int], box: Sequence[slice]) -> tuple[int, list[int]]:
    """Returns the length of the contiguous runs of a box, the same for all, and where each begins, in elements."""
    axis, run = len(shape), 1
    while axis > 0:
        axis -= 1
        run *= box[axis].stop - box[axis].start
        if box[axis].stop - box[axis].start < shape[axis]:
            break
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    first = sum(part.start * stride for part, stride in zip(box[axis:], strides[axis:], strict=True))
    outer = np.array([first])
    for part, stride in zip(reversed(box[:axis]), reversed(strides[:axis]), strict=True):
        outer = (np.arange(part.start, part.stop)[:, None] * stride + outer).reshape(-1)
    return run, outer.tolist()


def _read_spans(directory: Directory, file: str, starts: list[int], run: int, target: np.ndarray) -> None:
    """Reads runs and the bytes between them, in blocks."""
    for first, last in _blocks(starts, run):
        begin = starts[first]
        span = np.empty(starts[last - 1] + run - begin, np.uint8)
        directory.read_ranges(file, [(begin, span)])
        for i in range(first, last):
            target[i * run : (i + 1) * run] = span[starts[i] - begin : starts[i] - begin + run]


def _blocks(starts: list[int], run: int) -> Iterator[tuple[int, int]]:
    """Cuts a list of runs where a span would become too long or has a gap."""
    first = 0
    for i in range(1, len(starts) + 1):
        if i == len(starts) or starts[i] + run - starts[first] > _BLOCK or starts[i] - starts[i - 1] - run > _GAP:
            yield first, i
            first = i
