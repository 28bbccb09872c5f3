"""Reading and writing arrays on disk. The only file that imports Orbax.

`LeafWriter` and `LeafReader` hold the parameters of a model directory: named leaves, written one after
another in flat memory. `TrainingCheckpoints` holds what a training run needs to go on.
"""

import contextlib
import json
import logging
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
    import orbax.checkpoint.v1 as ocp
except ImportError:  # Orbax 0.12 still keeps its v1 API here.
    import orbax.checkpoint.experimental.v1 as ocp

from moe_jax.disk_errors import disk_errors
from moe_jax.errors import InputError
from moe_jax.fingerprint import fingerprint_leaves, sample_file
from moe_jax.processes import is_first_process, wait_for_all
from moe_jax.staging import remove_directory

# Leaves are gathered until a group is this large: each group costs some 50 ms and a directory, whatever its size,
# and memory grows by no more than this. A larger leaf is a group of its own and is not copied.
GROUP_BYTES = 128 << 20

_STATE = "state"  # Orbax's name for the only item of a checkpoint
_PARTIAL = ".partial_save"  # Orbax's suffix for a checkpoint that is not finalized


class LeafWriter:
    """Writes named leaves one after another; what was written can be read once the writer is closed.

    Each leaf becomes one uncompressed Zarr array in one piece, whose file holds nothing but its bytes. Compression
    costs 3-10x of the speed and gains little on trained weights; one piece lets Orbax write from our memory instead
    of from a copy of it.

    With several processes every process makes the same calls, and the first one writes.

    Attributes:
      done: paths of the leaves that are on disk.
    """

    def __init__(self, directory: Path, *, resume: bool = False):
        """Starts a checkpoint at `directory`.

        Args:
          directory: where the checkpoint appears on `close`. Nothing may be there yet.
          resume: go on with what an interrupted writer left, which `done` names; otherwise that is removed.

        Raises:
          FileExistsError: if there is something at `directory` already.
        """
        self._directory = Path(directory).absolute()
        if self._directory.exists():
            raise FileExistsError(f"{self._directory} already exists")
        self._partial = self._directory.with_name(self._directory.name + _PARTIAL)
        if is_first_process():
            self._remove_stale(resume)
        wait_for_all(f"checkpoint {self._directory} begun")
        self._pending: dict[str, np.ndarray] = {}
        self._names: set[str] = set()
        self._inner: set[str] = set()
        self.done = self._leaves_of_interrupted()
        for path in self.done:
            self._register(path)
        self._context = ocp.Context()
        self._context.array.saving.use_compression = False
        # Plain Zarr v2 files instead of Orbax's database: written without a copy, and a leaf is one file that can be
        # read without going through the metadata of all the others.
        self._context.array.saving.use_ocdbt = False
        self._context.array.saving.use_zarr3 = False

    def write(self, leaves: Mapping[str, np.ndarray | jax.Array]) -> None:
        """Writes leaves. Small ones may wait in memory for others; a large one is on disk on return.

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
        """Writes what still waits and makes the checkpoint whole.

        Raises:
          OSError: if the disk is full or cannot be written.
        """
        self._flush()
        with _writing(self._directory), self._context:
            ocp.partial.finalize(self._directory)

    def _remove_stale(self, resume: bool) -> None:
        """Removes what an interrupted writer left, except for whole groups that are to be gone on with."""
        # What it was in the middle of has this name. Orbax moves a group into `_partial` when all of it is on disk.
        for stale in self._directory.parent.glob(f"{self._partial.name}.*"):
            shutil.rmtree(stale)
        if not self._partial.exists():
            return
        # Interrupted while the groups were being merged: that cannot be taken up again.
        merging = any(not group.name.startswith(f"{self._partial.name}.pending") for group in self._partial.iterdir())
        if merging or not resume:
            shutil.rmtree(self._partial)

    def _leaves_of_interrupted(self) -> set[str]:
        groups = self._partial.iterdir() if self._partial.exists() else ()
        return {path for group in groups for path in LeafReader(group).specs}

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
        tree: dict[str, Any] = {}
        for path, array in leaves.items():
            *parents, name = path.split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[name] = np.ascontiguousarray(array).reshape(array.shape).view(_Lent)
        with _writing(self._directory), self._context:
            ocp.partial.save(self._directory, tree)
        self.done |= leaves.keys()


class _Lent(np.ndarray):
    """An array that Orbax need not copy.

    Orbax deep-copies host arrays in case they change while a background thread writes them. `LeafWriter` waits for
    the thread, so the copy would only double the memory of the largest leaf.
    """

    def __deepcopy__(self, memo: dict) -> "_Lent":
        return self


class LeafReader:
    """Reads leaves of a checkpoint by path, each on its own.

    Attributes:
      specs: shape and dtype of every leaf, by path; layers/2 comes before layers/10.
    """

    specs: dict[str, jax.ShapeDtypeStruct]

    def __init__(self, directory: Path):
        """Opens the checkpoint at `directory`; no weights are read.

        Raises:
          FileNotFoundError: if there is no directory.
          InputError: if it is not a complete Orbax checkpoint.
        """
        self._directory = Path(directory).absolute()
        if not self._directory.is_dir():
            raise FileNotFoundError(f"no checkpoint at {directory}")
        try:
            tree = ocp.metadata(self._directory).metadata
        except Exception as error:
            raise InputError(f"{directory} is not a complete Orbax checkpoint: {_first_line(error)}") from error
        specs = {
            jax.tree_util.keystr(path, simple=True, separator="/"): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        }
        self.specs = dict(sorted(specs.items(), key=lambda item: _natural(item[0])))

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf, and no bytes but its own.

        Raises:
          InputError: if there is no such leaf, or its file does not hold what the metadata says.
        """
        if path not in self.specs:
            raise InputError(f"{self._directory} has no leaf {path!r}")
        file = self._raw_file(path)
        if file is None:
            return self._read_through_orbax(path)
        spec = self.specs[path]
        dtype = np.dtype(spec.dtype)
        array = np.fromfile(file, dtype=np.uint8)
        expected = math.prod(spec.shape) * dtype.itemsize
        if array.nbytes != expected:
            raise InputError(f"{file} has {array.nbytes} bytes, {expected} expected: it is truncated or corrupt")
        return array.view(dtype).reshape(spec.shape)

    def read_many(self, paths: Iterable[str]) -> dict[str, np.ndarray]:
        """Reads several leaves; memory holds all of them."""
        return {path: self.read(path) for path in paths}

    def stored_bytes(self, path: str) -> int:
        """What a leaf takes on the disk: its file and Zarr's few hundred bytes about it."""
        array = self._directory / _STATE / path.replace("/", ".")
        files = [file.stat().st_size for file in array.rglob("*") if file.is_file()]
        # Orbax's database keeps many leaves in one file.
        return sum(files) if files else math.prod(self.specs[path].shape) * self.specs[path].dtype.itemsize

    def fingerprint(self) -> str:
        """Identity of the weights: a SHA-256 over names, shapes, dtypes, and samples of the content."""

        def sample(path: str) -> bytes:
            file = self._raw_file(path)
            return self.read(path).tobytes() if file is None else sample_file(file)

        return fingerprint_leaves(self.specs, sample)

    def _raw_file(self, path: str) -> Path | None:
        """The file that holds the bytes of a leaf and nothing else, if the leaf was written by `LeafWriter`.

        Orbax reads the metadata of all leaves for every call (0.2 s for 1,500 leaves) and holds a large leaf
        twice; the file is read instead in one piece. The layout is that of Zarr v2: no compressor, no filters, C
        order and one chunk mean that the chunk's file is the array.
        """
        array = self._directory / _STATE / path.replace("/", ".")
        try:
            zarr = json.loads((array / ".zarray").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        shape = list(self.specs[path].shape)
        one_raw_chunk = (
            zarr["shape"] == zarr["chunks"] == shape
            and zarr["order"] == "C"
            and not zarr["compressor"]
            and not zarr["filters"]
            and not zarr["dtype"].startswith(">")
        )
        return array / ".".join("0" for _ in shape or [1]) if one_raw_chunk else None

    def _read_through_orbax(self, path: str) -> np.ndarray:
        tree: Any = np.ndarray
        for name in reversed(path.split("/")):
            tree = {name: tree}
        context = ocp.Context()
        context.pytree.loading.partial_load = True
        try:
            with context:
                return jax.tree.leaves(ocp.load(self._directory, tree))[0]
        except Exception as error:
            raise InputError(f"cannot read {path} of {self._directory}: {_first_line(error)}") from error


class TrainingCheckpoints:
    """Checkpoints of one training run: written in the background, the last `keep` are kept.

    A state is any pytree of arrays, PRNG keys among them. It may be restored onto another mesh or another number
    of devices than it was saved from. A checkpoint that was not finished does not count and is removed.
    With several processes every process makes the same calls; arrays lie on a mesh of all, or are equal in each.
    """

    def __init__(self, directory: Path, *, keep: int):
        """Opens or creates `directory`.

        Raises:
          InputError: if `keep` is below 1.
          OSError: if the directory cannot be created.
        """
        if keep < 1:
            raise InputError(f"keep={keep} must be at least 1: the run could not resume")
        self._directory = Path(directory).absolute()
        context = ocp.Context()
        context.array.saving.use_compression = False
        with _writing(self._directory):
            self._checkpointer = ocp.training.Checkpointer(
                self._directory,
                context=context,
                preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            )
        self._saving: Any = None
        self._remove_unfinished()

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Starts writing a checkpoint and returns before it is written. Waits for the one before.

        Args:
          step: number of the step; a step is saved once.
          state: pytree of arrays. Its buffers may be donated as soon as this returns.
          extra: JSON-able; comes back from `restore` as JSON gives it.

        Raises:
          OSError: if this or the checkpoint before could not be written.
        """
        json.dumps(extra)  # fails here rather than in the background
        self.wait()
        leaves = {name: _plain(leaf) for name, leaf in _named_leaves(state).items()}
        try:
            with _writing(self._directory):
                self._saving = self._checkpointer.save_async(step, leaves, force=True, custom_metadata=dict(extra))
        except OSError:
            self._remove_unfinished()
            raise

    def wait(self) -> None:
        """Returns when the last checkpoint is on disk.

        Raises:
          OSError: if it could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            with _writing(self._directory):
                saving.result()
        except OSError:
            self._remove_unfinished()
            raise

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        self.wait()
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    def latest_step(self) -> int | None:
        """Step of the last complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint.

        Args:
          step: one of `steps()`.
          like: pytree of `jax.ShapeDtypeStruct`, each with the sharding to restore onto (without: the default device).

        Returns:
          The state, in the tree structure of `like`, and the extra data.

        Raises:
          InputError: if there is no such step, or its leaves are not those of `like`.
        """
        if step not in self.steps():
            raise InputError(f"{self._directory} has no complete checkpoint of step {step}; it has {self.steps()}")
        wanted = {name: _plain_spec(leaf) for name, leaf in _named_leaves(like).items()}
        metadata = self._checkpointer.metadata(step)
        self._check_same(step, metadata.metadata, wanted)
        restored = self._checkpointer.load(step, wanted)
        leaves = [
            jax.random.wrap_key_data(restored[name], impl=_key_impl(leaf)) if _is_key(leaf) else restored[name]
            for name, leaf in _named_leaves(like).items()
        ]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), dict(metadata.custom_metadata or {})

    def close(self) -> None:
        """Waits for the last checkpoint and ends the background threads.

        Raises:
          OSError: if a checkpoint could not be written, also if that was raised before.
        """
        self.wait()
        with _writing(self._directory):
            self._checkpointer.close()

    def _remove_unfinished(self) -> None:
        # Orbax renames a checkpoint when it is whole; what still has the temporary name was interrupted.
        if is_first_process():
            for path in self._directory.glob("*.orbax-checkpoint-tmp*"):
                remove_directory(path)

    def _check_same(self, step: int, stored: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        problems = [f"{name} is not in the checkpoint" for name in sorted(wanted.keys() - stored.keys())]
        problems += [f"{name} is not in the model" for name in sorted(stored.keys() - wanted.keys())]
        for name in sorted(wanted.keys() & stored.keys()):
            have = (tuple(stored[name].shape), np.dtype(stored[name].dtype))
            want = (tuple(wanted[name].shape), np.dtype(wanted[name].dtype))
            if have != want:
                problems.append(f"{name} is {have[1]}{list(have[0])}, expected {want[1]}{list(want[0])}")
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise InputError(f"checkpoint {self._directory / str(step)} does not fit: {'; '.join(problems[:3])}{more}")


def _named_leaves(tree: Any) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        if name in named:
            raise ValueError(f"two leaves of the state are both called {name!r}")
        named[name] = leaf
    return named


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(leaf: jax.ShapeDtypeStruct) -> Any:
    # `key_impl` takes arrays only, and a struct becomes one (abstractly) under `eval_shape`.
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]


def _plain(leaf: jax.Array) -> jax.Array | np.ndarray:
    """What Orbax can save: no PRNG keys, and among several processes no array that lies in one of them."""
    data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    return np.asarray(data) if jax.process_count() > 1 and data.is_fully_addressable else data


def _plain_spec(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Reports errors of the disk as `OSError`, once."""
    usual = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        # When one write of a group fails, Orbax closes its event loop, and every other write complains that it did.
        if str(unraisable.exc_value) != "Event loop is closed":
            usual(unraisable)

    sys.unraisablehook = hook
    with disk_errors(directory):
        yield
    # After an error the hook stays: the other writes are still going on.
    sys.unraisablehook = usual


def _natural(path: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.split("/")]


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


# Orbax warns about every checkpoint that is not an OCDBT database; ours are not, on purpose.
_NOISE = ("Skipping merge of OCDBT", "TensorStore data files not found")


def _is_worth_saying(record: logging.LogRecord) -> bool:
    # An error in a thread of Orbax is raised to its caller, and printed before that by every thread that saw it.
    raised_anyway = record.exc_info is not None and "orbax" in record.pathname
    return not raised_anyway and not any(noise in record.getMessage() for noise in _NOISE)


logging.getLogger("absl").addFilter(_is_worth_saying)
