"""How one directory refers to a model in another: so that both can be moved together, and each of them alone."""

import dataclasses
import os
from pathlib import Path
from typing import Self

from moe_jax.local_paths import check_model_path
from moe_jax.model_source import ModelSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelReference:
    """Which model is meant, and where it is.

    Attributes:
      path: of the model; relative to the directory that refers to it, unless absolute.
      absolute: where the model was when the reference was written; tried if there is nothing at `path`.
      fingerprint: identity of its contents.
    """

    path: str
    fingerprint: str
    absolute: str | None = None

    def __post_init__(self) -> None:
        for path in (self.path, self.absolute):
            if path is not None:
                check_model_path(path)

    @classmethod
    def to(cls, source: ModelSource, directory: Path) -> Self:
        """A reference to a model on the disk, from a directory, which need not be there yet."""
        place = Path(source.path).resolve()
        relative = os.path.relpath(place, Path(directory).resolve())
        return cls(path=relative, fingerprint=source.fingerprint(), absolute=str(place))

    def locate(self, directory: Path) -> Path:
        """Where the model is, seen from the directory that refers to it; perhaps there is nothing."""
        near = (Path(directory) / self.path).resolve()
        far = None if self.absolute is None else Path(self.absolute)
        return far if far is not None and far.exists() and not near.exists() else near
