"""The adapter directory, the output of parameter-efficient tuning. It refers to its base and stores only the rest.

    config.json      the `ModelConfig` of the tuned model, complete
    base.json        where the base is, and its fingerprint
    adapter/         Orbax checkpoint of the leaves that are new or were trained
    lineage.json, tokenizer files as in a model directory

Every command that takes a model also takes an adapter directory. Several may share one base.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jax

from moe_jax.core.errors import InputError
from moe_jax.files.json_toml import parse, read_json_object, without_format
from moe_jax.files.staging import check_model_path
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.model_dir import BASE_FILE, ModelDirectory, ModelDirectoryWriter
from moe_jax.model_io.model_source import ModelSource, OverBase
from moe_jax.model_io.tuned_base import LeavesOverBase, base_config, own_leaves
from moe_jax.models import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelReference:
    """A reference to a model.

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
        place = as_path(source.path).resolve()
        way = as_path(directory).resolve().way_to(place)
        absolute = None if way is None else str(place)
        return cls(path=way or str(place), fingerprint=source.fingerprint(), absolute=absolute)

    def locate(self, directory: Path) -> Path:
        """Returns the path of the model, for a reference in this directory; there may be nothing at the path."""
        near = as_path(directory).follow(self.path)
        if self.absolute is None or near.exists():
            return near
        far = as_path(self.absolute)
        return far if far.exists() else near


_FORMAT = "moe_jax.adapter"
_VERSION = 1
_ADAPTER = "adapter"


def read_base_reference(path: Path) -> ModelReference:
    """Reads the base.json of an adapter directory; raises `FileNotFoundError` if it has none."""
    file = as_path(path) / BASE_FILE
    if not file.is_file():
        raise FileNotFoundError(f"no adapter directory at {path}: there is no {BASE_FILE}")
    fields = without_format(read_json_object(file), _FORMAT, _VERSION, where=str(file))
    return parse(ModelReference, fields, where=str(file), language="JSON")


def is_adapter_directory(path: Path) -> bool:
    """Whether `path` refers to a base."""
    return (as_path(path) / BASE_FILE).is_file()


class AdapterDirectory(ModelDirectory, OverBase):
    """An adapter directory to read from; a `ModelSource` of the whole tuned model, over its base."""

    base: ModelSource
    _folder = _ADAPTER

    def __init__(self, path: Path, base: ModelSource):
        """Makes sure that `base` is the one that the adapter was made for; the weights stay on disk.

        `moe_jax.api.open_source` finds the base and opens both.

        Raises:
          FileNotFoundError: if there is no adapter directory.
          InputError: if a file is malformed, or `base` is not the model that the adapter was made for.
        """
        super().__init__(path)
        self.base = base
        reference = read_base_reference(self.path)
        self._base_fingerprint = base.fingerprint()
        if self._base_fingerprint != reference.fingerprint:
            raise InputError(
                f"{base.path} is not the base that {self.path} was made for: its fingerprint is "
                f"{self._base_fingerprint[:12]}, expected {reference.fingerprint[:12]}; say with --base where the "
                "old one is, or make the adapter anew"
            )
        if not _same_model(base.config, base_config(self.config)):
            raise InputError(
                f"{self.path}/config.json does not describe adapters over {base.path}: without them it is another "
                "model; put the file back that was written with the adapter"
            )

    def own_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self._own.specs

    def fingerprint(self) -> str:
        """Returns a SHA-256 of config, base and own weights."""
        return hashlib.sha256(f"{super().fingerprint()}{self._base_fingerprint}".encode()).hexdigest()

    @cached_property
    def _leaves(self) -> LeavesOverBase:
        return LeavesOverBase(self.config, self.base, self._own)


class AdapterDirectoryWriter(ModelDirectoryWriter):
    """Writes an adapter directory, leaf by leaf, as `ModelDirectoryWriter` writes a model directory."""

    _folder = _ADAPTER

    def __init__(
        self,
        dst: Path,
        config: ModelConfig,
        *,
        base: ModelSource,
        tokenizer_files: Sequence[Path],
        lineage: Sequence[Mapping[str, Any]],
        trained: Iterable[str] = (),
        resume: bool = False,
        allow_nonfinite: bool = False,
    ):
        """Checks base and target; nothing is written yet. See `ModelDirectoryWriter` for the other arguments.

        The directory refers to `base`. Leaves of it that were `trained` are stored with their new values; all leaves
        that the base does not have must be written too.

        Raises:
          InputError: if `config` does not belong to `base`, `base` is an adapter directory itself, or `dst` exists.
        """
        if isinstance(base, AdapterDirectory):
            raise InputError(f"{base.path} is an adapter directory; merge it first, or use its base {base.base.path}")
        if not _same_model(base.config, base_config(config)):
            raise InputError(f"the config of {dst} is not one of adapters over {base.path}")
        if not as_path(base.path).is_dir():
            raise InputError(f"{base.path} is no directory that {dst} could refer to; save it as one first")
        reference = dataclasses.asdict(ModelReference.to(base, as_path(dst)))
        super().__init__(
            dst,
            config,
            tokenizer_files=tokenizer_files,
            lineage=lineage,
            resume=resume,
            leaves=own_leaves(config) | frozenset(trained),
            allow_nonfinite=allow_nonfinite,
            documents={BASE_FILE: {"format": _FORMAT, "version": _VERSION, **reference}},
        )


def _same_model(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two configs describe the same model, apart from the dtype."""
    return dataclasses.replace(one, dtype=other.dtype, frozen_base=other.frozen_base) == other
