"""Tensors in files: their positions, and reading runs of their elements without reading the rest."""

import math
import os
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from moe_jax.errors import InputError

# Dtypes in which parameters may be stored, by their names in safetensors.
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Bits per element of all safetensors dtypes, to check the offsets of tensors that we do not read.
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class TensorEntry(NamedTuple):
    """The position of a tensor.

    Attributes:
      file: the file it is in.
      dtype: name as in safetensors, such as `BF16`.
      shape: its shape.
      start: bytes of the file before its first element.
      strides: in elements, if it is not contiguous (PyTorch files only); None: row-major.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class TensorFiles:
    """Open files that are read by position. Nothing is memory-mapped, so only requested bytes count as memory.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._descriptors)

    def read_into(self, entry: TensorEntry, offset: int, out: np.ndarray) -> None:
        """Fills a contiguous array with the elements of a row-major tensor that begin at element `offset`.

        Raises:
          InputError: if the file ends before that.
        """
        assert entry.strides is None and out.flags.c_contiguous
        self._fill(entry.file, entry.start + offset * out.itemsize, out.reshape(-1).view(np.uint8).data)

    def read_strided(self, entry: TensorEntry) -> np.ndarray:
        """Reads a whole tensor of any strides; returns it with those strides."""
        dtype = DTYPES[entry.dtype]
        strides = entry.strides if entry.strides is not None else row_major(entry.shape)
        if 0 in entry.shape:
            return np.empty(entry.shape, dtype)
        extent = 1 + sum((n - 1) * stride for n, stride in zip(entry.shape, strides, strict=True))
        flat = np.empty(extent, dtype)
        self._fill(entry.file, entry.start, flat.view(np.uint8).data)
        return np.lib.stride_tricks.as_strided(flat, entry.shape, [stride * dtype.itemsize for stride in strides])

    def _fill(self, file: Path, position: int, out: memoryview) -> None:
        descriptor = self._descriptor(file)
        done = 0
        while done < len(out):
            count = os.preadv(descriptor, [out[done:]], position + done)
            if count == 0:
                raise InputError(f"{file} ended while it was read; it is truncated, fetch it again")
            done += count

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
            return self._descriptors[file]


def _close_all(descriptors: dict[Path, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def row_major(shape: Iterable[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array."""
    strides: list[int] = []
    step = 1
    for n in reversed(tuple(shape)):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
