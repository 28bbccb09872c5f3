"""The adapter directory: what tuning with few parameters leaves. It refers to its base and holds what the base has not.

    config.json      the `ModelConfig` of the tuned model, complete
    base.json        where the base is, and its fingerprint
    adapter/         Orbax checkpoint of the leaves that are new or were trained
    lineage.json, tokenizer files as in a model directory

Every command that takes a model takes one. Several may stand on one base.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moe_jax.errors import InputError
from moe_jax.model_dir import BASE_FILE, ModelDirectory, ModelDirectoryWriter
from moe_jax.model_source import ModelSource
from moe_jax.models import ModelConfig
from moe_jax.peft.base import base_config, own_leaves
from moe_jax.peft.over_base import LeavesOverBase

_FORMAT = "moe_jax.adapter"
_VERSION = 1
_ADAPTER = "adapter"


def is_adapter_directory(path: Path) -> bool:
    """Whether `path` refers to a base."""
    return (Path(path) / BASE_FILE).is_file()


class AdapterDirectory(ModelDirectory):
    """An adapter directory to read from; a `ModelSource` of the whole tuned model.

    Attributes:
      base: the model that it stands on.
    """

    _folder = _ADAPTER

    def __init__(self, path: Path, base: Path | str | None = None):
        """Finds the base and makes sure that it is the one; the weights stay on disk.

        Args:
          path: the adapter directory.
          base: where the base is now; default where base.json says.

        Raises:
          FileNotFoundError: if there is no adapter directory, or nothing at `base`.
          InputError: if a file is not what it should be, the base is missing, or it is another model than the one
            that the adapter was made for.
        """
        super().__init__(path)
        reference = _read_reference(self.path / BASE_FILE)
        self.base = self._open_base(reference, base)
        self._base_fingerprint = self.base.fingerprint()
        if self._base_fingerprint != reference["fingerprint"]:
            raise InputError(
                f"{self.base.path} is not the base that {self.path} was made for: its fingerprint is "
                f"{self._base_fingerprint[:12]}, expected {reference['fingerprint'][:12]}; put the old one back, or "
                "make the adapter anew"
            )
        if not _same_model(self.base.config, base_config(self.config)):
            raise InputError(
                f"{self.path}/config.json does not describe adapters over {self.base.path}: without them it is another "
                "model; put the file back that was written with the adapter"
            )

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Leaf path -> shape and dtype as stored, of NF4 kernels as they are made."""
        return self._leaves.specs

    def own_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The same of the leaves that are stored here and not in the base."""
        return self._reader.specs

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf, here or in the base, in the dtype it is stored in; quantises where the config says NF4."""
        return self._leaves.read(path)

    def stored_bytes(self, path: str) -> int:
        """What a leaf takes on the disk, here or in the base."""
        return self._leaves.stored_bytes(path)

    def fingerprint(self) -> str:
        """Identity of config, base and own weights: a SHA-256."""
        return hashlib.sha256(f"{super().fingerprint()}{self._base_fingerprint}".encode()).hexdigest()

    @cached_property
    def _leaves(self) -> LeavesOverBase:
        return LeavesOverBase(self.config, self.base, self._reader)

    def _open_base(self, reference: Mapping[str, Any], given: Path | str | None) -> ModelSource:
        from moe_jax.open_source import open_source  # it opens adapter directories too

        path = self.path / reference["path"] if given is None else Path(given)
        if is_adapter_directory(path):
            raise InputError(f"the base of {self.path} is {path}, an adapter directory itself; merge that first")
        if given is None and not path.exists():
            raise InputError(
                f"{self.path} stands on {path}, which is not there; put the base back, or change \"path\" in "
                f"{self.path / BASE_FILE} to where it is"
            )
        return open_source(path)


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
    ):
        """Checks base and target; nothing is written yet.

        Args:
          dst: where the directory appears.
          config: of the tuned model.
          base: its base, which the directory refers to.
          tokenizer_files, lineage: see `ModelDirectoryWriter`.
          trained: leaves of the base that are stored too, because they are not the base's any more. With them must be
            written what the base does not have at all.

        Raises:
          InputError: if the base is not that of `config` or an adapter directory, or `dst` exists.
        """
        if isinstance(base, AdapterDirectory):
            raise InputError(f"{base.path} is an adapter directory; merge it first, or use its base {base.base.path}")
        if not _same_model(base.config, base_config(config)):
            raise InputError(f"the config of {dst} is not one of adapters over {base.path}")
        reference = {
            "format": _FORMAT,
            "version": _VERSION,
            "path": str(Path(base.path).resolve()),
            "fingerprint": base.fingerprint(),
        }
        super().__init__(
            dst,
            config,
            tokenizer_files=tokenizer_files,
            lineage=lineage,
            leaves=own_leaves(config) | frozenset(trained),
            documents={BASE_FILE: reference},
        )


def _read_reference(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"no adapter directory at {file.parent}: there is no {file.name}")
    try:
        data = json.loads(file.read_bytes())
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise InputError(f"{file} does not refer to a base: it has no format {_FORMAT!r}")
    if data.get("version") != _VERSION:
        raise InputError(f"{file} has version {data.get('version')}, this library reads version {_VERSION}")
    for key in ("path", "fingerprint"):
        if not isinstance(data.get(key), str):
            raise InputError(f"{file} has no {key}")
    return data


def _same_model(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two configs describe the same model, in whatever dtype."""
    return replace(one, dtype=other.dtype, frozen_base=other.frozen_base) == other
