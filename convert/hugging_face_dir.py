"""`HuggingFaceDirectory`: a Hugging Face checkpoint, read leaf by leaf as if it were a model directory."""

import math
import os
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moe_jax.companions import companions_in
from moe_jax.convert.checkpoint_files import CheckpointFiles, open_checkpoint
from moe_jax.convert.copying import as_bits, copy_transposed
from moe_jax.convert.hf_config import read_hf_config
from moe_jax.convert.table import Piece
from moe_jax.convert.tensors import DTYPES, TensorEntry, TensorFiles
from moe_jax.convert.weights import Weights, match_weights
from moe_jax.errors import InputError
from moe_jax.fingerprint import fingerprint_files
from moe_jax.finite import DoesNotFit, cast, check_fits
from moe_jax.json_toml import read_json_object
from moe_jax.lineage import read_lineage
from moe_jax.model_source import ModelSource
from moe_jax.models import ModelConfig
from moe_jax.models.serialize import FORMAT
from moe_jax.regular_files import HeldDirectory

# Bytes that each thread reads at a time.
CHUNK_BYTES = 8 << 20
WORKERS = min(4, os.cpu_count() or 1)


class HuggingFaceDirectory:
    """A directory with config.json and weights as safetensors or PyTorch files. A `ModelSource`.

    Weight files are opened when they are first needed: for `config`, a directory with just a config.json is enough.
    If another directory takes this one's place in the meantime, reading is an error: the two must not be mixed.
    """

    base: ModelSource | None = None

    def __init__(self, path: Path | str, *, ignored_keys: Collection[str] = ()):
        """Reads the config.

        Args:
          path: of the directory.
          ignored_keys: unknown keys of config.json that are taken to change nothing.

        Raises:
          FileNotFoundError: if there is no such directory.
          InputError: if there is no config.json that we can read.
        """
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"no Hugging Face directory at {path}")
        self._held = HeldDirectory(self.path)
        data = read_json_object(Path("config.json"), allow=("nonfinite",), inside=self._held)
        if data.get("format") == FORMAT:
            raise InputError(f"{path} is a model directory, not a Hugging Face directory")
        try:
            self.config: ModelConfig = read_hf_config(data, ignored=ignored_keys)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None
        self._files = TensorFiles()
        self._pool = ThreadPoolExecutor(WORKERS)

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """Files that are copied with the model: tokenizer, generation settings, chat templates."""
        self._held.check_in_place()
        return companions_in(self.path)

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """How the model came to be: of a directory that `export` wrote, one entry per command; of others nothing."""
        return read_lineage(self.path, inside=self._held)

    @cached_property
    def checkpoint(self) -> CheckpointFiles:
        """The files with the weights and the tensors in them."""
        found = open_checkpoint(self.path)
        self._held.check_in_place()
        return found

    @cached_property
    def weights(self) -> Weights:
        """The tensors that make up each leaf; raises `InputError` unless all fit the config."""
        from moe_jax.loading import leaf_specs  # imports the decoder, which is not needed to read the config

        return match_weights(self.checkpoint, self.config, leaf_specs(self.config), str(self.path))

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Leaf path -> shape and dtype as stored.

        Raises:
          InputError: if the weights are damaged or are not those of the config; all problems are listed.
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
          InputError: if there is no such leaf, a tied tensor differs from its twin, a cast overflows, or the directory
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
        except DoesNotFit:  # found in one chunk; said of the whole leaf
            check_fits(path, self.read(path), dtype)
            raise
        self._held.check_in_place()
        return out

    def stored_bytes(self, path: str) -> int:
        """Bytes of one leaf on disk; these files store tensors uncompressed."""
        pieces = self.weights.pieces[path]
        itemsize = DTYPES[self.weights.tensors[pieces[0].tensor].dtype].itemsize
        return sum(math.prod(piece.shape) for piece in pieces) * itemsize

    def fingerprint(self) -> str:
        """A SHA-256 of config.json and the weight files: their names, sizes and samples of their contents."""
        return fingerprint_files([self.path / "config.json", *self.checkpoint.files])

    def _chunks(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, int, int]]:
        """Runs of rows in which a leaf is read. A tensor that is not row-major is read whole."""
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
        if not piece.transpose and target.dtype == DTYPES[entry.dtype] and entry.strides is None:
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
        rows = np.empty((stop - start, *piece.shape[1:]), DTYPES[entry.dtype])
        self._files.read_into(entry, piece.offset + start * row, rows)
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


def is_hugging_face_directory(path: Path | str) -> bool:
    """Whether a directory has a config.json in the style of Hugging Face."""
    try:
        data = read_json_object(Path(path) / "config.json", allow=("nonfinite",))
    except (OSError, InputError):
        return False
    return "model_type" in data or "architectures" in data


def _leaf_shape(piece: Piece, count: int) -> tuple[int, ...]:
    shape = piece.shape[::-1] if piece.transpose else piece.shape
    return shape if piece.expert is None else (count, *shape)


def row_chunks(shape: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
    """Cuts the rows of a tensor into runs of about `CHUNK_BYTES`."""
    row_bytes = max(1, math.prod(shape[1:]) * itemsize)
    step = max(1, CHUNK_BYTES // row_bytes)
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
