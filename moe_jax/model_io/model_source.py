"""The protocol of everything from which a model can be read leaf by leaf."""

import abc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from moe_jax.models.config import ModelConfig


class ModelSource(Protocol):
    """A model in any format, on disk or in memory, that is read one leaf at a time in bounded memory.

    Attributes:
      config: config of the model.
      path: the directory, or a name of the model for messages.
      tokenizer_files: files that are copied unchanged with the model.
      lineage: how it was made, one entry per command.
      base: the model that this one's adapters belong to, if it is stored as adapters over another one; else None.
    """

    config: ModelConfig

    @property
    def path(self) -> Path: ...

    @property
    def tokenizer_files(self) -> tuple[Path, ...]: ...

    @property
    def lineage(self) -> Sequence[dict[str, Any]]: ...

    @property
    def base(self) -> "ModelSource | None": ...

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns leaf path -> shape and dtype as stored."""
        ...

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf, in the dtype it is stored in."""
        ...

    def stored_bytes(self, path: str) -> int:
        """Returns the number of bytes of one leaf as stored."""
        ...

    def fingerprint(self) -> str:
        """Returns a hash that identifies config and weights."""
        ...


class ChangedSource(ModelSource):
    """Another source's model with some things changed. What a subclass does not change is as that source has it."""

    def __init__(self, source: ModelSource, config: ModelConfig):
        """Takes the config of the changed model."""
        self.config, self._source = config, source

    @property
    def path(self) -> Path:
        return self._source.path

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        return self._source.tokenizer_files

    @property
    def lineage(self) -> Sequence[dict[str, Any]]:
        return self._source.lineage

    @property
    def base(self) -> ModelSource | None:
        return self._source.base

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self._source.specs()

    def read(self, path: str) -> np.ndarray:
        return self._source.read(path)

    def stored_bytes(self, path: str) -> int:
        return self._source.stored_bytes(path)

    def fingerprint(self) -> str:
        return self._source.fingerprint()


class StoredLeaves(Protocol):
    """Leaves that can be read: the protocol of `LeafReader` (on disk) and `LeavesInMemory`."""

    @property
    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Leaf path -> shape and dtype."""
        ...

    def read(self, path: str) -> np.ndarray: ...

    def stored_bytes(self, path: str) -> int: ...


class HoldsSource(Protocol):
    """An object that a model can be read from, such as `moe_jax.Model`."""

    @property
    def source(self) -> ModelSource: ...


ModelLike = str | os.PathLike[str] | HoldsSource
"""A model, or the path of one."""


def read_part(leaves: ModelSource | StoredLeaves, path: str, part: tuple[slice, ...]) -> np.ndarray:
    """Returns a box of a leaf, a slice of step 1 with both ends for each axis.

    Reads only the bytes of the box if the model, or set of leaves, has a method `read_part`.
    """
    reading = getattr(leaves, "read_part", None)
    return leaves.read(path)[part] if reading is None else reading(path, part)


class OverBase(abc.ABC):
    """A `ModelSource` that takes leaves from its base, and stores only its own."""

    @abc.abstractmethod
    def own_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns leaf path -> shape and dtype of the leaves that it does not take from its base."""
