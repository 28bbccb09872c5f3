"""The parameters of a model directory: named leaves, written and read one after another in flat memory.

They form an Orbax checkpoint that is read and written without Orbax: a folder for every leaf, in the format Zarr 2,
with files that hold the bytes of the leaf and nothing else. Compression would make writing 3-10 times slower and gain
little on trained weights. A leaf is one file, or, if all processes write it, a file for each shard, so that no process
writes into another's and none holds more of a leaf than its own part. In a bucket a large leaf that is written as a
whole is cut along its last axis: a process that needs some columns can ask for these alone.
"""

import itertools
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from moe_jax.checkpoints.orbax_store import read_leaf, read_specs
from moe_jax.checkpoints.zarr_arrays import (
    OWN_FLOATS,
    STATE,
    Part,
    array_folder,
    chunk_name,
    is_whole,
    read_zarr_arrays,
)
from moe_jax.core.errors import InputError
from moe_jax.distributed.processes import first_decides, is_first_process, wait_for_all
from moe_jax.files.byte_files import fingerprint_leaves
from moe_jax.files.regular_files import Directory, HeldDirectory, count_traffic, hold
from moe_jax.files.storage_path import StoragePath, as_path

_LEAST = 1 << 20  # bytes of a column of chunks in a bucket
_COLUMNS = 8


class Marks(Protocol):
    """Records which leaves are written; the record survives a kill."""

    def mark(self, name: str) -> None: ...

    def marked(self, names: Iterable[str]) -> list[str]: ...


class LeafWriter:
    """Writes named leaves one after another, from one process or many. They can be read once the writer is closed.

    Attributes:
      done: paths of the leaves that this process has written; at first, of all leaves that were written before an
        interruption.
    """

    def __init__(self, directory: Path, expected: Iterable[str], *, marks: Marks | None = None):
        """Starts a checkpoint of leaves ("layers/0/mlp/up/kernel"), or goes on. Every process makes this call.

        The directory is empty, or left by an interrupted writer of the same leaves. With `marks` the first process has
        the record of those that it has written; without, a leaf counts as written if its files are whole.
        """
        self._directory = as_path(directory).absolute()
        self._expected = sorted(expected)
        self._marks = marks
        self.done = set(first_decides(self._written_before))

    def write(self, leaves: Mapping[str, np.ndarray | jax.Array]) -> None:
        """Writes whole leaves, which are stored on return. If there are several processes, one makes the call for each.

        Raises:
          OSError: if the disk is full or cannot be written, or the bucket does not answer.
        """
        for path, leaf in leaves.items():
            array = np.asarray(leaf)
            grid = array.shape if self._directory.at_once == 1 else _columns(array)
            chunks = []
            for position in itertools.product(*(range(n // size) for n, size in zip(array.shape, grid, strict=True))):
                box = [slice(i * size, (i + 1) * size) for i, size in zip(position, grid, strict=True)]
                chunks.append((position, array[(*box, ...)]))
            self._write_chunks(path, chunks)
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
        """Writes the shards of a leaf that this process has, as `write` does. All processes make the call.

        The `spec` is that of the leaf, and `grid` the shape of every shard; the shards have positions in the grid, and
        every one is given by one process only.
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
        if not self._directory.exists():
            return []
        held = hold(self._directory)
        return [path for path in self._expected if is_whole(held, path)]

    def _write_chunks(self, path: str, chunks: Collection[tuple[tuple[int, ...], np.ndarray]]) -> None:
        folder = self._directory / array_folder(path)
        folder.mkdir(parents=True, exist_ok=True)
        count_traffic(written=sum(chunk.nbytes for _, chunk in chunks))

        def store(chunk: tuple[tuple[int, ...], np.ndarray]) -> None:
            content: Any = np.ascontiguousarray(chunk[1]).reshape(-1).view(np.uint8)
            self._store(folder / chunk_name(chunk[0]), memoryview(content))

        folder.map(store, chunks)

    def _write_metadata(self, path: str, shape: tuple[int, ...], dtype: np.dtype, grid: tuple[int, ...]) -> None:
        metadata = {
            "chunks": list(grid),
            "compressor": None,
            "dimension_separator": ".",
            "dtype": dtype.name if dtype.name in OWN_FLOATS else dtype.str,
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(shape),
            "zarr_format": 2,
        }
        # Byte for byte the same file as Orbax writes.
        content = json.dumps(metadata, separators=(",", ":")).encode()
        self._store(self._directory / array_folder(path) / ".zarray", content)

    def _complete(self) -> None:
        """Writes the files that Orbax needs to read the checkpoint."""
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
        handler = "orbax.checkpoint.experimental.v1._src.handlers.stateful_checkpointable_handler"
        about = {
            "item_handlers": {STATE: f"{handler}.StatefulCheckpointableHandler"},
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": None,
            "commit_timestamp_nsecs": None,
            "custom_metadata": {},
        }
        self._store(self._directory / STATE / "_METADATA", json.dumps(metadata).encode())
        self._store(self._directory / "orbax.checkpoint", b"")
        self._store(self._directory / "commit_success.txt", b"written by moe_jax")
        self._store(self._directory / "_CHECKPOINT_METADATA", json.dumps(about).encode())

    def _store(self, file: StoragePath, content: bytes | memoryview) -> None:
        try:
            file.write_durably(content)
        except OSError as error:
            if error.filename is None and file.on_disk is not None:  # it says which disk is full
                error.filename = str(self._directory)
            raise


def _columns(array: np.ndarray) -> tuple[int, ...]:
    """Returns the shape of the chunks of a leaf that is written to a bucket as a whole."""
    if array.ndim < 2:
        return array.shape
    parts = _COLUMNS
    while parts > 1 and (array.shape[-1] % parts or array.nbytes // parts < _LEAST):
        parts //= 2
    return (*array.shape[:-1], array.shape[-1] // parts)


def shard_positions(array: jax.Array) -> dict[tuple[int, ...], jax.Array]:
    """Returns the shards that this process writes, by position in the grid; each is written by one process only."""
    shape = array.sharding.shard_shape(array.shape)
    return {
        tuple((axis.start or 0) // size for axis, size in zip(shard.index, shape, strict=True)): shard.data
        for shard in array.addressable_shards
        if shard.replica_id == 0
    }


class LeafReader:
    """Reads leaves of a checkpoint by path, each on its own.

    All is read through one open directory, so that if another checkpoint takes this one's place meanwhile, no leaf
    that `LeafWriter` wrote is read from that one. Such leaves are read without Orbax, which reads the metadata of all
    leaves in every call (0.2 s for 1,500 leaves) and holds a large leaf twice in memory.

    Attributes:
      specs: shape and dtype of every leaf, by path; layers/2 comes before layers/10.
    """

    specs: dict[str, jax.ShapeDtypeStruct]

    def __init__(self, directory: Path, *, inside: Directory | None = None):
        """Opens the checkpoint at `directory`, which begins at `inside` if it is relative; no weights are read.

        Raises:
          FileNotFoundError: if there is no directory.
          InputError: if it is not a complete Orbax checkpoint, or a file with the shape of a leaf is damaged.
        """
        try:
            held = hold(directory, inside=inside)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"no checkpoint at {inside.path / directory if inside else directory}") from None
        self._directory = held.path.absolute()
        arrays = read_zarr_arrays(held)
        self._raw = {path: array for path, array in (arrays or {}).items() if array.is_raw}
        if not isinstance(held, HeldDirectory) and (arrays is None or len(self._raw) < len(arrays)):
            raise InputError(
                f"{self._directory} is stored in a way that is only read on local disks (a database, or compressed); "
                "copy it to one first"
            )
        specs = read_specs(self._directory) if arrays is None else {path: one.spec for path, one in arrays.items()}
        self.specs = dict(sorted(specs.items(), key=lambda item: _natural(item[0])))

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf, and no bytes but its own.

        Raises:
          InputError: if there is no such leaf, or its file does not hold what the metadata says.
        """
        return self.read_part(path, None)

    def read_part(self, path: str, part: Part | None) -> np.ndarray:
        """Reads a box of a leaf as `read` does; if `LeafWriter` wrote the leaf, no bytes but those of the box."""
        if path not in self.specs:
            raise InputError(f"{self._directory} has no leaf {path!r}")
        if path in self._raw:
            return self._raw[path].read(part)
        leaf = read_leaf(self._directory, path)
        return leaf if part is None else leaf[part]

    def check_sizes(self) -> None:
        """Raises `InputError` for a leaf whose file is missing, or does not have the size that its shape says."""
        arrays = [self._raw[path] for path in self.specs if path in self._raw]
        as_path(self._directory).map(lambda array: array.check_size(), arrays)

    def stored_bytes(self, path: str) -> int:
        """Bytes of a leaf on disk: its file and a few hundred bytes of Zarr metadata."""
        if path in self._raw:
            return self._raw[path].stored_bytes()
        folder = self._directory / array_folder(path)
        nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        # Orbax's database keeps many leaves in one file.
        return nbytes or self.specs[path].size * self.specs[path].dtype.itemsize

    def fingerprint(self) -> str:
        """Returns the identity of the weights: a SHA-256 of names, shapes, dtypes, and samples of the content."""

        def sample(path: str) -> bytes:
            return self._raw[path].sample() if path in self._raw else self.read(path).tobytes()

        samples = dict(zip(self.specs, as_path(self._directory).map(sample, self.specs), strict=True))
        return fingerprint_leaves(self.specs, samples.__getitem__)


def _natural(path: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.split("/")]
