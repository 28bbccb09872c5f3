"""References from one directory to a model in another; both can be moved together, and each of them alone."""

import dataclasses
from pathlib import Path
from typing import Self

from moe_jax.files.local_paths import check_model_path
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.model_source import ModelSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelReference:
    """A reference to a model: its path and its fingerprint.

    Attributes:
      path: path of the model; relative to the directory that refers to it, unless absolute.
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
        """Makes a reference to a model on the disk from a directory, which need not exist yet."""
        place, here = as_path(source.path).resolve(), as_path(directory).resolve()
        way = here.way_to(place)
        if way is None:
            return cls(path=str(place), fingerprint=source.fingerprint())
        return cls(path=way, fingerprint=source.fingerprint(), absolute=str(place))

    def locate(self, directory: Path) -> Path:
        """Returns the path of the model, for a reference in this directory; there may be nothing at the path."""
        near = as_path(directory).follow(self.path)
        if self.absolute is None or near.exists():
            return near
        far = as_path(self.absolute)
        return far if far.exists() else near
