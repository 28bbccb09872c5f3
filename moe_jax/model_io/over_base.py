"""The leaves of a tuned model: its own, and those of its base."""

from functools import cached_property
from typing import Any, Protocol

import jax
import numpy as np

from moe_jax.checkpoints.zarr_arrays import Part
from moe_jax.core.finite import check_finite
from moe_jax.functional.products.nf4 import quantize_nf4
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_source import ModelSource, read_part
from moe_jax.model_io.tuned_base import base_leaf, kernel_of
from moe_jax.models import ModelConfig


class StoredLeaves(Protocol):
    """Leaves that can be read: the protocol of `LeafReader` (on disk) and `LeavesInMemory`."""

    @property
    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Leaf path -> shape and dtype."""
        ...

    def read(self, path: str) -> np.ndarray: ...

    def stored_bytes(self, path: str) -> int: ...


class LeavesOverBase:
    """Reads leaves by their paths in the tuned model, one at a time.

    The model's own leaves are read as stored. Others are read from the base, and quantised if they are NF4: once per
    kernel, after which its small leaves (scales) are kept in memory until they are read.
    """

    def __init__(self, config: ModelConfig, base: ModelSource, own: StoredLeaves | None = None):
        """Compares the leaves on both sides; no weights are read.

        Args:
          config: config of the tuned model.
          base: its base.
          own: the model's own leaves; None: there are none.
        """
        self._config = config
        self._base = base
        self._own = own
        self._waiting: dict[str, np.ndarray] = {}

    @property
    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns leaf path -> shape and dtype as stored, or as made for NF4 leaves; without leaves on neither side."""
        return self._specs

    @cached_property
    def _specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        base, specs = self._base.specs(), {}
        for path, spec in leaf_specs(self._config).items():
            source = base_leaf(self._config, path)
            own = self._own_leaves(path)
            if own is not None:
                specs[path] = own.specs[path]
            elif source in base:
                specs[path] = base[source] if kernel_of(path) is None else spec
        return specs

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf.

        Raises:
          InputError: if neither side has it, or it has to be quantised and is not finite.
        """
        own = self._own_leaves(path)
        if own is not None:
            return own.read(path)
        source = base_leaf(self._config, path)
        if source is None:
            assert self._own is not None, path
            return self._own.read(path)  # raises an error that names what is missing
        if kernel_of(path) is None:
            return self._base.read(source)
        if path not in self._waiting:
            self._quantize(source, path.rsplit("/", 1)[0])
        return self._waiting.pop(path)

    def read_part(self, path: str, part: Part) -> np.ndarray:
        """Reads a box of a leaf; if the leaf has to be quantised, all of it is made."""
        own = self._own_leaves(path)
        if own is not None:
            return read_part(own, path, part)
        source = base_leaf(self._config, path)
        if source is not None and kernel_of(path) is None:
            return read_part(self._base, source, part)
        return self.read(path)[part]

    def stored_bytes(self, path: str) -> int:
        """Returns the bytes of a leaf as stored. The codes of an NF4 kernel count as the kernel in the base."""
        own = self._own_leaves(path)
        if own is not None:
            return own.stored_bytes(path)
        source = base_leaf(self._config, path)
        made = kernel_of(path) is not None and not path.endswith("/codes")
        return 0 if made or source is None else self._base.stored_bytes(source)

    def _own_leaves(self, path: str) -> StoredLeaves | None:
        """Returns the model's own leaves if the path is one of them, else None."""
        return self._own if self._own is not None and path in self._own.specs else None

    def _quantize(self, kernel: str, folder: str) -> None:
        """Quantises a kernel of the base.

        Raises:
          InputError: if it is not finite, or so large that the mean of its blocks' scales is not.
        """
        values = self._base.read(kernel)
        check_finite(kernel, values, "NF4 has no code for them; mend the base, or leave it as it is stored")
        with jax.default_device(_host()):
            leaves = quantize_nf4(values)
        for name, leaf in leaves.items():
            check_finite(f"{folder}/{name}", np.asarray(leaf), f"the numbers of {kernel} are too large for NF4")
        # Codes are large, so those of only one kernel are kept.
        waiting = {path: leaf for path, leaf in self._waiting.items() if not path.endswith("/codes")}
        self._waiting = waiting | {f"{folder}/{name}": np.asarray(leaf) for name, leaf in leaves.items()}


def _host() -> Any:
    """Returns the host's CPU, on which quantisation gives the same codes with every accelerator."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names an accelerator only
        return jax.local_devices()[0]
