"""The leaves that a model directory must get: which, of what shapes, and by which process."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from moe_jax.core.finite import REMEDY, check_finite
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import ModelConfig


class ExpectedLeaves:
    """The leaves that must be written, to check against."""

    def __init__(self, config: ModelConfig, only: Iterable[str] | None = None, *, allow_nonfinite: bool = False):
        """Expects all leaves that the config describes, or some of them.

        Args:
          config: of the model.
          only: paths of those expected; None: all.
          allow_nonfinite: whether they may hold NaN and infinity.
        """
        specs = leaf_specs(config)
        self._specs = specs if only is None else {path: specs[path] for path in only}
        self._allow_nonfinite = allow_nonfinite

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all of them."""
        return tuple(self._specs)

    def share(self, paths: Iterable[str]) -> frozenset[str]:
        """Those of the leaves that this process writes: of all bytes about as many as every other process."""
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
        """Raises `ValueError` unless all of them are among the leaves `written`."""
        missing = sorted(path for path in self._specs if path not in written)
        if missing:
            raise ValueError(f"{len(missing)} leaves were not written, the first is {missing[0]}")


def dealt(sizes: Mapping[Any, int]) -> dict[Any, int]:
    """Deals work out to the processes, to each about as much as to every other.

    Args:
      sizes: of the pieces of work, by what they are called.

    Returns:
      By the same names, the process that does it; the same in all processes.
    """
    loads = [0] * jax.process_count()
    owners = {}
    # By name where sizes are equal: sets of names have another order in every process.
    for name in sorted(sizes, key=lambda name: (-sizes[name], str(name))):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def _nbytes(spec: jax.ShapeDtypeStruct) -> int:
    return spec.size * spec.dtype.itemsize
