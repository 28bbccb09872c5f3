"""The parameters of a model directory: named leaves, written and read one after another in flat memory.

They form an Orbax checkpoint, which `orbax_store` writes; each leaf is a file of its own that is read without Orbax.
"""

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import numpy as np

from moe_jax.checkpoints.orbax_store import PARTIAL, finalize_groups, read_leaf, read_specs, save_group
from moe_jax.checkpoints.zarr_arrays import STATE, Part, ZarrArray, read_zarr_arrays
from moe_jax.core.errors import InputError
from moe_jax.distributed.processes import first_decides
from moe_jax.files.byte_files import fingerprint_leaves
from moe_jax.files.regular_files import Directory, HeldDirectory, hold
from moe_jax.files.storage_path import as_path

# Leaves are gathered until a group is this large: each group costs some 50 ms and a directory, whatever its size,
# and memory grows by no more than this. A larger leaf is a group of its own and is not copied.
GROUP_BYTES = 128 << 20


class LeafWriter:
    """Writes named leaves one after another. They can be read once the writer is closed.

    Each leaf becomes an uncompressed Zarr array of one chunk, whose file holds nothing but the leaf's bytes.
    Compression makes writing 3-10 times slower and gains little on trained weights; with one chunk Orbax writes from
    our memory instead of copying it.

    With several processes every process makes the same calls, and the first one writes.

    Attributes:
      done: paths of the leaves that are on disk.
    """

    def __init__(self, directory: Path, *, resume: bool = False):
        """Starts a checkpoint at `directory`.

        Args:
          directory: where the checkpoint appears on `close`. Nothing may be there yet.
          resume: keep the leaves that an interrupted writer left, and list them in `done`; otherwise remove them.

        Raises:
          FileExistsError: if there is something at `directory` already.
        """
        self._directory = Path(directory).absolute()
        if self._directory.exists():
            raise FileExistsError(f"{self._directory} already exists")
        self._partial = self._directory.with_name(self._directory.name + PARTIAL)
        self._pending: dict[str, np.ndarray] = {}
        self._names: set[str] = set()
        self._inner: set[str] = set()
        self.done = set(first_decides(lambda: self._take_up(resume)))
        for path in self.done:
            self._register(path)

    def write(self, leaves: Mapping[str, np.ndarray | jax.Array]) -> None:
        """Writes leaves. Small ones are collected in memory and written together; a large one is on disk on return.

        Args:
          leaves: by path ("layers/0/mlp/up/kernel"). The arrays may be changed by the caller afterwards.

        Raises:
          OSError: if the disk is full or cannot be written.
          ValueError: for a leaf written twice, an empty leaf, or a leaf whose path leads through another leaf.
        """
        for path, leaf in leaves.items():
            self._register(path)
            array = np.asarray(leaf)
            if array.size == 0:
                raise ValueError(f"leaf {path} has shape {array.shape}: there is nothing to write")
            if array.nbytes >= GROUP_BYTES:
                self._save({path: array})
                continue
            if self._pending_bytes() + array.nbytes > GROUP_BYTES:
                self._flush()
            self._pending[path] = array.copy()

    def close(self) -> None:
        """Writes the leaves still in memory and completes the checkpoint.

        Raises:
          OSError: if the disk is full or cannot be written.
        """
        self._flush()
        finalize_groups(self._directory)

    def _take_up(self, resume: bool) -> list[str]:
        """Removes the files of an interrupted writer, but for its complete groups when resuming; returns their leaves.

        Only the first process calls this.
        """
        # An incomplete group has this name. Orbax moves a group into `_partial` when all of it is on disk.
        for stale in self._directory.parent.glob(f"{self._partial.name}.*"):
            shutil.rmtree(stale)
        if not self._partial.exists():
            return []
        # It was interrupted while Orbax merged the groups, which cannot be resumed.
        merging = any(not group.name.startswith(f"{self._partial.name}.pending") for group in self._partial.iterdir())
        if merging or not resume:
            shutil.rmtree(self._partial)
            return []
        return [path for group in self._partial.iterdir() for path in LeafReader(group).specs]

    def _register(self, path: str) -> None:
        parts = path.split("/")
        inner = {"/".join(parts[:n]) for n in range(1, len(parts))}
        if path in self._names or path in self._inner or inner & self._names:
            raise ValueError(f"leaf {path} was written already, or it and another leaf lie on one path")
        if not all(parts) or "." in path:
            raise ValueError(f"leaf path {path!r} must be names joined by '/', without dots")
        self._names.add(path)
        self._inner |= inner

    def _pending_bytes(self) -> int:
        return sum(array.nbytes for array in self._pending.values())

    def _flush(self) -> None:
        if self._pending:
            self._save(self._pending)
            self._pending = {}

    def _save(self, leaves: Mapping[str, np.ndarray]) -> None:
        save_group(self._directory, leaves)
        self.done |= leaves.keys()


def remove_partial(directory: Path) -> None:
    """Removes the part of a checkpoint that an interrupted `LeafWriter` left."""
    for partial in directory.parent.glob(f"{directory.name}{PARTIAL}*"):
        shutil.rmtree(partial)


def adopt_groups(directory: Path) -> None:
    """Moves the leaves of an interrupted `LeafWriter` to where a `ShardWriter`, which goes on, looks for them."""
    partial = directory.with_name(directory.name + PARTIAL)
    groups = list(partial.iterdir()) if partial.exists() else []
    if all(group.name.startswith(f"{partial.name}.pending") for group in groups):  # Orbax has not begun to merge them
        for leaf in (leaf for group in groups for leaf in (group / STATE).iterdir() if leaf.is_dir()):
            (directory / STATE).mkdir(parents=True, exist_ok=True)
            leaf.rename(directory / STATE / leaf.name)
    remove_partial(directory)


class LeafReader:
    """Reads leaves of a checkpoint by path, each on its own.

    All is read through one open directory, so that if another checkpoint takes this one's place meanwhile, no leaf
    that `LeafWriter` wrote is read from that one.

    Attributes:
      specs: shape and dtype of every leaf, by path; layers/2 comes before layers/10.
    """

    specs: dict[str, jax.ShapeDtypeStruct]

    def __init__(self, directory: Path, *, inside: Directory | None = None):
        """Opens the checkpoint at `directory`; no weights are read.

        Args:
          directory: the directory of the checkpoint.
          inside: the directory that a relative path begins at; None: the current one.

        Raises:
          FileNotFoundError: if there is no directory.
          InputError: if it is not a complete Orbax checkpoint, or a file with the shape of a leaf is damaged.
        """
        try:
            held = hold(directory, inside=inside)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"no checkpoint at {inside.path / directory if inside else directory}") from None
        self._held = held
        self._directory = held.path.absolute()
        self._arrays = read_zarr_arrays(held)
        raw = self._arrays is not None and all(array.is_raw for array in self._arrays.values())
        if not isinstance(held, HeldDirectory) and not raw:
            raise InputError(
                f"{self._directory} is stored in a way that is only read on local disks (a database, or compressed); "
                "copy it to one first"
            )
        if self._arrays is None:
            specs = read_specs(self._directory)
        else:
            specs = {path: array.spec for path, array in self._arrays.items()}
        self.specs = dict(sorted(specs.items(), key=lambda item: _natural(item[0])))

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf, and no bytes but its own.

        Raises:
          InputError: if there is no such leaf, or its file does not hold what the metadata says.
        """
        if path not in self.specs:
            raise InputError(f"{self._directory} has no leaf {path!r}")
        array = self._array(path)
        return array.read() if array else read_leaf(self._directory, path)

    def read_part(self, path: str, part: Part) -> np.ndarray:
        """Reads a box of a leaf; if `LeafWriter` or `ShardWriter` wrote the leaf, reads no bytes but those of the box.

        Raises:
          InputError: as in `read`.
        """
        if path not in self.specs:
            raise InputError(f"{self._directory} has no leaf {path!r}")
        array = self._array(path)
        return array.read(part) if array else read_leaf(self._directory, path)[part]

    def read_many(self, paths: Iterable[str]) -> dict[str, np.ndarray]:
        """Reads several leaves, all into memory."""
        return {path: self.read(path) for path in paths}

    def check_sizes(self) -> None:
        """Raises `InputError` for a leaf whose file is missing, or does not have the size that its shape says."""
        arrays = [array for array in map(self._array, self.specs) if array is not None]
        as_path(self._directory).map(lambda array: array.check_size(), arrays)

    def stored_bytes(self, path: str) -> int:
        """Bytes of a leaf on disk: its file and a few hundred bytes of Zarr metadata."""
        array = self._array(path)
        if array is not None:
            return array.stored_bytes()
        folder = self._directory / STATE / path.replace("/", ".")
        files = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
        # Orbax's database keeps many leaves in one file.
        return sum(files) if files else math.prod(self.specs[path].shape) * self.specs[path].dtype.itemsize

    def fingerprint(self) -> str:
        """Returns the identity of the weights: a SHA-256 of names, shapes, dtypes, and samples of the content."""

        def sample(path: str) -> bytes:
            array = self._array(path)
            return array.sample() if array else self.read(path).tobytes()

        samples = dict(zip(self.specs, as_path(self._directory).map(sample, self.specs), strict=True))
        return fingerprint_leaves(self.specs, samples.__getitem__)

    def _array(self, path: str) -> ZarrArray | None:
        """Returns the file that holds the bytes of a leaf and nothing else, if the leaf was written by `LeafWriter`.

        Orbax reads the metadata of all leaves in every call (0.2 s for 1,500 leaves) and holds a large leaf twice in
        memory; reading the file itself, as `zarr_arrays` does, avoids both.
        """
        array = None if self._arrays is None else self._arrays[path]
        return array if array is not None and array.is_raw else None


def _natural(path: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.split("/")]
