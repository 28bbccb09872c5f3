"""The model directory, which every command reads and writes.

    config.json      versioned `ModelConfig`; the tree of the model can be built from it alone
    params/          Orbax checkpoint, one leaf per parameter per layer; its tree is in params/state
    lineage.json     how the model was made
    tokenizer files  copied unchanged (`files.tokenizer_files`)

On a disk a directory is written beside its target and renamed when it is complete. In a bucket it is written in its
final place, config.json last: without it there is no model. `model_io/adapter_dir.py` adds adapter directories.
"""

import abc
import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from moe_jax.checkpoints.leaf_files import LeafReader, LeafWriter, shard_positions
from moe_jax.checkpoints.zarr_arrays import Part
from moe_jax.core.errors import InputError, raise_if_any
from moe_jax.core.finite import cast
from moe_jax.distributed.processes import fail_together, first_decides, is_first_process
from moe_jax.files.json_toml import read_json_object
from moe_jax.files.regular_files import hold
from moe_jax.files.remote_work import RemoteWork
from moe_jax.files.staging import check_beside, check_target, open_work
from moe_jax.files.storage_path import StoragePath, as_path
from moe_jax.files.tokenizer_files import by_name, copy_tokenizer_files, tokenizer_files_in
from moe_jax.model_io.leaves_to_write import ExpectedLeaves
from moe_jax.model_io.lineage import LINEAGE_FILE, job_of, read_lineage
from moe_jax.model_io.loading import check_leaves, leaf_specs
from moe_jax.model_io.model_source import ModelSource, StoredLeaves, read_part
from moe_jax.models import ModelConfig, config_from_json, config_to_json
from moe_jax.models.serialize import FORMAT

BASE_FILE = "base.json"
_CONFIG = "config.json"
_PARAMS = "params"


def is_model_directory(path: Path) -> bool:
    """Whether `path` holds a config.json of this library (Hugging Face's has the same name)."""
    try:
        data = read_json_object(as_path(path) / _CONFIG, allow=("nonfinite",))
    except (OSError, InputError):
        return False
    return data.get("format") == FORMAT


class ModelDirectory:
    """A model directory to read from; a `ModelSource`.

    It is held open: if another directory takes its place meanwhile, reading goes on from this one.
    """

    base: ModelSource | None = None
    _folder = _PARAMS

    def __init__(self, path: Path):
        """Reads config.json; the weights stay on disk.

        Raises:
          FileNotFoundError: if there is no config.json.
          InputError: if it is not a complete, valid config.
        """
        self.path = as_path(path)
        if not (self.path / _CONFIG).is_file():
            raise FileNotFoundError(f"no model directory at {path}: there is no {_CONFIG}")
        self._held = hold(self.path)
        fields = read_json_object(Path(_CONFIG), allow=("nonfinite",), inside=self._held)
        self.config = config_from_json(fields, where=str(self.path / _CONFIG))

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """Files that are copied with the model, as `tokenizer_files_in` finds them."""
        self._held.check_in_place()
        return tokenizer_files_in(self.path)

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """How the model was made, one entry per command."""
        return read_lineage(self.path, inside=self._held)

    @cached_property
    def _own(self) -> LeafReader:
        return LeafReader(Path(self._folder), inside=self._held)

    @cached_property
    def _leaves(self) -> StoredLeaves:
        """Returns all leaves of the model, from wherever they are read."""
        return self._own

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns leaf path -> shape and dtype: as stored, or for NF4 codes made from kernels of a base, as made.

        Raises:
          InputError: if metadata is damaged, or the leaves are not those of the config; all problems are listed.
        """
        check_leaves(leaf_specs(self.config), self._own.specs | self._leaves.specs, str(self.path))
        return self._leaves.specs

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf, in the dtype it is stored in, or quantised where the config says NF4."""
        return self._leaves.read(path)

    def read_part(self, path: str, part: Part) -> np.ndarray:
        """Reads a box of a leaf, and no bytes but those of the box; all of the leaf if it has to be quantised."""
        return read_part(self._leaves, path, part)

    def stored_bytes(self, path: str) -> int:
        """Returns the number of bytes of a leaf on disk."""
        return self._leaves.stored_bytes(path)

    def fingerprint(self) -> str:
        """Returns a SHA-256 of config and weights."""
        return fingerprint_model(self.config, self._own.fingerprint())


def fingerprint_model(config: ModelConfig, leaves: str) -> str:
    """Returns a SHA-256 of a config and the fingerprint of the weights."""
    described = json.dumps(config_to_json(config), sort_keys=True)
    return hashlib.sha256(f"{described}{leaves}".encode()).hexdigest()


class ModelWriter(contextlib.AbstractContextManager["ModelWriter"]):
    """Writes a model leaf by leaf, to a directory or into memory. A context manager, whose block completes the model.

    Attributes:
      lineage: written at the end; until then, measurements can be added to its last entry.
    """

    def __init__(
        self,
        config: ModelConfig,
        files: Sequence[Path],
        lineage: Sequence[Mapping[str, Any]],
        leaves: Iterable[str] | None,
        allow_nonfinite: bool,
    ):
        self._config, self._files = config, files
        self._expected = ExpectedLeaves(config, leaves, allow_nonfinite=allow_nonfinite)
        self.lineage = [dict(entry) for entry in lineage]

    @property
    def expected(self) -> tuple[str, ...]:
        """Leaves that have to be written."""
        return self._expected.paths

    @property
    @abc.abstractmethod
    def done(self) -> frozenset[str]:
        """Leaves that are written already; in a resumed job, also those of the interrupted one."""

    @abc.abstractmethod
    def note(self, name: str, data: Any) -> None:
        """Stores JSON-able data for a resumed job, until the directory is complete. One process makes the call."""

    @abc.abstractmethod
    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the data of `note`, in a resumed job also the interrupted one's. All processes make the call."""

    @abc.abstractmethod
    def mine(self, path: str) -> bool:
        """Whether this process writes a leaf."""

    @abc.abstractmethod
    def deal(self, owners: Mapping[str, int]) -> None:
        """Says which process writes each leaf that is not done. All processes make the call."""

    @abc.abstractmethod
    def write(self, leaves: Mapping[str, np.ndarray | jax.Array]) -> None:
        """Writes whole leaves by path. The arrays may be changed by the caller afterwards.

        Raises:
          OSError: if the disk is full or cannot be written.
          ValueError: for a leaf that the config does not describe, or written before.
          InputError: for one with numbers that are not finite, unless they are allowed.
        """

    @abc.abstractmethod
    def read_back(self) -> StoredLeaves:
        """Finishes writing leaves and opens them, so that they can be checked before the model appears.

        Raises:
          OSError: if the disk is full or cannot be written.
          ValueError: if leaves are missing.
        """


class ModelDirectoryWriter(ModelWriter):
    """Writes a model directory, leaf by leaf.

        with ModelDirectoryWriter(dst, config, tokenizer_files=source.tokenizer_files, lineage=lineage) as writer:
            for path in source.specs():
                writer.write({path: source.read(path)})

    Everything is written to `.NAME.partial` beside the target, which is renamed when the block ends without an error.
    After an error it is removed, unless the writer is resumable and the error is not an `InputError`: then the same job
    can continue later. In a bucket there is no such folder: `files.remote_work` says how that works.

    With several processes every process makes the same calls, and each writes its own leaves: `mine` says which, and
    leaves that only others write need not be read or computed. They are assigned by their bytes, or by `deal`. A leaf
    that is sharded over processes is written by `write_sharded`: every process writes its own shards.
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
        allow_nonfinite: bool = False,
    ):
        """Checks the target, where the directory will appear; nothing is written yet.

        Args:
          dst: the target.
          config: config of the model.
          tokenizer_files: files to copy.
          lineage: all entries, the last one for the command that writes.
          resume: whether to keep the leaves that the same job (config, command, options, sources) wrote before an
            interruption, and go on after them.
          leaves: paths of the leaves that must be written; default all that the config describes.
          documents: JSON-able content of further files, by name.
          allow_nonfinite: whether leaves may hold NaN and infinity.

        Raises:
          InputError: if `dst` exists, or a file to copy does not.
        """
        super().__init__(config, list(map(as_path, tokenizer_files)), lineage, leaves, allow_nonfinite)
        self._dst = as_path(dst).absolute()
        self._work = open_work(self._dst, [config_to_json(config), job_of(self.lineage)] if resume else None)
        first_decides(self._check_files)
        self._documents = dict(documents or {})

    @property
    def done(self) -> frozenset[str]:
        return frozenset(self._done)

    def note(self, name: str, data: Any) -> None:
        self._work.note(name, data)

    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        names = list(names)
        return first_decides(lambda: self._work.notes(names))

    def __enter__(self) -> Self:
        beginning = first_decides(self._begin)
        try:
            marks = self._work if isinstance(self._work, RemoteWork) else None
            if marks is not None:
                marks.beginning = beginning
            self._leaves = LeafWriter(self._params, self._expected.paths, marks=marks)
        except BaseException as error:
            self._leave(error)
            raise
        self._finished = False
        self._done = set(self._leaves.done)
        self._mine = self._expected.share([path for path in self._expected.paths if path not in self._done])
        return self

    def mine(self, path: str) -> bool:
        return path in self._mine

    def deal(self, owners: Mapping[str, int]) -> None:
        self._mine = frozenset(path for path, process in owners.items() if process == jax.process_index())

    def write(self, leaves: Mapping[str, np.ndarray | jax.Array]) -> None:
        self._expected.check(leaves)
        if again := sorted(leaves.keys() & self._done):
            raise ValueError(f"leaf {again[0]} was written already")
        self._done |= leaves.keys()
        leaves = {path: leaf for path, leaf in leaves.items() if self.mine(path)}
        self._expected.check_numbers(leaves)
        self._leaves.write(leaves)

    def write_sharded(self, path: str, leaf: jax.Array, dtype: np.dtype) -> None:
        """Writes the shards that this process has of a leaf, in a dtype; raises errors as `write` does.

        All processes make the call.
        """
        self._expected.check({path: leaf})
        if path in self._done:
            raise ValueError(f"leaf {path} was written already")

        def shards() -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
            for position, data in shard_positions(leaf).items():
                shard = cast(path, np.asarray(data), dtype)
                self._expected.check_numbers({path: shard})
                yield position, shard

        spec = jax.ShapeDtypeStruct(leaf.shape, dtype)
        self._leaves.write_shards(path, spec, leaf.sharding.shard_shape(leaf.shape), shards())
        self._done.add(path)

    def read_back(self) -> LeafReader:
        self._finish_leaves()
        return LeafReader(self._params)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            try:
                self._finish_leaves()
                first_decides(self._complete)
            except BaseException as failed:
                self._leave(failed)
                raise
        elif isinstance(error, InputError) and is_first_process():
            # Without waiting: the folder in which the others work is about to be removed.
            fail_together(2, str(error))
        self._leave(error)

    @property
    def _params(self) -> StoragePath:
        return self._work.folder / self._folder

    def _check_files(self) -> None:
        check_target(self._dst, buckets=True)
        sources = [source for entry in self.lineage[-1:] for source in entry.get("sources", ())]
        check_beside(self._dst, [as_path(source["path"]) for source in sources])
        missing = [f"{file} is not there" for file in self._files if not file.is_file()]
        raise_if_any(missing, f"cannot write {self._dst}")

    def _begin(self) -> str:
        """Prepares the folder; returns the name of this beginning of the work, empty on a disk."""
        self._work.__enter__()
        try:
            # Copied before the weights are written, so that no copied file can replace them.
            files = by_name(self._files)
            left = by_name(tokenizer_files_in(self._work.folder))  # by an interrupted command: the source had others
            for name in left.keys() - files.keys():
                left[name].unlink()
            copy_tokenizer_files(files, self._work.folder)
            return self._work.beginning if isinstance(self._work, RemoteWork) else ""
        except BaseException as error:
            self._leave(error)
            raise

    def _finish_leaves(self) -> None:
        if not self._finished:
            # Leaves of other processes are looked for when all have finished.
            self._expected.check_all(self._done | (set(self._expected.paths) - self._mine))
            self._leaves.close()
            self._finished = True
            first_decides(self._check_leaves)

    def _check_leaves(self) -> None:
        """Raises `ValueError` unless the leaves on the disk are exactly those of the config, all complete."""
        written = LeafReader(self._params)
        self._expected.check(written.specs)
        self._expected.check_all(written.specs)
        written.check_sizes()

    def _complete(self) -> None:
        # In a bucket the file that is written last makes all others count.
        documents = {LINEAGE_FILE: self.lineage, **self._documents, _CONFIG: config_to_json(self._config)}
        for name, content in documents.items():
            if name == _CONFIG:
                self._work.check_alone()
            (self._work.folder / name).write_durably(json.dumps(content, indent=2).encode())
        ModelDirectory(self._work.folder)
        self._work.complete()

    def _leave(self, error: BaseException | None) -> None:
        if is_first_process():
            self._work.__exit__(type(error) if error else None, error, None)
