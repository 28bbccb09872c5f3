"""Models in memory, with the interfaces of those on disk; and models as if they were stored in another dtype."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.core.errors import InputError, check_member
from moe_jax.core.finite import DoesNotFit, cast
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.files.byte_files import fingerprint_leaves, sample_array
from moe_jax.model_io.adapter_dir import AdapterDirectoryWriter
from moe_jax.model_io.loading import check_leaves, layer_of, leaf_specs, may_be_cast, stacked_leaves
from moe_jax.model_io.model_dir import ModelDirectoryWriter, ModelWriter, fingerprint_model
from moe_jax.model_io.model_source import ChangedSource, ModelSource, StoredLeaves
from moe_jax.model_io.tuned_base import LeavesOverBase, own_leaves
from moe_jax.models import ModelConfig
from moe_jax.models.config import DTYPES
from moe_jax.nn import Decoder

IN_MEMORY = Path("in memory")


class LeavesInMemory:
    """Leaves as NumPy arrays in memory; `read` makes no copy."""

    def __init__(self, leaves: Mapping[str, np.ndarray]):
        self.specs = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
        self._leaves = leaves

    def read(self, path: str) -> np.ndarray:
        """Returns one leaf; raises `InputError` if there is no such leaf."""
        if path not in self._leaves:
            raise InputError(f"the model in memory has no leaf {path!r}")
        return self._leaves[path]

    def stored_bytes(self, path: str) -> int:
        """Bytes of one leaf."""
        return self.read(path).nbytes


class DecoderLeaves:
    """The leaves of a decoder, fetched from its devices when they are read. Keeps references to its current arrays."""

    def __init__(self, decoder: Decoder):
        """Raises `InputError` if they are not those of its config, as when a part is another module now."""
        self._leaves = stacked_leaves(decoder)
        self.specs = {
            path: jax.ShapeDtypeStruct(leaf.shape if index is None else leaf.shape[1:], leaf.dtype)
            for path, (leaf, index) in self._leaves.items()
        }
        check_leaves(leaf_specs(decoder.config), self.specs, "the decoder")

    def read(self, path: str) -> np.ndarray:
        """Fetches one leaf from its devices."""
        leaf, index = self._leaves[path]
        return np.asarray(layer_of(leaf, index))

    def stored_bytes(self, path: str) -> int:
        """Bytes of one leaf."""
        return self.specs[path].size * self.specs[path].dtype.itemsize


class ModelInMemory:
    """A model in memory to read from; a `ModelSource`, which documents the attributes."""

    def __init__(
        self,
        config: ModelConfig,
        leaves: StoredLeaves,
        *,
        tokenizer_files: Sequence[Path] = (),
        lineage: Sequence[Mapping[str, Any]] = (),
        base: ModelSource | None = None,
        path: Path = IN_MEMORY,
    ):
        self.config, self.leaves, self.base, self.path = config, leaves, base, path
        self.tokenizer_files = tuple(tokenizer_files)
        self.lineage = [dict(entry) for entry in lineage]

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns leaf path -> shape and dtype."""
        return self.leaves.specs

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf, in its dtype."""
        return self.leaves.read(path)

    def stored_bytes(self, path: str) -> int:
        """Bytes of one leaf."""
        return self.leaves.stored_bytes(path)

    def fingerprint(self) -> str:
        """Returns a SHA-256 of config and weights; a model directory with the same content has the same one."""
        leaves = fingerprint_leaves(self.specs(), lambda path: sample_array(self.read(path)))
        return fingerprint_model(self.config, leaves)


class InMemory:
    """A destination for a model that stays in memory; `source` is the model, once it is complete."""

    source: ModelInMemory | None = None


Destination = Path | InMemory
"""A directory to write, or memory."""


def open_writer(
    dst: Destination,
    config: ModelConfig,
    *,
    tokenizer_files: Sequence[Path],
    lineage: Sequence[Mapping[str, Any]],
    base: ModelSource | None = None,
    trained: Iterable[str] = (),
    resume: bool = False,
    allow_nonfinite: bool = False,
) -> ModelWriter:
    """Opens a writer of a model directory, of an adapter directory if there is a base, or of either in memory.

    Args:
      dst: where the model is written.
      config: config of the model.
      tokenizer_files, lineage, resume, allow_nonfinite: as in `ModelDirectoryWriter`; in memory there is nothing to
        resume.
      base: the base of the model's adapters, if it has some. Then only the leaves that the base does not have and those
        in `trained` are written.
      trained: leaves of the base whose values have changed.

    Raises:
      InputError: if the directory exists, or `config` does not describe adapters over `base`.
    """
    given: Any = {"tokenizer_files": tokenizer_files, "lineage": lineage, "allow_nonfinite": allow_nonfinite}
    if isinstance(dst, InMemory):
        assert not trained, "what was trained in memory is in memory already"
        own = None if base is None else own_leaves(config)
        return _MemoryWriter(dst, base, config, tokenizer_files, lineage, own, allow_nonfinite)
    if isinstance(base, ModelInMemory):
        raise InputError(f"{dst} would refer to a model that is in memory only; save it first, and give its path")
    if base is None:
        return ModelDirectoryWriter(dst, config, resume=resume, **given)
    return AdapterDirectoryWriter(dst, config, base=base, trained=trained, resume=resume, **given)


def write_each(
    writer: ModelWriter,
    paths: Collection[str],
    leaf: Callable[[str], np.ndarray],
    *,
    doing: str,
    progress: Progress = no_progress,
) -> None:
    """Writes the leaves at these paths one by one, but for those that are there, or are another process's.

    `leaf` returns the leaf of a path. `progress` is told what is `doing`, and how many paths are done.
    """
    progress(doing, 0, len(paths))
    for done, path in enumerate(paths, 1):
        if path not in writer.done and writer.mine(path):
            writer.write({path: leaf(path)})
        progress(doing, done, len(paths))


class _MemoryWriter(ModelWriter):
    """Collects leaves, and makes a `ModelInMemory` of them when the block ends without an error."""

    def __init__(self, dst: InMemory, base: ModelSource | None, *described: Any):
        super().__init__(*described)
        self._dst, self._base = dst, base
        self._leaves: dict[str, np.ndarray] = {}
        self._notes: dict[str, Any] = {}

    @property
    def done(self) -> frozenset[str]:
        return frozenset(self._leaves)

    def mine(self, path: str) -> bool:
        return True

    def note(self, name: str, data: Any) -> None:
        self._notes[name] = data

    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self._notes[name] for name in names if name in self._notes}

    def deal(self, owners: Mapping[str, int]) -> None:
        del owners  # in memory every process has all of them

    def write(self, leaves: Mapping[str, np.ndarray | jax.Array]) -> None:
        self._expected.check(leaves)
        self._expected.check_numbers(leaves)
        # Copied, because the caller may reuse the buffer, and a view may repeat its elements.
        self._leaves |= {path: np.array(leaf, order="C") for path, leaf in leaves.items()}

    def read_back(self) -> StoredLeaves:
        self._expected.check_all(self._leaves)
        return LeavesInMemory(self._leaves)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            return
        own = self.read_back()
        leaves: StoredLeaves = own if self._base is None else LeavesOverBase(self._config, self._base, own)
        self._dst.source = ModelInMemory(
            self._config, leaves, tokenizer_files=self._files, lineage=self.lineage, base=self._base
        )


def differing_leaves(model: ModelSource, base: ModelSource) -> list[str]:
    """Returns the paths of the leaves of the base whose values differ in the tuned model.

    NF4 kernels are compared with the codes of the base's kernels.
    """
    fresh = LeavesOverBase(model.config, base)

    def differs(path: str) -> bool:
        leaf = model.read(path)
        other = fresh.read(path).astype(leaf.dtype)
        return not np.array_equal(leaf.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))

    return [path for path in model.specs() if path in fresh.specs and differs(path)]


class CastSource(ChangedSource):
    """Casts another source's leaves when they are read. Base, stored sizes and fingerprint are that source's."""

    def __init__(self, source: ModelSource, dtype: str):
        """Reads no weights yet; raises `InputError` unless `dtype` is float32, bfloat16 or float16."""
        check_member("dtype", dtype, DTYPES)
        super().__init__(source, dataclasses.replace(source.config, dtype=dtype))
        self._dtype = jnp.dtype(dtype)

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            path: jax.ShapeDtypeStruct(spec.shape, self._dtype) if may_be_cast(path, spec.dtype) else spec
            for path, spec in self._source.specs().items()
        }

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf and casts it; raises `InputError` if it cannot be read, or is too large for the dtype."""
        leaf = self._source.read(path)
        if not may_be_cast(path, leaf.dtype):
            return leaf
        try:
            return cast(path, leaf, self._dtype)
        except DoesNotFit as error:
            raise InputError(f"{error}; choose another --dtype") from None


class SourceWithLeaves(ChangedSource):
    """A model with some leaves in the place of others, as a new config describes it."""

    def __init__(self, source: ModelSource, config: ModelConfig, leaves: Mapping[str, np.ndarray]):
        """Takes the new leaves; the others are read from the source when they are asked for."""
        super().__init__(source, config)
        self._leaves, stored = leaves, source.specs()
        self._specs = LeavesInMemory(leaves).specs
        self._specs |= {path: stored[path] for path in leaf_specs(config) if path in stored and path not in leaves}

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self._specs

    def read(self, path: str) -> np.ndarray:
        return self._leaves[path] if path in self._leaves else self._source.read(path)

    def stored_bytes(self, path: str) -> int:
        return self._leaves[path].nbytes if path in self._leaves else self._source.stored_bytes(path)
