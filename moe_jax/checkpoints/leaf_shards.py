"""Writes parameters from all processes at once, each its own shards; and to a bucket, where nothing is renamed.

The result is a checkpoint like that of `LeafWriter`, which Orbax reads too, except that a leaf may lie in several
files, the chunks of its Zarr array. A chunk is a shard, so that no process writes into another's file, and none ever
holds more of a leaf than its own part. In a bucket a large leaf that is written as a whole is cut along its last axis:
a process that needs some columns can ask for these alone.
"""

import itertools
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from moe_jax.checkpoints.zarr_arrays import STATE, chunk_name
from moe_jax.distributed.processes import first_decides, is_first_process, wait_for_all
from moe_jax.files.regular_files import count_traffic
from moe_jax.files.storage_path import StoragePath, as_path

COMPLETED = "_CHECKPOINT_METADATA"
"""The file of a checkpoint that is written last."""
_LEAST = 1 << 20  # bytes of a column of chunks in a bucket
_COLUMNS = 8


class Marks(Protocol):
    """Records which leaves are written; the record survives a kill."""

    def mark(self, name: str) -> None: ...

    def marked(self, names: Iterable[str]) -> list[str]: ...


class ShardWriter:
    """Writes named leaves one after another, from one process or many. They can be read once the writer is closed.

    Attributes:
      done: paths of the leaves that this process has written; at first, of all leaves that were written before an
        interruption.
    """

    def __init__(self, directory: Path, expected: Collection[str], *, marks: Marks | None):
        """Starts or resumes a checkpoint. Every process makes this call.

        Args:
          directory: where the checkpoint will be; empty, or left by an interrupted writer of the same leaves.
          expected: paths of all leaves.
          marks: for the first process, the record of the leaves that an interrupted writer has written; None: a leaf
            counts as written if its metadata is there.
        """
        self._directory = as_path(directory)
        self._expected = sorted(expected)
        self._marks = marks
        self.done = set(first_decides(self._written_before))

    def write(self, leaves: Mapping[str, np.ndarray | jax.Array]) -> None:
        """Writes whole leaves. If there are several processes, one of them makes the call for a leaf.

        Raises:
          OSError: if the disk is full or cannot be written, or the bucket does not answer.
        """
        for path, leaf in leaves.items():
            array = np.asarray(leaf)
            grid = array.shape if self._directory.at_once == 1 else _columns(array)
            parts = [_box(position, grid) for position in _positions(array.shape, grid)]
            self._write_chunks(path, [(position, array[box] if box else array) for position, box in parts])
            self._write_metadata(path, array.shape, array.dtype, grid)
            if self._marks is not None:
                self._marks.mark(path)
            self.done.add(path)

    def write_shards(
        self,
        path: str,
        spec: jax.ShapeDtypeStruct,
        grid: tuple[int, ...],
        shards: Iterable[tuple[tuple[int, ...], np.ndarray]],
    ) -> None:
        """Writes the shards of a leaf that this process has. All processes make the call.

        Args:
          path: path of the leaf.
          spec: its shape and dtype.
          grid: the shape of every shard.
          shards: the shards with their positions in the grid; every shard is given by one process only.

        Raises:
          OSError: if the disk is full or cannot be written, or the bucket does not answer.
        """
        for shard in shards:
            self._write_chunks(path, [shard])
        self.done.add(path)
        if is_first_process():
            self._write_metadata(path, spec.shape, np.dtype(spec.dtype), grid)

    def close(self) -> None:
        """Completes the checkpoint, when all processes have come here."""
        wait_for_all("leaves written")
        first_decides(self._complete)

    def _written_before(self) -> list[str]:
        if self._marks is not None:
            return self._marks.marked(self._expected)
        return [path for path in self._expected if _holds_something(self._folder(path) / ".zarray")]

    def _write_chunks(self, path: str, chunks: list[tuple[tuple[int, ...], np.ndarray]]) -> None:
        folder = self._folder(path)
        folder.mkdir(parents=True, exist_ok=True)
        count_traffic(written=sum(chunk.nbytes for _, chunk in chunks))
        folder.map(lambda chunk: (folder / chunk_name(chunk[0])).write_durably(_bytes_of(chunk[1])), chunks)

    def _write_metadata(self, path: str, shape: tuple[int, ...], dtype: np.dtype, grid: tuple[int, ...]) -> None:
        metadata = {
            "chunks": list(grid),
            "compressor": None,
            "dimension_separator": ".",
            "dtype": dtype.str if dtype.kind in "biuf" else dtype.name,
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(shape),
            "zarr_format": 2,
        }
        # Byte for byte the same file as `LeafWriter` writes.
        (self._folder(path) / ".zarray").write_durably(json.dumps(metadata, separators=(",", ":")).encode())

    def _complete(self) -> None:
        tree = {}
        for path in self._expected:
            names = path.split("/")
            tree[str(tuple(names))] = {
                "key_metadata": [{"key": name, "key_type": 2} for name in names],
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
            }
        metadata = {
            "tree_metadata": tree,
            "use_ocdbt": False,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        self._store(self._directory / STATE / "_METADATA", metadata)
        # Orbax needs these files to read the checkpoint.
        (self._directory / "orbax.checkpoint").write_durably(b"")
        (self._directory / "commit_success.txt").write_durably(b"written by moe_jax")
        handler = "orbax.checkpoint.experimental.v1._src.handlers.stateful_checkpointable_handler"
        self._store(
            self._directory / COMPLETED,
            {
                "item_handlers": {STATE: f"{handler}.StatefulCheckpointableHandler"},
                "metrics": {},
                "performance_metrics": {},
                "init_timestamp_nsecs": None,
                "commit_timestamp_nsecs": None,
                "custom_metadata": {},
            },
        )

    def _folder(self, path: str) -> StoragePath:
        return self._directory / STATE / path.replace("/", ".")

    def _store(self, file: StoragePath, content: Mapping[str, object]) -> None:
        file.write_durably(json.dumps(content).encode())


def _holds_something(file: Path) -> bool:
    try:
        return file.stat().st_size > 0  # a kill may have come between its beginning and its content
    except FileNotFoundError:
        return False


def _columns(array: np.ndarray) -> tuple[int, ...]:
    """Returns the shape of the chunks of a leaf that is written to a bucket as a whole."""
    if array.ndim < 2:
        return array.shape
    parts = _COLUMNS
    while parts > 1 and (array.shape[-1] % parts or array.nbytes // parts < _LEAST):
        parts //= 2
    return (*array.shape[:-1], array.shape[-1] // parts)


def _positions(shape: tuple[int, ...], grid: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    return itertools.product(*(range(size // chunk) for size, chunk in zip(shape, grid, strict=True)))


def _box(position: tuple[int, ...], grid: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    return position, tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in zip(position, grid, strict=True))


def _bytes_of(array: np.ndarray) -> memoryview:
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def shard_positions(array: jax.Array) -> dict[tuple[int, ...], jax.Array]:
    """Returns the shards that this process writes, by position in the grid; each is written by one process only."""
    shape = array.sharding.shard_shape(array.shape)
    own = (shard for shard in array.addressable_shards if shard.replica_id == 0)
    return {_position(shard.index, shape): shard.data for shard in own}


def _position(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((axis.start or 0) // size for axis, size in zip(index, shape, strict=True))
