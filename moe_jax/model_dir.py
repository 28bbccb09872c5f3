"""The model directory: what every command reads and writes.

    config.json      versioned `ModelConfig`; the tree of the model can be built from it alone
    params/          Orbax checkpoint, one leaf per parameter per layer
    lineage.json     how the model was made
    tokenizer files  anything else, copied through unchanged

A directory is written beside its target and renamed when it is complete. `adapter_dir.py` holds what is different for
adapter directories.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from moe_jax.errors import InputError, raise_if_any
from moe_jax.json_toml import read_json_object
from moe_jax.leaf_files import LeafReader, LeafWriter
from moe_jax.lineage import LINEAGE_FILE
from moe_jax.lineage import new_lineage_entry as new_lineage_entry
from moe_jax.lineage import read_lineage as read_lineage
from moe_jax.loading import leaf_specs
from moe_jax.model_source import ModelSource
from moe_jax.models import ModelConfig, config_from_json, config_to_json
from moe_jax.models.serialize import FORMAT
from moe_jax.processes import is_first_process, wait_for_all
from moe_jax.staging import (
    lock_directory,
    partial_of,
    refuse_existing,
    remove_content,
    remove_directory,
    rename_durably,
    replace_file,
    write_durably,
)

BASE_FILE = "base.json"
_CONFIG = "config.json"
_PARAMS = "params"
_JOB = "job.sha256"
_NOTES = "notes"


def is_model_directory(path: Path) -> bool:
    """Whether `path` holds a config.json of this library (Hugging Face's has the same name)."""
    try:
        data = read_json_object(Path(path) / _CONFIG, allow=("nonfinite",))
    except (OSError, InputError):
        return False
    return data.get("format") == FORMAT


class ModelDirectory:
    """A model directory to read from; a `ModelSource`."""

    base: ModelSource | None = None
    _folder = _PARAMS

    def __init__(self, path: Path):
        """Reads config.json; the weights stay on disk.

        Raises:
          FileNotFoundError: if there is no config.json.
          InputError: if it is not a complete, valid config.
        """
        self.path = Path(path)
        file = self.path / _CONFIG
        if not file.is_file():
            raise FileNotFoundError(f"no model directory at {path}: there is no {_CONFIG}")
        self.config = config_from_json(read_json_object(file, allow=("nonfinite",)), where=str(file))

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """Files that are copied with the model: all except those that this library writes."""
        ours = (_CONFIG, LINEAGE_FILE, BASE_FILE)
        return tuple(sorted(file for file in self.path.iterdir() if file.is_file() and file.name not in ours))

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """How the model was made, one entry per command."""
        return read_lineage(self.path)

    @cached_property
    def _reader(self) -> LeafReader:
        return LeafReader(self.path / self._folder)

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Leaf path -> shape and dtype as stored."""
        return self._reader.specs

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf, in the dtype it is stored in."""
        return self._reader.read(path)

    def stored_bytes(self, path: str) -> int:
        """Bytes of a leaf on disk."""
        return self._reader.stored_bytes(path)

    def fingerprint(self) -> str:
        """A SHA-256 of config and weights."""
        return fingerprint_model(self.config, self._reader.fingerprint())


def fingerprint_model(config: ModelConfig, leaves: str) -> str:
    """A SHA-256 of a config and the fingerprint of the weights."""
    return hashlib.sha256(_identity(config_to_json(config)) + leaves.encode()).hexdigest()


class ExpectedLeaves:
    """The leaves that must be written, to check against."""

    def __init__(self, config: ModelConfig, only: Iterable[str] | None = None):
        """Expects all leaves that the config describes, or some of them."""
        specs = leaf_specs(config)
        self._specs = specs if only is None else {path: specs[path] for path in only}

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all of them."""
        return tuple(self._specs)

    def check(self, leaves: Mapping[str, np.ndarray | jax.Array]) -> None:
        """Raises `ValueError` for a leaf that is not expected, or has another shape."""
        for path, leaf in leaves.items():
            if path not in self._specs:
                raise ValueError(f"leaf {path} is not part of the model that the config describes, or not stored here")
            if tuple(leaf.shape) != tuple(self._specs[path].shape):
                raise ValueError(f"leaf {path} has shape {leaf.shape}, the config says {self._specs[path].shape}")

    def check_all(self, written: Collection[str]) -> None:
        """Raises `ValueError` unless all of them are among the leaves `written`."""
        missing = sorted(path for path in self._specs if path not in written)
        if missing:
            raise ValueError(f"{len(missing)} leaves were not written, the first is {missing[0]}")


class ModelDirectoryWriter:
    """Writes a model directory, leaf by leaf. A context manager.

        with ModelDirectoryWriter(dst, config, tokenizer_files=source.tokenizer_files, lineage=lineage) as writer:
            for path in source.specs():
                writer.write({path: source.read(path)})

    Everything is written to `.NAME.partial` beside the target, which is renamed when the block ends without an error.
    After an error it is removed, unless the writer is resumable and the error is not an `InputError`: then the same job
    can continue later. With several processes every process makes the same calls, and the first one writes.

    Attributes:
      lineage: written at the end; until then, measurements can be added to its last entry.
    """

    _folder = _PARAMS

    def __init__(
        self,
        dst: Path,
        config: ModelConfig,
        *,
        tokenizer_files: Sequence[Path],
        lineage: Sequence[Mapping[str, Any]],
        resume: bool = False,
        leaves: Iterable[str] | None = None,
        documents: Mapping[str, Any] | None = None,
    ):
        """Checks the target; nothing is written yet.

        Args:
          dst: where the directory appears.
          config: of the model.
          tokenizer_files: files to copy.
          lineage: all entries, the last one for the command that writes.
          resume: continue after what the same job (config, command, options, sources) wrote before an interruption.
          leaves: paths of the leaves that must be written; default all that the config describes.
          documents: JSON-able content of further files, by name.

        Raises:
          InputError: if `dst` exists, or a file to copy does not.
        """
        self._dst = Path(dst).absolute()
        self._partial = partial_of(self._dst)
        self._config = config
        self._files = tuple(Path(file) for file in tokenizer_files)
        self._resume = resume
        self.lineage = [dict(entry) for entry in lineage]
        refuse_existing(self._dst)
        raise_if_any([f"{file} is not there" for file in self._files if not file.is_file()], f"cannot write {dst}")
        self._expected = ExpectedLeaves(config, leaves)
        self._documents = dict(documents or {})
        self._written: set[str] = set()

    @property
    def expected(self) -> tuple[str, ...]:
        """Leaves that have to be written."""
        return self._expected.paths

    @property
    def done(self) -> frozenset[str]:
        """Leaves that are written already; in a resumed job, also those of the interrupted one."""
        return frozenset(self._leaves.done)

    def note(self, name: str, data: Any) -> None:
        """Stores JSON-able data for a resumed job, until the directory is complete."""
        if is_first_process():
            (self._partial / _NOTES).mkdir(exist_ok=True)
            replace_file(self._partial / _NOTES / f"{name}.json", json.dumps(data).encode())

    def notes(self) -> dict[str, Any]:
        """The data stored by `note`, by name; in a resumed job, also that of the interrupted one."""
        return {file.stem: json.loads(file.read_bytes()) for file in (self._partial / _NOTES).glob("*.json")}

    def __enter__(self) -> Self:
        if is_first_process():
            self._dst.parent.mkdir(parents=True, exist_ok=True)
            self._partial.mkdir(exist_ok=True)
            self._lock = lock_directory(self._partial, self._dst)
        try:
            if is_first_process() and not (self._resume and self._is_same_job()):
                remove_content(self._partial)
                write_durably(self._partial / _JOB, self._job().encode())
            wait_for_all(f"{self._partial} begun")
            self._leaves = LeafWriter(self._partial / self._folder, resume=self._resume)
        except BaseException:
            self._abandon()
            raise
        self._written |= self._leaves.done
        return self

    def write(self, leaves: Mapping[str, np.ndarray | jax.Array]) -> None:
        """Writes leaves; see `LeafWriter.write`.

        Raises:
          OSError: if the disk is full or cannot be written.
          ValueError: for a leaf that the config does not describe, or written before.
        """
        self._expected.check(leaves)
        self._leaves.write(leaves)
        self._written |= leaves.keys()

    def read_back(self) -> LeafReader:
        """Finishes writing leaves and opens them, so that they can be checked before the target appears.

        Raises:
          OSError: if the disk is full or cannot be written.
          ValueError: if leaves are missing.
        """
        self._complete_leaves()
        return LeafReader(self._partial / self._folder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._abandon(resumable=not isinstance(error, InputError))
            return
        try:
            self._complete()
        except BaseException:
            self._abandon()
            raise
        self._unlock()

    def _complete_leaves(self) -> None:
        if (self._partial / self._folder).exists():
            return
        self._expected.check_all(self._written)
        self._leaves.close()

    def _complete(self) -> None:
        self._complete_leaves()
        if is_first_process():
            for file in self._files:
                write_durably(self._partial / file.name, file.read_bytes())
            documents = {LINEAGE_FILE: self.lineage, _CONFIG: config_to_json(self._config), **self._documents}
            for name, content in documents.items():
                write_durably(self._partial / name, json.dumps(content, indent=2).encode())
            (self._partial / _JOB).unlink()
            shutil.rmtree(self._partial / _NOTES, ignore_errors=True)
            rename_durably(self._partial, self._dst)
        wait_for_all(f"{self._dst} written")

    def _abandon(self, *, resumable: bool = True) -> None:
        if is_first_process() and not (self._resume and resumable):
            remove_directory(self._partial)
        self._unlock()

    def _unlock(self) -> None:
        if is_first_process():
            os.close(self._lock)

    def _job(self) -> str:
        """A SHA-256 that identifies the job; date, versions and measurements are not part of it."""
        names = ("command", "options", "sources")
        entries = [{name: entry.get(name) for name in names} for entry in self.lineage]
        return hashlib.sha256(_identity([config_to_json(self._config), entries])).hexdigest()

    def _is_same_job(self) -> bool:
        job = self._partial / _JOB
        # If the leaves are complete only the rename was missing; that is too rare to be treated separately.
        return job.is_file() and job.read_text() == self._job() and not (self._partial / self._folder).exists()


def _identity(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True).encode()
