"""The leaves that must be written to a model directory: their paths, their shapes, and the process that writes each.

Experts among them whose weights are all zero are no error, but seldom intended, so users are told.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from moe_jax.core.finite import REMEDY, check_finite, largest_magnitude
from moe_jax.distributed.processes import gathered
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import ModelConfig


class ExpectedLeaves:
    """The leaves that must be written, and checks of the leaves that are."""

    def __init__(self, config: ModelConfig, only: Iterable[str] | None = None, *, allow_nonfinite: bool = False):
        """Expects all leaves of a config, or `only` some; their numbers must be finite unless others are allowed."""
        specs = leaf_specs(config)
        self._specs = specs if only is None else {path: specs[path] for path in only}
        self._allow_nonfinite = allow_nonfinite

    @property
    def paths(self) -> tuple[str, ...]:
        """Returns the paths of all expected leaves."""
        return tuple(self._specs)

    def share(self, paths: Iterable[str]) -> frozenset[str]:
        """Returns the leaves that this process writes; every process gets about the same number of bytes."""
        owners = dealt({path: self._specs[path].size * self._specs[path].dtype.itemsize for path in paths})
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
    """Assigns pieces of work, given by their sizes, to processes, so that every process gets about as much.

    Returns the process of every piece, by name; the same in all processes.
    """
    loads = [0] * jax.process_count()
    owners = {}
    # Equal sizes are ordered by name, because sets of names have another order in every process.
    for name in sorted(sizes, key=lambda name: (-sizes[name], str(name))):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


_KERNEL = re.compile(r"layers/(\d+)/mlp/experts/(?:gate|up|down)/kernel")


class ZeroExperts:
    """Collects zero experts of banks with full kernels, leaf by leaf. For other experts it reads only a few numbers."""

    def __init__(self) -> None:
        self._zero: dict[int, set[int]] = {}

    @staticmethod
    def concerns(path: str) -> bool:
        """Whether `add` looks at the leaf at a path."""
        return _KERNEL.fullmatch(path) is not None

    def add(self, path: str, leaf: np.ndarray) -> None:
        """Looks for experts with only zeros in any leaf: [E, in, out] for a kernel."""
        match = _KERNEL.fullmatch(path)
        if not match:
            return
        zero = {e for e, kernel in enumerate(leaf) if not (largest_magnitude(kernel[:1]) or largest_magnitude(kernel))}
        layer = int(match[1])
        self._zero[layer] = self._zero.get(layer, zero) & zero

    def gather(self) -> None:
        """Adds what other processes have found. All processes make the call."""
        own = [(layer, sorted(experts)) for layer, experts in self._zero.items()]
        self._zero.clear()
        for layer, experts in (item for found in gathered(own) for item in found):
            self._zero[layer] = self._zero.get(layer, set(experts)) & set(experts)

    @property
    def by_layer(self) -> dict[int, list[int]]:
        """Experts whose kernels are all zero, by layer; layers without any are left out."""
        return {layer: sorted(experts) for layer, experts in sorted(self._zero.items()) if experts}


def zero_experts_line(by_layer: Mapping[int, Collection[int]]) -> str:
    """Returns one line about the zero experts, of which there are some, by layer."""
    number, where = _counted(by_layer)
    return f"{number} {'has' if number == '1 expert' else 'have'} only zeros as weights ({where})"


def experts_by_layer(by_layer: Mapping[int, Collection[int]]) -> str:
    """Returns how many experts these are, and which, by layer, such as `3 experts (layer 0: 1, 5; layer 4: 0)`."""
    return "{} ({})".format(*_counted(by_layer))


def _counted(by_layer: Mapping[int, Collection[int]]) -> tuple[str, str]:
    """Returns the number of experts, and where they are."""
    shown = [f"layer {layer}: {_listed(experts)}" for layer, experts in list(by_layer.items())[:8]]
    shown += [f"and in {len(by_layer) - 8} layers more"] if len(by_layer) > 8 else []
    count = sum(map(len, by_layer.values()))
    return f"{count} {'expert' if count == 1 else 'experts'}", "; ".join(shown)


def _listed(experts: Collection[int]) -> str:
    first = ", ".join(map(str, sorted(experts)[:8]))
    return f"{first} and {len(experts) - 8} more" if len(experts) > 8 else first
