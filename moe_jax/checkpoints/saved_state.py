"""The checkpoints of a training run: which there are, those in a bucket, and each read leaf by leaf.

Orbax's own management of steps needs renaming or listings that are up to date, and in a bucket a second client besides
TensorStore's. There every checkpoint is saved to a folder with a new name, and counts when `steps.json` names it. This
file is read by name and only written over the version that was read, so late listings and other processes do no harm.

    steps.json          step -> folder
    STEP-TOKEN/         an Orbax checkpoint, one array a folder: a database would be merged by listings
"""

import json
import uuid
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

from moe_jax.checkpoints.zarr_arrays import STATE
from moe_jax.core.errors import InputError, first_line
from moe_jax.distributed.processes import first_decides, is_first_process
from moe_jax.files.epath_backend import BucketGPath, register
from moe_jax.files.objects import ABSENT
from moe_jax.files.storage_path import StoragePath, as_path, read_generation, write_over

_INDEX = "steps.json"


def read_steps(directory: StoragePath) -> dict[int, StoragePath]:
    """Returns the complete checkpoints of a run, step -> folder, ascending; `InputError` if steps.json is damaged."""
    if not directory.renames:
        return _read(directory)[0]
    folders = (child for child in directory.glob("*") if child.is_dir() and child.name.isdecimal())
    return {int(folder.name): folder for folder in sorted(folders, key=lambda folder: int(folder.name))}


def begin_with(directory: StoragePath, step: int, make: Callable[[StoragePath], object]) -> None:
    """Writes the first checkpoint of a directory that has no complete one: `make` writes it to a folder."""
    if directory.renames:
        make(directory / str(step))
        directory.sync()
        return
    folder = directory / f"{step}-{uuid.uuid4().hex[:8]}"
    make(folder)
    (directory / _INDEX).write_bytes(json.dumps({str(step): folder.name}).encode())


class StepsInBucket:
    """The checkpoints of a run in a bucket, with the methods of Orbax's `Checkpointer` that `TrainingCheckpoints` uses.

    With several processes all make the same calls.
    """

    def __init__(self, directory: StoragePath, *, keep: int, orbax: Any, context: Any):
        """Opens the checkpoints, of which `keep` are kept, and removes unfinished ones; `orbax` is Orbax's v1 API."""
        register()
        self._directory = directory
        self._keep = keep
        self._orbax = orbax
        context.file.path_class = BucketGPath
        context.array.saving.use_ocdbt = False
        self._context = context
        self._saving: tuple[int, StoragePath, Any] | None = None
        self._steps: dict[int, StoragePath] = {}
        self._generation = ABSENT
        first_decides(self._open)

    def save(self, step: int, leaves: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Begins to save a checkpoint, which counts when `finish` has returned."""
        folder = self._directory / f"{step}-{first_decides(self._token)}"
        with self._context:
            saving = self._orbax.save_async(BucketGPath(str(folder)), dict(leaves), custom_metadata=dict(extra))
        self._saving = step, folder, saving

    def finish(self) -> None:
        """Returns when the checkpoint that was begun is saved and counts; removes checkpoints that are not kept."""
        if self._saving is None:
            return
        (step, folder, saving), self._saving = self._saving, None
        saving.result()
        first_decides(lambda: self._add(step, folder))

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, ascending."""
        return first_decides(lambda: sorted(self._steps))

    def metadata(self, step: int) -> Any:
        """Returns Orbax's metadata of a checkpoint."""
        with self._context:
            return self._orbax.metadata(self._folder(step), checkpointable_name=STATE)

    def load(self, step: int, wanted: Mapping[str, Any]) -> Any:
        """Returns the leaves of a checkpoint."""
        with self._context:
            return self._orbax.load(self._folder(step), dict(wanted), checkpointable_name=STATE)

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
        self._steps, self._generation = _read(self._directory)
        kept = {folder.name for folder in self._steps.values()} | {_INDEX}
        for child in self._directory.iterdir():
            if child.name not in kept:
                child.remove_tree()

    def _add(self, step: int, folder: StoragePath) -> None:
        assert is_first_process()
        steps = dict(sorted({**self._steps, step: folder}.items()))
        gone = [steps.pop(old) for old in list(steps)[: -self._keep]]
        gone += [old for number, old in self._steps.items() if number == step]
        index = json.dumps({str(number): place.name for number, place in steps.items()})
        generation = write_over(self._directory / _INDEX, index.encode(), self._generation)
        if generation is None:
            raise InputError(f"another process has saved a checkpoint in {self._directory} meanwhile; this run ends")
        self._steps, self._generation = steps, generation
        for old in gone:
            old.remove_tree()


def _read(directory: StoragePath) -> tuple[dict[int, StoragePath], bytes]:
    file = directory / _INDEX
    found = read_generation(file)
    if found is None:
        return {}, ABSENT
    try:
        names = {int(step): str(name) for step, name in json.loads(found.content).items()}
    except (ValueError, AttributeError):
        raise InputError(f"{file} is damaged: it does not say which checkpoints there are") from None
    return {step: directory / name for step, name in sorted(names.items())}, found.generation


class SavedState:
    """A checkpoint that `TrainingCheckpoints` wrote. Leaves have names such as `params.lm_head.kernel.value`."""

    def __init__(self, directory: Path):
        """Opens nothing yet: leaves are read when they are asked for."""
        self._directory = as_path(directory).absolute()
        self._open = cache(self._opened)

    def spec(self, name: str) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of a leaf; raises `InputError` if it cannot be opened."""
        stored = self._open(name)
        return jax.ShapeDtypeStruct(tuple(stored.shape), stored.dtype.numpy_dtype)

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """Reads a leaf, or one index of its leading axis: no more than that, if it was saved in pieces.

        Raises:
          InputError: if it cannot be read.
        """
        stored = self._open(name)
        try:
            return np.asarray((stored if index is None else stored[index]).read().result())
        except (ValueError, OSError) as error:
            raise self._unreadable(name, error) from error

    def _opened(self, name: str) -> Any:
        state = self._directory / STATE
        files = state.kvstore()
        # Runs on disks save into a database, those in buckets into files; on a disk one may begin with either.
        if (state / "manifest.ocdbt").is_file():
            array = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
        else:
            array = files | {"path": f"{files['path']}{name}/"}
        try:
            return tensorstore.open({"driver": "zarr3", "kvstore": array}, open=True, read=True).result()
        except (ValueError, OSError) as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: Exception) -> InputError:
        # TensorStore repeats its whole request at the end of its message.
        return InputError(f"cannot read {name} of {self._directory}: {first_line(error)[:80]}")
