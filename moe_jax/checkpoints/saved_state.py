"""The checkpoints of a training run: which there are, those in a bucket, and each read leaf by leaf.

Orbax's own management of steps needs renaming or listings that are up to date, and in a bucket a second client besides
TensorStore's. There every checkpoint is saved to a folder with a new name, and counts when `steps.json` names it. This
file is read by name and only written over the version that was read, so late listings and other processes do no harm.

    steps.json          step -> folder
    STEP-TOKEN/         an Orbax checkpoint, one array a folder: a database would be merged by listings
"""

import json
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

from moe_jax.checkpoints.zarr_arrays import STATE
from moe_jax.core.errors import InputError, first_line
from moe_jax.files.objects import ABSENT
from moe_jax.files.storage_path import StoragePath, as_path, read_generation

INDEX = "steps.json"


def read_steps(directory: StoragePath) -> dict[int, StoragePath]:
    """Returns the complete checkpoints of a run, step -> folder, ascending; `InputError` if steps.json is damaged."""
    if not directory.renames:
        return read_index(directory)[0]
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
    (directory / INDEX).write_bytes(json.dumps({str(step): folder.name}).encode())


def read_index(directory: StoragePath) -> tuple[dict[int, StoragePath], bytes]:
    """Returns the checkpoints that steps.json names, step -> folder, ascending, and the version of the file."""
    file = directory / INDEX
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
        is_database = (state / "manifest.ocdbt").is_file()
        ocdbt = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
        array = ocdbt if is_database else files | {"path": f"{files['path']}{name}/"}
        try:
            return tensorstore.open({"driver": "zarr3", "kvstore": array}, open=True, read=True).result()
        except (ValueError, OSError) as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: Exception) -> InputError:
        # TensorStore repeats its whole request at the end of its message.
        return InputError(f"cannot read {name} of {self._directory}: {first_line(error)[:80]}")
