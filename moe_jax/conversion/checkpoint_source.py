"""`CheckpointSource`: a checkpoint in another library's format, read leaf by leaf as if it were a model directory.

Before anything is read, its tensors are matched with its family's table: none missing, none left over.
"""

import abc
import hashlib
import math
import os
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from moe_jax.conversion.model_table import mapped as mapped_model
from moe_jax.conversion.model_table import table_of
from moe_jax.conversion.table import Ignored, Piece, Table, Tied, detect_layout
from moe_jax.conversion.tensors import (
    DTYPES,
    CodesOfGroups,
    GroupedRows,
    TensorEntry,
    TensorFiles,
    as_bits,
    copy_transposed,
)
from moe_jax.core.errors import InputError, clipped, raise_if_any, shown
from moe_jax.core.finite import DoesNotFit, cast, check_fits
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig


class CodesInside(NamedTuple):
    """The tensors of a checkpoint that is quantised.

    Attributes:
      kinds: how many are in codes, by the kind of these; empty: the weights are not there.
      whole: how many are not.
      partly: a line about experts of which only some are in codes; None: there are none.
    """

    kinds: Mapping[str, int]
    whole: int = 0
    partly: str | None = None

    def in_words(self) -> str:
        """Returns how many tensors are in codes of every kind, and how many in none."""
        kinds = ", ".join(f"{count:,} in {kind}" for kind, count in self.kinds.items())
        return f"{kinds}; {self.whole:,} tensors are not in codes"


class Weights(NamedTuple):
    """A checkpoint in which every tensor has a known use."""

    tensors: dict[str, TensorEntry]  # positions of all tensors that fill a leaf
    pieces: dict[str, list[Piece]]  # leaf path -> the pieces that fill it
    layout: str  # expert layout of the checkpoint
    duplicates: dict[str, Tied]  # tensors that must equal another one, by name
    ignored: dict[str, str]  # tensors that are not converted: name -> reason


def match_weights(
    tensors: Mapping[str, TensorEntry],
    config: ModelConfig,
    leaves: Mapping[str, Any],
    where: str,
    *,
    table: Table | None = None,
    described_by: str = "config.json",
) -> Weights:
    """Matches a checkpoint's tensors with a model's leaves.

    The `table` is that of the model's family if none is given; `where` and `described_by`, the file that the config was
    read from, are for messages.

    Raises:
      InputError: listing every tensor that is missing, unexpected, misshapen or of a dtype we cannot read.
    """
    table = table_of(config) if table is None else table
    layout = detect_layout(table, tensors)
    mapped = mapped_model(config, leaves, layout, table=table)
    tied = {entry.tensor: entry for entry in table if isinstance(entry, Tied)}
    duplicates: dict[str, Tied] = {}
    ignored, unexpected = {}, []
    for name in (name for name in tensors if name not in mapped.tensors):
        why = next((one.why for one in table if isinstance(one, Ignored) and re.fullmatch(one.pattern, name)), None)
        if name in tied:
            duplicates[name] = tied[name]
        elif why is not None:
            ignored[name] = why
        else:
            unexpected.append(f"{clipped(name)} is unexpected")

    problems = [f"{name} is missing" for name in mapped.tensors if name not in tensors] + unexpected
    expected = {**mapped.tensors, **{name: mapped.tensors[one.equals] for name, one in duplicates.items()}}
    problems += _shape_problems(tensors, expected, described_by)
    if not problems:  # a leaf that is stacked from several dtypes could not hold them bit for bit
        entries = {leaf: [tensors[piece.tensor] for piece in pieces] for leaf, pieces in mapped.pieces.items()}
        whole = {leaf: found for leaf, found in entries.items() if not any(entry.is_quantized for entry in found)}
        dtypes = {leaf: {entry.dtype for entry in found} for leaf, found in whole.items()}
        mixed = {leaf: ", ".join(sorted(found)) for leaf, found in dtypes.items() if len(found) > 1}
        problems = [f"{leaf} would be stacked from tensors of dtypes {found}" for leaf, found in mixed.items()]
    raise_if_any(problems, f"{where} does not hold the model its {described_by} describes")
    return Weights({name: tensors[name] for name in (*mapped.tensors, *duplicates)}, mapped.pieces,
                   layout, duplicates, ignored)  # fmt: skip


def _shape_problems(
    tensors: Mapping[str, TensorEntry], expected: Mapping[str, tuple[int, ...]], described_by: str
) -> list[str]:
    problems = []
    for name, shape in expected.items():
        found = tensors.get(name)
        if found is not None and found.shape != shape:
            problems.append(f"{name} has shape {shown(list(found.shape))}, {described_by} says {list(shape)}")
        elif found is not None and found.dtype not in DTYPES:
            problems.append(f"{name} has dtype {found.dtype}, expected one of {', '.join(DTYPES)}")
    return problems


CHUNK_BYTES = 8 << 20  # that each thread reads at a time
_DECODED_BYTES = 1 << 20  # that are decoded at a time, and are still in the cache when they are cast
WORKERS = min(4, os.cpu_count() or 1)


_FOLDERS: dict[str, tempfile.TemporaryDirectory[str]] = {}
_WRITING = threading.Lock()


def _written_once(contents: Mapping[str, str]) -> tuple[Path, ...]:
    """Writes files with these texts to a folder that lives as long as the process: a model has only their paths.

    The same texts are in the same folder, so that a checkpoint that is opened again takes no further room.
    """
    digest = hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()
    with _WRITING:
        if digest not in _FOLDERS:
            folder = tempfile.TemporaryDirectory(prefix="moe-jax-")
            for name, text in contents.items():
                (Path(folder.name) / name).write_text(text, encoding="utf-8")
            _FOLDERS[digest] = folder
    return tuple(Path(_FOLDERS[digest].name) / name for name in contents)


class CheckpointSource(abc.ABC):
    """A checkpoint whose tensors are in files. A `ModelSource`; a subclass knows which tensors make up which leaf."""

    base: ModelSource | None = None
    path: Path
    config: ModelConfig

    def __init__(self) -> None:
        self._files = TensorFiles()
        self._pool = ThreadPoolExecutor(WORKERS)
        self._made: tuple[Path, ...] | None = None

    @cached_property
    @abc.abstractmethod
    def weights(self) -> Weights:
        """The tensors that make up each leaf; raises `InputError` unless all fit the config."""

    @abc.abstractmethod
    def _check_in_place(self) -> None:
        """Raises `InputError` if something else took the checkpoint's place since it was opened."""

    def _made_files(self, make: Callable[[], Mapping[str, str]]) -> tuple[Path, ...]:
        """Returns files with the texts that `make` returns by name; they vanish when the process ends."""
        if self._made is None:
            self._made = _written_once(make())
        return self._made

    def kinds_of_codes(self) -> dict[str, str]:
        """Returns a word for the codes of every tensor that is quantised, such as `fp8` or `Q4_K`, by its name."""
        kinds = {}
        for name, entry in self.weights.tensors.items():
            if entry.coded is not None:
                kinds[name] = entry.coded.kind
            elif entry.blocks is not None:
                kinds[name] = entry.blocks.name
        return kinds

    def codes_inside(self) -> CodesInside | None:
        """Counts the tensors that are in codes; None: none is."""
        codes = self.kinds_of_codes()
        if not codes:
            return None
        partly = []
        for path, pieces in self.weights.pieces.items():
            names = [piece.tensor for piece in pieces if piece.tensor not in codes]
            if 0 < len(names) < len(pieces):
                partly.append(f"{len(names)} of {len(pieces)} experts of {path}, such as {names[0]}")
        more = f", and some of {len(partly) - 1} others" if len(partly) > 1 else ""
        line = f"note: not in codes: {partly[0]}{more}" if partly else None
        return CodesInside(Counter(codes.values()), len(self.weights.tensors) - len(codes), line)

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype, as stored, of every leaf, by path; what is quantised is decoded to float32."""
        return {leaf: self._spec(pieces) for leaf, pieces in self.weights.pieces.items()}

    def _spec(self, pieces: list[Piece]) -> jax.ShapeDtypeStruct:
        first = pieces[0]
        shape = first.shape[::-1] if first.transpose else first.shape
        shape = shape if first.expert is None else (len(pieces), *shape)
        if ends := [piece.columns[1] for piece in pieces if piece.columns is not None]:
            shape = (*shape[:-1], max(ends))
        entries = [self.weights.tensors[piece.tensor] for piece in pieces]
        # Of experts that are in codes but for some, the codes are the ones that need float32.
        entry = next((entry for entry in entries if entry.is_quantized), entries[0])
        return jax.ShapeDtypeStruct(shape, DTYPES[entry.dtype])

    def read(self, path: str, dtype: np.dtype | None = None, buffer: np.ndarray | None = None) -> np.ndarray:
        """Reads one leaf, and no bytes but its own; casts to `dtype` while reading.

        The result is in `buffer`, a uint8 array, at least as large as the leaf, if one is given.

        Raises:
          InputError: if there is no such leaf, a tied tensor differs from its twin, a cast overflows, or the checkpoint
            was replaced since it was opened.
        """
        pieces = self.weights.pieces.get(path)
        if pieces is None:
            raise InputError(f"{self.path} has no leaf {path!r}")
        for piece in pieces:
            self._check_duplicates(piece.tensor)
        spec = self._spec(pieces)
        dtype = dtype or np.dtype(spec.dtype)
        nbytes = spec.size * dtype.itemsize
        buffer = np.empty(nbytes, np.uint8) if buffer is None else buffer
        out = buffer[:nbytes].view(dtype).reshape(spec.shape)
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
        """Yields the runs of rows in which a leaf is read. A tensor that is not stored by rows is read whole."""
        for piece in pieces:
            entry = self.weights.tensors[piece.tensor]
            if entry.strides is None and (entry.coded is None or entry.coded.codes.is_by_rows):
                for start, stop in row_chunks(piece.shape, DTYPES[entry.dtype].itemsize):
                    yield piece, start, stop
            else:
                yield piece, 0, piece.shape[0]

    def _fill(self, out: np.ndarray, piece: Piece, start: int, stop: int) -> None:
        """Copies rows `start:stop` of a piece into the leaf."""
        target = out if piece.expert is None else out[piece.expert]
        entry = self.weights.tensors[piece.tensor]
        as_stored = entry.strides is None and entry.interleaved is None and entry.coded is None and not entry.added
        as_stored = as_stored and not piece.turns
        if piece.columns is not None:
            target, as_stored = target[..., slice(*piece.columns)], False
        if not piece.transpose and as_stored and target.dtype == DTYPES[entry.dtype]:
            self._files.read_into(entry, piece.offset + start * math.prod(piece.shape[1:]), target[start:stop])
            return
        rows = self._cast_rows(entry, piece, start, stop, target.dtype)
        if piece.transpose:
            copy_transposed(rows, target[:, start:stop])
        else:
            target[start:stop] = rows

    def _cast_rows(self, entry: TensorEntry, piece: Piece, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
        if entry.coded is None or not entry.coded.codes.is_by_rows or dtype == np.float32:
            return cast(piece.leaf, self._rows(entry, piece, start, stop), dtype)
        rows = np.empty((stop - start, *piece.shape[1:]), dtype)
        for first, last in row_chunks(rows.shape, DTYPES[entry.dtype].itemsize, _DECODED_BYTES):
            decoded = self._rows(entry, piece, start + first, start + last)
            rows[first:last] = cast(piece.leaf, decoded, dtype)
        return rows

    def _rows(self, entry: TensorEntry, piece: Piece, start: int, stop: int) -> np.ndarray:
        if piece.turns:
            # Those of all leaves are read, whose columns lie between each other.
            own, count = piece.turns.index(piece.leaf), len(piece.turns)
            if piece.in_blocks:
                every = piece._replace(shape=(*piece.shape[:-1], count, piece.shape[-1]), turns=())
                return self._rows(entry, every, start, stop)[..., own, :]
            every = piece._replace(shape=(*piece.shape, count), turns=())
            return self._rows(entry, every, start, stop)[..., own]
        row = math.prod(piece.shape[1:])
        if entry.strides is not None:
            whole = np.ascontiguousarray(self._files.read_strided(entry)).reshape(-1)
            return whole[piece.offset :][start * row : stop * row].reshape(stop - start, *piece.shape[1:])
        if entry.coded is not None:
            width = entry.shape[-1]
            first = piece.offset // width
            rows = self._files.rows(entry, first + start * row // width, first + stop * row // width)
            return rows.reshape(stop - start, *piece.shape[1:])
        order: Any = slice(None)
        if entry.interleaved is not None:
            # Of the stored rows of a head, first the even ones, then the odd ones.
            width = entry.shape[0] // entry.interleaved
            head, index = np.divmod(np.arange(start, stop), width)
            half, index = np.divmod(index, width // 2)
            places = head * width + 2 * index + half
            start, stop = int(places.min()), int(places.max()) + 1
            order = places - start
        rows = np.empty((stop - start, *piece.shape[1:]), DTYPES[entry.dtype])
        self._files.read_into(entry, piece.offset + start * row, rows)
        if entry.added:
            rows -= rows.dtype.type(entry.added)
        return rows[order]

    def codes(self, piece: Piece) -> CodesOfGroups:
        """Reads the codes of a piece of a tensor that has groups of them; raises `InputError` as `read` does."""
        entry = self.weights.tensors[piece.tensor]
        assert entry.coded is not None and isinstance(entry.coded.codes, GroupedRows)
        rows, width = piece.shape[0], entry.shape[-1]
        if entry.coded.codes.is_transposed:
            rows, width = piece.shape[1], entry.shape[-2]
        first, count = piece.offset // width, max(1, len(piece.turns))
        found = self._files.codes(entry, first, first + count * rows)
        self._check_in_place()
        if not piece.turns:
            return found
        number = piece.turns.index(piece.leaf)
        own = slice(number * rows, (number + 1) * rows) if piece.in_blocks else slice(number, None, count)
        zeros = None if found.zeros is None else found.zeros[own]
        return CodesOfGroups(found.codes[own], found.scales[own], zeros)

    def _check_duplicates(self, tensor: str) -> None:
        for duplicate, tied in self.weights.duplicates.items():
            if tied.equals == tensor and not self._equal(duplicate, tensor):
                raise InputError(
                    f"{self.path}: config.json ties {duplicate} to {tensor}, but the two differ; {tied.otherwise}"
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


def row_chunks(shape: tuple[int, ...], itemsize: int, nbytes: int | None = None) -> list[tuple[int, int]]:
    """Cuts the rows of a tensor into runs of about `nbytes`, by default `CHUNK_BYTES`."""
    row_bytes = max(1, math.prod(shape[1:]) * itemsize)
    step = max(1, (nbytes or CHUNK_BYTES) // row_bytes)
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
