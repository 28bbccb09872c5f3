"""The leaves that must be written to a model directory: their paths, their shapes, and the process that writes each."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from moe_jax.core.finite import REMEDY, check_finite
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import ModelConfig


class ExpectedLeaves:
    """The leaves that must be written, and checks of the leaves that are."""

    def __init__(self, config: ModelConfig, only: Iterable[str] | None = None, *, allow_nonfinite: bool = False):
        """Expects all leaves that the config describes, or some of them.

        Args:
          config: config of the model.
          only: paths of the expected leaves; None: all.
          allow_nonfinite: whether leaves may hold NaN and infinity.
        """
        specs = leaf_specs(config)
        self._specs = specs if only is None else {path: specs[path] for path in only}
        self._allow_nonfinite = allow_nonfinite

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all expected leaves."""
        return tuple(self._specs)

    def share(self, paths: Iterable[str]) -> frozenset[str]:
        """Returns the leaves that this process writes; every process gets about the same number of bytes."""
        owners = dealt({path: _nbytes(self._specs[path]) for path in paths})
        return frozenset(path for path, process in owners.items() if process == jax.process_index())

    def check(self, leaves: Mapping[str, np.ndarray | jax.Array | jax.ShapeDtypeStruct]) -> None:
        """Raises `ValueError` for a leaf that is not expected, or has another shape."""
        for path, leaf in leaves.items():
            if path not in self._specs:
                raise ValueError(f"leaf {path} is not part of the model that the config describes, or not stored here")
            if tuple(leaf.shape) != tuple(self._specs[path].shape):
                raise ValueError(f"leaf {path} has shape {leaf.shape}, the config says {self._specs[path].shape}")

    def check_numbers(self, leaves: Mapping[str, np.ndarray | jax.Array]) -> None:
        """Raises `InputError` for a number that is not finite, unless they are allowed."""
        if not self._allow_nonfinite:
            for path, leaf in leaves.items():
                check_finite(path, np.asarray(leaf), REMEDY)

    def check_all(self, written: Collection[str]) -> None:
        """Raises `ValueError` unless all expected leaves are among the leaves `written`."""
        missing = sorted(path for path in self._specs if path not in written)
        if missing:
            raise ValueError(f"{len(missing)} leaves were not written, the first is {missing[0]}")


def dealt(sizes: Mapping[Any, int]) -> dict[Any, int]:
    """Assigns pieces of work to processes, so that every process gets about as much.

    Args:
      sizes: sizes of the pieces of work, by name.

    Returns:
      The process of every piece, by name; the same in all processes.
    """
    loads = [0] * jax.process_count()
    owners = {}
    # Equal sizes are ordered by name, because sets of names have another order in every process.
    for name in sorted(sizes, key=lambda name: (-sizes[name], str(name))):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def _nbytes(spec: jax.ShapeDtypeStruct) -> int:
    return spec.size * spec.dtype.itemsize
