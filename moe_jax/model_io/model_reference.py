"""How one directory refers to a model in another: so that both can be moved together, and each of them alone."""

import dataclasses
import os
from pathlib import Path
from typing import Self

from moe_jax.files.local_paths import check_model_path
from moe_jax.files.remote.address import is_in_bucket
from moe_jax.files.remote.remote_path import BucketPath, as_path
from moe_jax.model_io.model_source import ModelSource


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
        place, here = as_path(source.path).resolve(), as_path(directory).resolve()
        buckets = {path.address[:2] if isinstance(path, BucketPath) else None for path in (place, here)}
        if len(buckets) > 1:  # there is no way from one to the other
            return cls(path=str(place), fingerprint=source.fingerprint())
        names = [path.key if isinstance(path, BucketPath) else path for path in (place, here)]
        relative = os.path.relpath(*(os.path.join("/", name) for name in names))
        return cls(path=relative, fingerprint=source.fingerprint(), absolute=str(place))

    def locate(self, directory: Path) -> Path:
        """Where the model is, seen from the directory that refers to it; perhaps there is nothing."""
        if is_in_bucket(self.path):
            return as_path(self.path)
        here = as_path(directory)
        if os.path.isabs(self.path):  # of a disk, also where what refers to it is in a bucket
            near = Path(self.path)
        elif isinstance(here, BucketPath):
            scheme, bucket, key = here.address
            near = as_path(f"{scheme}://{bucket}{os.path.normpath(os.path.join('/', key, self.path))}")
        else:
            near = (here / self.path).resolve()
        far = None if self.absolute is None else as_path(self.absolute)
        return far if far is not None and far.exists() and not near.exists() else near
