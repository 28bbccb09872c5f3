"""A checkpoint of a training run, read leaf by leaf: for reading parameters without continuing the training."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

from moe_jax.core.errors import InputError, first_line
from moe_jax.files.storage_path import as_path

_STATE = "state"  # Orbax's name for the only item of a checkpoint


class SavedState:
    """A checkpoint that `TrainingCheckpoints` wrote. Leaves have names such as `params.lm_head.kernel.value`."""

    def __init__(self, directory: Path):
        """Opens nothing yet: leaves are read when they are asked for."""
        self._directory = as_path(directory).absolute()
        self._open = cache(self._opened)

    def spec(self, name: str) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of a leaf.

        Raises:
          InputError: if there is no such leaf, or its metadata cannot be read.
        """
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
        state = self._directory / _STATE
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
