"""The safetensors format: 8 bytes with the length of a JSON header, the header, the tensors' bytes.

A header is checked completely against the file before any tensor is read. Files are written as shards that are planned
first, then filled in any order.
Source: https://github.com/huggingface/safetensors, `Format`.
"""

import abc
import contextlib
import json
import math
import os
import threading
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from moe_jax.conversion.tensors import DTYPE_BITS, MAX_RANK, STORED_DTYPES, TensorEntry, check_cover, check_tensor_name
from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.files.byte_files import open_bytes
from moe_jax.files.json_toml import MAX_BYTES, parse_json
from moe_jax.files.large_writes import write_at
from moe_jax.files.regular_files import count_traffic
from moe_jax.files.remote_work import RemoteWork
from moe_jax.files.staging import Workplace
from moe_jax.files.storage_path import as_path

SINGLE_SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = MAX_BYTES  # a third of what the reference implementation accepts; a hundred thousand tensors need less


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Reads the names of the tensors in a file, and their positions.

    Raises:
      InputError: if the file is truncated, its header is corrupt or impossibly large, names a tensor twice, or
        describes bytes that overlap, leave gaps or lie outside the file.
    """
    with open_bytes(path) as file:
        prefix = file.bytes_at(0, 8)
        length = int.from_bytes(prefix, "little")
        text = file.bytes_at(8, length) if len(prefix) == 8 and length <= MAX_HEADER else b""
        if len(prefix) < 8 or (len(text) < length and length > file.size - 8):
            wanted = length if len(prefix) == 8 else 8
            raise _bad(path, f"its header should take {wanted} bytes, the file has {file.size}")
        if length > MAX_HEADER:
            raise _bad(path, f"its header claims {length:,} bytes, at most {MAX_HEADER:,} are read")
        header = _parse(path, text)
        tensors = {name: value for name, value in header.items() if name != "__metadata__"}
        entries = {name: _entry(path, file.identity, name, value, 8 + length) for name, value in tensors.items()}
        # It is quicker to learn whether a file ends at a position than where it ends.
        end = 8 + length + sum(entry.nbytes for entry in entries.values())
        size = end if file.ends_at(end) else file.size
        check_cover(entries, 8 + length, size, lambda problem: _bad(path, problem), cut="; the file is truncated")
    return entries


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = parse_json(text, where="its header")
    except InputError as error:
        raise _bad(path, str(error)) from None
    if not isinstance(header, dict):
        raise _bad(path, f"its header is a JSON {type(header).__name__}, expected an object")
    notes = header.get("__metadata__", {})
    if text[:1] != b"{" or not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise _bad(path, "its header is not an object from its first byte on, or its __metadata__ are not strings")
    return header


def _entry(path: Path, identity: Hashable, name: str, value: Any, data_start: int) -> TensorEntry:
    check_tensor_name(path, name)
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"the entry of {shown(name)} in its header is not a dtype, a shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        hint = nearest(dtype, DTYPE_BITS) if isinstance(dtype, str) else ""
        raise _bad(path, f"{shown(name)} has the unknown dtype {shown(dtype)}{hint}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or len(shape) > MAX_RANK:
        raise _bad(path, f"{shown(name)} has shape {shown(shape)} and data_offsets {shown(offsets)}, expected counts")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        # Some types have less than eight bits.
        takes = f"{shown(bits // 8)} bytes" if bits % 8 == 0 else f"{shown(bits)} bits"
        raise _bad(
            path, f"{shown(name)}, {dtype} {shown(shape)}, takes {takes}, but its data_offsets {offsets} span "
            f"{offsets[1] - offsets[0]}"
        )  # fmt: skip
    return TensorEntry(path, dtype, tuple(shape), data_start + offsets[0], identity)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _bad(path: Path, problem: str) -> InputError:
    return InputError(f"{path} is not a valid safetensors file: {problem}; fetch it again")


# --- writing --------------------------------------------------------------------------------------


class PlannedTensor(NamedTuple):
    """A tensor to be written: dtype as in safetensors, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * STORED_DTYPES[self.dtype].itemsize


def plan_shards(tensors: Mapping[str, PlannedTensor], max_bytes: int) -> dict[str, list[str]]:
    """Fills shards, by file name, in order, each up to `max_bytes`; a larger tensor has a shard of its own."""
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


class Layout(NamedTuple):
    """A file that is to be written: its first bytes, its size, and where its tensors begin."""

    header: bytes
    size: int
    starts: dict[str, int]

    @classmethod
    def of(cls, tensors: Mapping[str, PlannedTensor]) -> "Layout":
        """Returns the layout of a file with these tensors."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        # Widest dtypes first, as the reference implementation does: every tensor then begins aligned.
        for name, tensor in sorted(tensors.items(), key=lambda item: -STORED_DTYPES[item[1].dtype].itemsize):
            starts[name], end = end, end + tensor.nbytes
            offsets = [starts[name], end]
            header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that tensors begin aligned
        first = len(text).to_bytes(8, "little") + text
        return cls(first, len(first) + end, {name: len(first) + start for name, start in starts.items()})


class ShardWriter(contextlib.AbstractContextManager):
    """Writes planned shards; what was written to existing ones of the same plan stays. A context manager."""

    def __init__(self, directory: Path, tensors: Mapping[str, PlannedTensor], max_bytes: int):
        self._directory = directory
        self._tensors = tensors
        self._plan = plan_shards(tensors, max_bytes)
        self._file_of = {name: file for file, names in self._plan.items() for name in names}

    def write(self, name: str, offset: int, values: np.ndarray) -> int:
        """Writes a contiguous run of a tensor, from element `offset` on, with values in the tensor's dtype.

        Safe to call from several threads for different runs. Returns the number of bytes that it took.
        """
        assert values.dtype == STORED_DTYPES[self._tensors[name].dtype] and values.flags.c_contiguous
        self._write(name, offset * values.itemsize, values.reshape(-1).view(np.uint8))
        return values.nbytes

    @abc.abstractmethod
    def _write(self, name: str, begin: int, content: np.ndarray) -> None:
        """Writes bytes of a tensor."""

    @abc.abstractmethod
    def sync(self) -> bool:
        """Waits until the written bytes are safe, if that is possible yet; returns whether all of them are."""

    @abc.abstractmethod
    def are_kept(self, names: Iterable[str]) -> bool:
        """Whether an interrupted command is known to have written all of these tensors."""

    def _layout(self, file: str) -> Layout:
        return Layout.of({name: self._tensors[name] for name in self._plan[file]})

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._write_index()
            assert self.sync()

    def _write_index(self) -> None:
        if len(self._plan) == 1:
            return
        total = sum(tensor.nbytes for tensor in self._tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(self._file_of.items()))}
        as_path(self._directory / SAFETENSORS_INDEX).write_durably((json.dumps(index, indent=2) + "\n").encode())


class DiskShards(ShardWriter):
    """Shards on a disk: bytes are written to their place at once."""

    def __enter__(self) -> Self:
        self._starts: dict[str, tuple[int, int]] = {}  # tensor -> descriptor, first byte
        self._descriptors: list[int] = []
        for file in self._plan:
            shard = self._layout(file)
            descriptor = os.open(self._directory / file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            self._descriptors.append(descriptor)
            write_at(descriptor, shard.header, 0)
            self._starts |= {name: (descriptor, start) for name, start in shard.starts.items()}
        return self

    def _write(self, name: str, begin: int, content: np.ndarray) -> None:
        descriptor, start = self._starts[name]
        write_at(descriptor, content, start + begin)

    def sync(self) -> bool:
        for descriptor in self._descriptors:
            os.fsync(descriptor)
        return True

    def are_kept(self, names: Iterable[str]) -> bool:
        return False  # the notes of the work say it

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            super().__exit__(kind, *error)
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)


class BucketShards(ShardWriter):
    """Shards in a bucket, where objects are written only as a whole: a shard is in memory until it is complete."""

    def __init__(self, work: RemoteWork, tensors: Mapping[str, PlannedTensor], max_bytes: int):
        super().__init__(work.folder, tensors, max_bytes)
        self._work = work
        self._kept = set(work.marked(self._plan))
        self._begun: dict[str, tuple[Layout, np.ndarray]] = {}
        self._missing: dict[str, int] = {}  # for every shard that is begun, bytes of tensors that are not written yet
        self._guard = threading.Lock()

    def _write(self, name: str, begin: int, content: np.ndarray) -> None:
        file = self._file_of[name]
        if file in self._kept:
            return
        with self._guard:
            if file not in self._begun:
                shard = self._layout(file)
                whole = np.empty(shard.size, np.uint8)
                whole[: len(shard.header)] = np.frombuffer(shard.header, np.uint8)
                self._begun[file] = shard, whole
                self._missing[file] = shard.size - len(shard.header)
            shard, whole = self._begun[file]
        at = shard.starts[name] + begin
        whole[at : at + content.size] = content
        with self._guard:
            self._missing[file] -= content.size
            if self._missing[file]:
                return
            del self._begun[file], shard
        as_path(self._directory / file).write_durably(whole.data)
        count_traffic(written=whole.size)
        self._work.mark(file)

    def sync(self) -> bool:
        return not self._begun

    def are_kept(self, names: Iterable[str]) -> bool:
        return all(self._file_of[name] in self._kept for name in names)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            # A shard without bytes is never written by `write`.
            for file in self._plan:
                shard = self._layout(file)
                if file not in self._kept and shard.size == len(shard.header):
                    as_path(self._directory / file).write_durably(shard.header)
        super().__exit__(kind, *error)


def shard_writer(work: Workplace | RemoteWork, tensors: Mapping[str, PlannedTensor], max_bytes: int) -> ShardWriter:
    """Returns a writer of shards for the place where a command works."""
    if isinstance(work, RemoteWork):
        return BucketShards(work, tensors, max_bytes)
    return DiskShards(work.folder, tensors, max_bytes)
