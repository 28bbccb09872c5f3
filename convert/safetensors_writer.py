"""Writes safetensors shards: planned first, then filled in any order."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from moe_jax.convert.checkpoint_files import SAFETENSORS_INDEX, SINGLE_SAFETENSORS
from moe_jax.convert.safetensors_file import encode_header
from moe_jax.convert.tensors import DTYPES


class PlannedTensor(NamedTuple):
    """A tensor to be written: dtype as in safetensors, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def plan_shards(tensors: Mapping[str, PlannedTensor], max_bytes: int) -> dict[str, list[str]]:
    """Fills shards in order, each up to `max_bytes`; a larger tensor has a shard of its own.

    Returns:
      File name -> names of its tensors, in the order of `tensors`.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    if len(shards) == 1:
        return {SINGLE_SAFETENSORS: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


class ShardWriter:
    """Writes planned shards into a directory. A context manager.

    Shards of the same plan that are there already are gone on with: what was written to them stays.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, PlannedTensor], max_bytes: int):
        self._directory = directory
        self._tensors = tensors
        self._plan = plan_shards(tensors, max_bytes)
        self._starts: dict[str, tuple[int, int]] = {}  # tensor -> descriptor, first byte
        self._descriptors: list[int] = []

    def __enter__(self) -> Self:
        for file, names in self._plan.items():
            # Widest dtypes first, as the reference implementation does: every tensor then begins aligned.
            names = sorted(names, key=lambda name: -DTYPES[self._tensors[name].dtype].itemsize)
            spans: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
            end = 0
            for name in names:
                tensor = self._tensors[name]
                spans[name] = (tensor.dtype, tensor.shape, end, end + tensor.nbytes)
                end += tensor.nbytes
            header = encode_header(spans)
            descriptor = os.open(self._directory / file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            self._descriptors.append(descriptor)
            _write_all(descriptor, header, 0)
            for name, (_, _, start, _) in spans.items():
                self._starts[name] = (descriptor, len(header) + start)
        return self

    def write(self, name: str, offset: int, values: np.ndarray) -> None:
        """Writes a contiguous run of a tensor. Safe to call from several threads for different runs.

        Args:
          name: of the tensor.
          offset: elements of the tensor before the run.
          values: in the tensor's dtype.
        """
        assert values.dtype == DTYPES[self._tensors[name].dtype] and values.flags.c_contiguous
        descriptor, start = self._starts[name]
        _write_all(descriptor, values.reshape(-1).view(np.uint8), start + offset * values.itemsize)

    def sync(self) -> None:
        """Waits until all that was written is on disk."""
        for descriptor in self._descriptors:
            os.fsync(descriptor)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._write_index()
                self.sync()
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)

    def _write_index(self) -> None:
        if len(self._plan) == 1:
            return
        weight_map = {name: file for file, names in self._plan.items() for name in names}
        total = sum(tensor.nbytes for tensor in self._tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (self._directory / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_all(descriptor: int, data: bytes | np.ndarray, position: int) -> None:
    view = memoryview(data)  # pyright: ignore[reportArgumentType] NumPy has the buffer protocol on every Python
    while view:
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count
