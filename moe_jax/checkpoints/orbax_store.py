"""Everything that goes through Orbax; the only file that imports it.

The functions read parameters that were not written by `leaf_files`. `TrainingCheckpoints` stores the state that a
training run needs to go on.
"""

import contextlib
import glob
import json
import logging
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging as absl_logging
from etils.epath.gpath import PosixGPath

from moe_jax.checkpoints.saved_state import INDEX, read_index
from moe_jax.checkpoints.zarr_arrays import STATE
from moe_jax.core.errors import InputError, first_line
from moe_jax.distributed.processes import first_decides, is_first_process
from moe_jax.files.epath_backend import BucketGPath, register
from moe_jax.files.objects import ABSENT
from moe_jax.files.storage_path import StoragePath, as_path, write_over


class _Orbax:
    """Orbax's v1 API, imported when it is first used: that takes half a second, and few commands need it."""

    def __getattr__(self, name: str) -> Any:
        # Importing Orbax defines the name of this API; 0.12 still has it in another place.
        try:
            import orbax.checkpoint.v1 as orbax  # pyright: ignore[reportMissingImports]
        except ImportError:
            import orbax.checkpoint.experimental.v1 as orbax
        return getattr(orbax, name)


ocp: Any = _Orbax()


def read_specs(directory: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns leaf path -> shape and dtype; raises `InputError` if it is not a complete Orbax checkpoint."""
    try:
        with _context():
            tree = ocp.metadata(directory).metadata
    except Exception as error:
        raise InputError(f"{directory} is not a complete Orbax checkpoint: {first_line(error)}") from error
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def read_leaf(directory: Path, path: str) -> np.ndarray:
    """Reads one leaf of a checkpoint, however it was written; raises `InputError` if it cannot be read."""
    tree: Any = np.ndarray
    for name in reversed(path.split("/")):
        tree = {name: tree}
    context = _context()
    context.pytree.loading.partial_load = True
    try:
        with context:
            return jax.tree.leaves(ocp.load(directory, tree))[0]
    except Exception as error:
        raise InputError(f"cannot read {path} of {directory}: {first_line(error)}") from error


def _context() -> Any:
    """Returns the settings of everything that goes through Orbax."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.file.path_class = _LiteralPath
    return context


class _LiteralPath(PosixGPath):
    """A path that is not a pattern itself: below `run[1]`, Etils would look for `*` in a folder called `run1`."""

    def glob(self, pattern: str) -> Iterator["_LiteralPath"]:
        for found in glob.glob(pattern, root_dir=self):
            yield self / found


class _StepsOnDisk:
    """The checkpoints of a run on a disk, where Orbax manages them. With several processes all make the same calls."""

    def __init__(self, directory: StoragePath, *, keep: int, context: Any):
        self._directory = directory
        policy = ocp.training.preservation_policies.LatestN(keep)
        self._checkpointer = ocp.training.Checkpointer(
            _LiteralPath(directory), context=context, preservation_policy=policy
        )
        self._saving: Any = None
        self.remove_unfinished()

    def save(self, step: int, leaves: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Begins to save a checkpoint, which counts when `finish` has returned."""
        self._saving = self._checkpointer.save_async(step, leaves, force=True, custom_metadata=dict(extra))

    def finish(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def steps(self) -> list[int]:
        return first_decides(lambda: [checkpoint.step for checkpoint in self._checkpointer.checkpoints])

    def metadata(self, step: int) -> Any:
        return self._checkpointer.metadata(step)

    def load(self, step: int, wanted: Mapping[str, Any]) -> Any:
        return self._checkpointer.load(step, wanted)

    def close(self) -> None:
        self._checkpointer.close()

    def remove_unfinished(self) -> None:
        # Orbax renames a complete checkpoint; one that still has the temporary name was interrupted.
        if is_first_process():
            for path in self._directory.glob("*.orbax-checkpoint-tmp*"):
                path.remove_tree()


class _StepsInBucket:
    """The checkpoints of a run in a bucket, with the methods of `_StepsOnDisk`; see `saved_state`."""

    def __init__(self, directory: StoragePath, *, keep: int, context: Any):
        register()
        self._directory, self._keep = directory, keep
        context.file.path_class = BucketGPath
        context.array.saving.use_ocdbt = False
        self._context = context
        self._saving: tuple[int, StoragePath, Any] | None = None
        self._steps: dict[int, StoragePath] = {}
        self._generation = ABSENT
        first_decides(self._open)

    def save(self, step: int, leaves: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        folder = self._directory / f"{step}-{first_decides(self._token)}"
        with self._context:
            saving = ocp.save_async(BucketGPath(str(folder)), dict(leaves), custom_metadata=dict(extra))
        self._saving = step, folder, saving

    def finish(self) -> None:
        if self._saving is None:
            return
        (step, folder, saving), self._saving = self._saving, None
        saving.result()
        first_decides(lambda: self._add(step, folder))

    def steps(self) -> list[int]:
        return first_decides(lambda: sorted(self._steps))

    def metadata(self, step: int) -> Any:
        with self._context:
            return ocp.metadata(self._folder(step), checkpointable_name=STATE)

    def load(self, step: int, wanted: Mapping[str, Any]) -> Any:
        with self._context:
            return ocp.load(self._folder(step), dict(wanted), checkpointable_name=STATE)

    def close(self) -> None:
        """Does nothing: no threads are left when all is saved."""

    def remove_unfinished(self) -> None:
        """Does nothing: the next run removes what does not count."""

    def _token(self) -> str:
        # A folder that cannot be made would be waited for by threads of Orbax, for minutes.
        (self._directory / ".attempt").write_bytes(b"")
        return uuid.uuid4().hex[:8]

    def _folder(self, step: int) -> BucketGPath:
        return BucketGPath(first_decides(lambda: str(self._steps[step])))

    def _open(self) -> None:
        self._steps, self._generation = read_index(self._directory)
        kept = {folder.name for folder in self._steps.values()} | {INDEX}
        for child in self._directory.iterdir():
            if child.name not in kept:
                child.remove_tree()

    def _add(self, step: int, folder: StoragePath) -> None:
        assert is_first_process()
        steps = dict(sorted({**self._steps, step: folder}.items()))
        gone = [steps.pop(old) for old in list(steps)[: -self._keep]]
        gone += [old for number, old in self._steps.items() if number == step]
        index = json.dumps({str(number): place.name for number, place in steps.items()})
        generation = write_over(self._directory / INDEX, index.encode(), self._generation)
        if generation is None:
            raise InputError(f"another process has saved a checkpoint in {self._directory} meanwhile; this run ends")
        self._steps, self._generation = steps, generation
        for old in gone:
            old.remove_tree()


class TrainingCheckpoints:
    """Checkpoints of one training run: written in the background, the last `keep` are kept.

    A state is any pytree of arrays, PRNG keys among them. It may be restored onto another mesh or another number
    of devices than it was saved from. A checkpoint that was not finished does not count and is removed.
    With several processes every process makes the same calls; an array is on a mesh of all, or is equal in each.
    """

    def __init__(self, directory: Path, *, keep: int, in_slices: Callable[[str], bool] = lambda name: False):
        """Opens or creates `directory`.

        If `in_slices` says so, the array of a name is saved in one piece for each index of its leading axis, so that
        `SavedState` can read each alone.

        Raises:
          InputError: if `keep` is below 1.
          OSError: if the directory cannot be created.
        """
        if keep < 1:
            raise InputError(f"keep={keep} must be at least 1: the run could not resume")
        self._directory = as_path(directory).absolute()
        context = _context()
        # `restore` compares the leaves itself.
        context.pytree.loading.partial_load = True

        def pieces(key: tuple, value: Any) -> Any:
            if np.ndim(value) < 2 or not in_slices(jax.tree_util.keystr(key, simple=True, separator=".")):
                return None
            return ocp.options.ArrayOptions.Saving.StorageOptions(shard_axes=(0,))

        context.array.saving.scoped_storage_options_creator = pieces
        with _writing(self._directory):
            kind = _StepsOnDisk if self._directory.renames else _StepsInBucket
            self._kept = kind(self._directory, keep=keep, context=context)

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Starts writing a checkpoint and returns before it is written. Waits for the previous one first.

        A step is saved once. The buffers of `state`, a pytree of arrays, may be donated as soon as this returns;
        `extra` is JSON-able, and `restore` returns it as JSON gives it back.

        Raises:
          OSError: if this or the previous checkpoint could not be written.
        """
        json.dumps(extra)  # fails here rather than in the background
        self.wait()
        leaves = {name: _plain(leaf) for name, leaf in _named_leaves(state).items()}
        with self._storing():
            self._kept.save(step, leaves, extra)

    def wait(self) -> None:
        """Returns when the last checkpoint is on disk; raises `OSError` if it could not be written."""
        with self._storing():
            self._kept.finish()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        self.wait()
        return self._kept.steps()

    def latest_step(self) -> int | None:
        """Step of the last complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def restore(self, step: int, like: Any, *, part: bool = False) -> tuple[Any, dict[str, Any]]:
        """Returns the state of a checkpoint, in the tree structure of `like`, and the extra data.

        Args:
          step: one of `steps()`.
          like: pytree of `jax.ShapeDtypeStruct`, each with the sharding to restore onto (without: the default device).
          part: whether the checkpoint may have more leaves than `like`, which are not read.

        Raises:
          InputError: if there is no such step, or its leaves are not those of `like`.
        """
        if step not in self.steps():
            raise InputError(f"{self._directory} has no complete checkpoint of step {step}; it has {self.steps()}")
        wanted = {name: _plain_spec(leaf) for name, leaf in _named_leaves(like).items()}
        metadata = self._kept.metadata(step)
        stored = metadata.metadata
        self._check_same(step, {name: stored[name] for name in stored if name in wanted or not part}, wanted)
        restored = self._kept.load(step, wanted)
        leaves = [
            jax.random.wrap_key_data(restored[name], impl=_key_impl(leaf)) if _is_key(leaf) else restored[name]
            for name, leaf in _named_leaves(like).items()
        ]
        extra = cast(dict[str, Any], metadata.custom_metadata or {})
        return jax.tree.unflatten(jax.tree.structure(like), leaves), dict(extra)

    def close(self) -> None:
        """Waits for the last checkpoint and ends the background threads; raises `OSError` as `wait` does or did."""
        self.wait()
        with _writing(self._directory):
            self._kept.close()

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            with _writing(self._directory):
                yield
        except OSError:
            self._kept.remove_unfinished()
            raise

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
    """Returns the array as Orbax can save it: no PRNG key, and with several processes no array local to one."""
    data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    return np.asarray(data) if jax.process_count() > 1 and data.is_fully_addressable else data


def _plain_spec(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Raises an error whose text says "No space left on device" or the like as an `OSError` that names the path.

    TensorStore reports a full disk as `ValueError`, and Orbax may wrap it. Other threads print no traceback for it.
    """
    usual = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        # When one write of a group fails, Orbax closes its event loop, and every other write reports that as an error.
        if str(unraisable.exc_value) != "Event loop is closed":
            usual(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    except (InputError, OSError):
        raise
    except Exception as error:
        explained = as_path(directory).storage_error("\n".join(str(cause) for cause in _causes(error)))
        if explained is None:
            raise
        raise explained from error
    # After an error the hook stays: the other writes are still going on.
    sys.unraisablehook = usual


def _causes(error: BaseException) -> list[BaseException]:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    return causes


# Orbax warns about every checkpoint that is not an OCDBT database. Ours are not, on purpose.
_NOISE = ("Skipping merge of OCDBT", "TensorStore data files not found")


def _is_worth_saying(record: logging.LogRecord) -> bool:
    # An error in a thread of Orbax is raised to its caller, and printed before that by every thread that saw it.
    raised_anyway = record.exc_info is not None and "orbax" in record.pathname
    return not raised_anyway and not any(noise in record.getMessage() for noise in _NOISE)


absl_logging.get_absl_logger().addFilter(_is_worth_saying)
