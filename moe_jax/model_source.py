"""Where weights come from: anything that can be read leaf by leaf."""

from pathlib import Path
from typing import Protocol

import jax
import numpy as np

from moe_jax.models.config import ModelConfig


class ModelSource(Protocol):
    """A model on disk, whatever its format, read one leaf at a time in bounded memory.

    Attributes:
      config: of the model.
      path: the directory.
      tokenizer_files: files copied unchanged wherever the model goes.
    """

    config: ModelConfig
    path: Path
    tokenizer_files: tuple[Path, ...]

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
