"""Where weights come from: anything that can be read leaf by leaf."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from moe_jax.models.config import ModelConfig


class ModelSource(Protocol):
    """A model, whatever its format and on disk or in memory, read one leaf at a time in bounded memory.

    Attributes:
      config: of the model.
      path: the directory, or what to call the model in messages.
      tokenizer_files: files copied unchanged wherever the model goes.
      lineage: how it came to be, one entry per command.
      base: the model that adapters stand on, where they are kept apart from it; otherwise None.
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
        """Leaf path -> shape and dtype as stored."""
        ...

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf, in the dtype it is stored in."""
        ...

    def stored_bytes(self, path: str) -> int:
        """What one leaf takes on the disk."""
        ...

    def fingerprint(self) -> str:
        """Identity of the contents, for the lineage."""
        ...
