"""`CheckpointSource`: a checkpoint in another library's format, read leaf by leaf as if it were a model directory."""

import abc
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moe_jax.conversion.formats.checkpoint_files import CheckpointFiles
from moe_jax.conversion.formats.copying import as_bits, copy_transposed
from moe_jax.conversion.formats.tensors import DTYPES, TensorEntry, TensorFiles
from moe_jax.conversion.table import Piece
from moe_jax.conversion.weights import Weights
from moe_jax.core.errors import InputError
from moe_jax.core.finite import DoesNotFit, cast, check_fits
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig

# Bytes that each thread reads at a time.
CHUNK_BYTES = 8 << 20
WORKERS = min(4, os.cpu_count() or 1)


class CheckpointSource(abc.ABC):
    """A checkpoint whose tensors are in files. A `ModelSource`; a subclass knows which tensors make up which leaf.

    Attributes:
      path: of the checkpoint.
      config: of the model.
    """

    base: ModelSource | None = None
    path: Path
    config: ModelConfig

    def __init__(self) -> None:
        self._files = TensorFiles()
        self._pool = ThreadPoolExecutor(WORKERS)

    @property
    @abc.abstractmethod
    def tokenizer_files(self) -> tuple[Path, ...]:
        """Files that are copied with the model: tokenizer, generation settings, chat templates."""

    @property
    @abc.abstractmethod
    def lineage(self) -> list[dict[str, Any]]:
        """The history of the model, one entry per command."""

    @cached_property
    @abc.abstractmethod
    def checkpoint(self) -> CheckpointFiles:
        """The files with the weights and the tensors in them."""

    @cached_property
    @abc.abstractmethod
    def weights(self) -> Weights:
        """The tensors that make up each leaf; raises `InputError` unless all fit the config."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A hash that identifies config and weights."""

    @abc.abstractmethod
    def _check_in_place(self) -> None:
        """Raises `InputError` if something else took the checkpoint's place since it was opened."""

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype, as stored, of every leaf, by path.

        Raises:
          InputError: if the weights are damaged or do not fit the config; all problems are listed.
        """
        specs = {}
        for leaf, pieces in self.weights.pieces.items():
            first = pieces[0]
            dtype = DTYPES[self.weights.tensors[first.tensor].dtype]
            specs[leaf] = jax.ShapeDtypeStruct(_leaf_shape(first, len(pieces)), dtype)
        return specs

    def read(self, path: str, dtype: np.dtype | None = None, buffer: np.ndarray | None = None) -> np.ndarray:
        """Reads one leaf, and no bytes but its own.

        Args:
          path: of the leaf.
          dtype: to cast to while reading; default as stored.
          buffer: uint8 array, at least as large as the leaf, that may be used as the memory of the returned array.

        Raises:
          InputError: if there is no such leaf, a tied tensor differs from its twin, a cast overflows, or the checkpoint
            was replaced since it was opened.
        """
        pieces = self.weights.pieces.get(path)
        if pieces is None:
            raise InputError(f"{self.path} has no leaf {path!r}")
        for piece in pieces:
            self._check_duplicates(piece.tensor)
        first = pieces[0]
        stored = DTYPES[self.weights.tensors[first.tensor].dtype]
        shape, dtype = _leaf_shape(first, len(pieces)), dtype or stored
        buffer = np.empty(math.prod(shape) * dtype.itemsize, np.uint8) if buffer is None else buffer
        out = buffer[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        try:
            list(self._pool.map(lambda chunk: self._fill(out, *chunk), self._chunks(pieces)))
        except DoesNotFit:  # found in one chunk; reported for the whole leaf
            check_fits(path, self.read(path), dtype)
            raise
        self._check_in_place()
        return out

    def stored_bytes(self, path: str) -> int:
        """Number of bytes of one leaf on disk."""
        pieces = self.weights.pieces[path]
        return sum(self.weights.tensors[piece.tensor].stored_bytes(math.prod(piece.shape)) for piece in pieces)

    def _chunks(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, int, int]]:
        """Yields the runs of rows in which a leaf is read. A tensor that is not row-major is read whole."""
        for piece in pieces:
            entry = self.weights.tensors[piece.tensor]
            if entry.strides is None:
                for start, stop in row_chunks(piece.shape, DTYPES[entry.dtype].itemsize):
                    yield piece, start, stop
            else:
                yield piece, 0, piece.shape[0]

    def _fill(self, out: np.ndarray, piece: Piece, start: int, stop: int) -> None:
        """Copies rows `start:stop` of a piece into the leaf."""
        target = out if piece.expert is None else out[piece.expert]
        entry = self.weights.tensors[piece.tensor]
        is_as_stored = target.dtype == DTYPES[entry.dtype] and entry.strides is None and entry.interleaved is None
        if not piece.transpose and is_as_stored:
            self._files.read_into(entry, piece.offset + start * math.prod(piece.shape[1:]), target[start:stop])
            return
        rows = cast(piece.leaf, self._rows(entry, piece, start, stop), target.dtype)
        if piece.transpose:
            copy_transposed(rows, target[:, start:stop])
        else:
            target[start:stop] = rows

    def _rows(self, entry: TensorEntry, piece: Piece, start: int, stop: int) -> np.ndarray:
        row = math.prod(piece.shape[1:])
        if entry.strides is not None:
            whole = np.ascontiguousarray(self._files.read_strided(entry)).reshape(-1)
            return whole[piece.offset :][start * row : stop * row].reshape(stop - start, *piece.shape[1:])
        if entry.interleaved is not None:
            places = _interleaved_places(entry.shape[0] // entry.interleaved, start, stop)
            first = int(places.min())
            return self._run(entry, piece, first, int(places.max()) + 1)[places - first]
        return self._run(entry, piece, start, stop)

    def _run(self, entry: TensorEntry, piece: Piece, start: int, stop: int) -> np.ndarray:
        """Reads rows of a piece as they are stored."""
        rows = np.empty((stop - start, *piece.shape[1:]), DTYPES[entry.dtype])
        self._files.read_into(entry, piece.offset + start * math.prod(piece.shape[1:]), rows)
        return rows

    def _check_duplicates(self, tensor: str) -> None:
        for duplicate, original in self.weights.duplicates.items():
            if original == tensor and not self._equal(duplicate, original):
                raise InputError(
                    f"{self.path}: config.json ties {duplicate} to {original}, but the two differ; "
                    "set tie_word_embeddings to false if they are meant to"
                )

    def _equal(self, a: str, b: str) -> bool:
        first, second = self.weights.tensors[a], self.weights.tensors[b]
        if first.dtype != second.dtype:
            return False
        whole = Piece(a, 0, first.shape, "", None, False, a)
        return all(
            np.array_equal(as_bits(self._rows(first, whole, *rows)), as_bits(self._rows(second, whole, *rows)))
            for rows in row_chunks(first.shape, DTYPES[first.dtype].itemsize)
        )


def _leaf_shape(piece: Piece, count: int) -> tuple[int, ...]:
    shape = piece.shape[::-1] if piece.transpose else piece.shape
    return shape if piece.expert is None else (count, *shape)


def _interleaved_places(width: int, start: int, stop: int) -> np.ndarray:
    """Returns where rows of interleaved heads are stored: in every head, first the even ones, then the odd ones."""
    head, row = np.divmod(np.arange(start, stop), width)
    half, index = np.divmod(row, width // 2)
    return head * width + 2 * index + half


def row_chunks(shape: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
    """Cuts the rows of a tensor into runs of about `CHUNK_BYTES`."""
    row_bytes = max(1, math.prod(shape[1:]) * itemsize)
    step = max(1, CHUNK_BYTES // row_bytes)
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
