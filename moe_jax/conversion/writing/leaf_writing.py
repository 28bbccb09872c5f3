"""Writes the leaves of a model as tensors of another library's format, as they are or in codes, layer by layer."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from moe_jax.conversion.checkpoint_source import WORKERS, row_chunks
from moe_jax.conversion.formats.coded_parts import CodingErrors, Packing, SharedScales, part_of
from moe_jax.conversion.formats.encoders import NVFP4, Encoder, WholeNumbers
from moe_jax.conversion.hf_format import MergedModel
from moe_jax.conversion.table import Mapped, Piece
from moe_jax.conversion.tensors import copy_transposed
from moe_jax.core.finite import REMEDY, check_finite, check_fits
from moe_jax.core.terminal import ByteProgress
from moe_jax.files.remote_work import RemoteWork
from moe_jax.files.staging import Workplace
from moe_jax.model_io.model_source import ModelSource


class Sized(Protocol):
    """A planned tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in its file."""
        ...


class TensorWriter(Protocol):
    """A file, or several, whose planned tensors are written run by run."""

    def write(self, name: str, offset: int, values: np.ndarray) -> int:
        """Writes a contiguous run of a tensor, from element `offset` on; returns the number of bytes that it took."""
        ...

    def sync(self) -> bool:
        """Waits until the written bytes are safe, if that is possible yet; returns whether all of them are."""
        ...

    def are_kept(self, names: Iterable[str]) -> bool:
        """Whether an interrupted command is known to have written all of these tensors."""
        ...


class CalibratingPass(Protocol):
    """A pass over a text by a model whose layers are put in codes, one after another.

    Attributes:
      next: the layer that comes next; those before are finished.
      folder: of this pass alone; what a caller keeps there lives as long as the pass.
      shape: how many rows the text has, and tokens in each.
    """

    next: int
    folder: Path
    shape: tuple[int, int]

    def begin(self, layer: int) -> None:
        """Runs a layer on what the layers before it give in codes."""
        ...

    def moments(self, path: str) -> Iterator[np.ndarray]:
        """Yields the second moment Float32[i, i] of the inputs of a kernel of the layer, or one for every expert."""
        ...

    def squares(self, path: str) -> Iterator[np.ndarray]:
        """Yields the diagonals of `moments`."""
        ...

    def counts(self, path: str) -> Iterator[tuple[int, float]]:
        """Yields of how many tokens `squares` are a sum, and the sum of the weights that these have in it."""
        ...

    def finish(self, decoded: Mapping[str, np.ndarray]) -> None:
        """Ends a layer, given what the codes of its leaves stand for, by path."""
        ...

    def losses(self, decoded: Mapping[str, np.ndarray]) -> tuple[float, float]:
        """Returns the nats per token of the text, before and in codes, given the head if that is in codes."""
        ...


Calibrate = Callable[[ModelSource, Path, Any], AbstractContextManager[CalibratingPass]]
"""`calibrate(source, dst, job)`: begins a pass of a model with whole experts for a job that writes `dst`."""


@dataclass(frozen=True, kw_only=True)
class LeafWriting:
    """The writing of a model's tensors, leaf by leaf.

    Attributes:
      model: whose leaves are written.
      mapped: the pieces of its leaves.
      specs: shapes of the leaves, and the dtypes in which the writer takes them.
      tensors: what is planned, by name.
      writer: writes runs of tensors.
      progress: advances by the bytes that were written.
      packing: how experts are put in codes; None: they are not.
      allow_nonfinite: whether NaN and infinity may be written.
      orders: for tensors whose rows are in another order than the leaf's, the leaf's row of each.
      added: for tensors that hold more than the leaf, what is added to every number.
      calibration: says what linear maps are given while their codes are chosen; None: all inputs count alike.
      errors: of the codes that were made.
      losses: of the text of the calibration, when all is written; before, and in codes.
      shared_scales: of kernels that are read as one matrix.
    """

    model: MergedModel
    mapped: Mapped
    specs: Mapping[str, jax.ShapeDtypeStruct]
    tensors: Mapping[str, Sized]
    writer: TensorWriter
    progress: ByteProgress
    packing: Packing | None
    allow_nonfinite: bool
    orders: Mapping[str, np.ndarray] = field(default_factory=dict)
    added: Mapping[str, float] = field(default_factory=dict)
    calibration: CalibratingPass | None = None
    errors: CodingErrors = field(default_factory=CodingErrors)
    losses: list[float] = field(default_factory=list)
    shared_scales: SharedScales = field(default_factory=SharedScales)

    def write_layers(self, work: Workplace | RemoteWork) -> None:
        """Writes the layers that no interrupted command has written, and notes each when it is on disk."""
        by_layer: dict[int | None, list[str]] = {}
        for path in self.mapped.pieces:
            by_layer.setdefault(int(path.split("/")[1]) if path.startswith("layers/") else None, []).append(path)
        names = {layer: "rest" if layer is None else str(layer) for layer in by_layer}
        written = work.notes(names.values())
        # The head, which belongs to no layer, is calibrated by what the last one gives.
        last = math.inf if self.calibration is not None else -1
        for layer in sorted(by_layer, key=lambda layer: last if layer is None else layer):
            paths = by_layer[layer]
            tensors = {name for path in paths for name in tensors_of(path, self.mapped, self.packing)}
            size = sum(self.tensors[name].nbytes for name in tensors)
            # A pass knows less than what is written if it was interrupted between the two: the layer is made again.
            if (names[layer] in written or self.writer.are_kept(tensors)) and self._is_past(layer):
                self.progress.skip(size)
                continue
            self._write_layer(layer, paths)
            if self.writer.sync():
                work.note(names[layer], {"bytes": size})

    def _is_past(self, layer: int | None) -> bool:
        return self.calibration is None or (layer is not None and layer < self.calibration.next)

    def _write_layer(self, layer: int | None, paths: list[str]) -> None:
        """Writes the leaves of a layer; None: those that belong to none."""
        calibration = self.calibration
        if calibration is not None and layer is not None:
            calibration.begin(layer)
        decoded: dict[str, np.ndarray] = {}
        for path in paths:
            if turns := self.mapped.pieces[path][0].turns:
                if path == turns[0]:
                    self._write_turns(turns)
            elif self.packing is None or self.packing.encoder_of(path) is None:
                self._write_leaf(path)
            elif (made := self._write_packed(path, self.packing)) is not None and calibration is not None:
                decoded[path] = made
        if calibration is not None:
            if layer is None:
                self.losses.extend(calibration.losses(decoded))
            else:
                calibration.finish(decoded)

    def _write_packed(self, path: str, packing: Packing) -> np.ndarray | None:
        """Writes the kernels of a leaf in codes: in stored codes, or else in new ones.

        With a calibration, it returns the leaf that new codes stand for.
        """
        by_expert, encoder = {piece.expert: piece for piece in self.mapped.pieces[path]}, packing.encoder_of(path)
        assert encoder is not None
        kept = packing.stored and part_of(path) == "experts"
        calibrated = self.calibration is not None and not kept
        leaf = np.empty(self.model.specs()[path].shape, self.specs[path].dtype) if calibrated else None
        for expert, tensors, decoded in self._in_codes(
            path, encoder, packing.scales(path, self.specs[path].dtype), kept
        ):
            piece = by_expert.pop(expert)
            for ending, values in tensors.items():
                contiguous = np.ascontiguousarray(values)
                self.progress.advance(self.writer.write(encoder.name_of(piece.tensor, ending), 0, contiguous))
            if leaf is not None and decoded is not None:
                leaf[... if expert is None else expert] = decoded.T
        assert not by_expert, (path, by_expert)
        return leaf

    def _in_codes(
        self, path: str, encoder: Encoder, scales: np.dtype, kept: bool
    ) -> Iterator[tuple[int | None, dict[str, np.ndarray], np.ndarray | None]]:
        """Yields the tensors of every kernel of a leaf by their endings, and what they stand for if they are new.

        Counts the errors of new codes.
        """
        if kept:
            assert isinstance(encoder, WholeNumbers)
            shape = self.mapped.pieces[path][0].shape
            for expert, codes in self.model.codes(path):
                yield expert, encoder.tensors(codes, shape, scales), None
            return
        largest: Mapping[int | None, float] = {}
        if isinstance(encoder, NVFP4):
            largest = self.shared_scales.largest(path, self.mapped.pieces, self._finite_parts)
        before, made = None, None
        for expert, kernel, moment in self._kernels_and_moments(path, encoder):
            # Those of a dense layer are one kernel, and of merged experts; but what they are given may differ.
            if kernel is not before or made is None or moment is not None:
                if isinstance(encoder, NVFP4):
                    encoder = replace(encoder, largest=largest[expert])
                matrix = np.ascontiguousarray(kernel.T, np.float32)
                before, made = kernel, encoder.encoded(matrix, scales, moment)
                self.errors.add(path, matrix, made.decoded)
            yield expert, made.tensors, made.decoded

    def _kernels_and_moments(
        self, path: str, encoder: Encoder
    ) -> Iterator[tuple[int | None, np.ndarray, np.ndarray | None]]:
        """Yields the kernels of a leaf, with the second moments of their inputs where these choose the codes."""
        parts = self._finite_parts(path)
        if self.calibration is None or not isinstance(encoder, WholeNumbers):
            for expert, kernel in parts:
                yield expert, kernel, None
            return
        in_order = sorted(parts, key=lambda part: part[0] or 0)
        for (expert, kernel), moment in zip(in_order, self.calibration.moments(path), strict=True):
            yield expert, kernel, moment

    def _finite_parts(self, path: str) -> Iterator[tuple[int | None, np.ndarray]]:
        """Yields the parts of a leaf whose numbers are finite, as `_parts_of` does."""
        for expert, kernel in self._parts_of(path, self.mapped.pieces[path]):
            check_finite(path if expert is None else f"{path}[{expert}]", kernel, REMEDY)
            yield expert, kernel

    def _write_leaf(self, path: str) -> None:
        """Writes one leaf. The next expert is made while the previous one is written; two are in memory."""
        pieces, dtype = self.mapped.pieces[path], self.specs[path].dtype
        with ThreadPoolExecutor(WORKERS) as pool:
            writing: list[Future[None]] = []
            waiting: dict[int | None, list[Piece]] = {}
            for piece in pieces:
                waiting.setdefault(piece.expert, []).append(piece)
            for expert, part in self._parts_of(path, pieces):
                name = path if expert is None else f"{path}[{expert}]"
                if not self.allow_nonfinite:
                    check_finite(name, part, REMEDY)
                check_fits(name, part, dtype)
                chunks = [
                    (piece, rows) for piece in waiting.pop(expert) for rows in row_chunks(piece.shape, dtype.itemsize)
                ]
                before, writing = writing, [pool.submit(self._write_rows, part, *chunk, dtype) for chunk in chunks]
                for future in before:
                    future.result()
            for future in writing:
                future.result()
            assert not waiting, (path, waiting)

    def _write_turns(self, paths: tuple[str, ...]) -> None:
        """Writes leaves whose columns take turns in their tensors, an expert of all of them at a time."""
        pieces, dtype = self.mapped.pieces[paths[0]], self.specs[paths[0]].dtype
        by_expert = {piece.expert: piece for piece in pieces}
        for parts in zip(*(self._parts_of(path, self.mapped.pieces[path]) for path in paths), strict=True):
            (expert, _), *_ = parts
            assert all(other == expert for other, _ in parts), paths
            for path, (_, part) in zip(paths, parts, strict=True):
                name = path if expert is None else f"{path}[{expert}]"
                if not self.allow_nonfinite:
                    check_finite(name, part, REMEDY)
                check_fits(name, part, dtype)
            piece = by_expert.pop(expert)
            assert not piece.transpose and piece.columns is None, piece
            with np.errstate(all="ignore"):  # as in `_write_rows`
                join = np.concatenate if piece.in_blocks else np.stack
                joined = join([part for _, part in parts], axis=-1).astype(dtype, copy=False)
            self.progress.advance(self.writer.write(piece.tensor, piece.offset, joined))
        assert not by_expert, (paths, by_expert)

    def _parts_of(self, path: str, pieces: list[Piece]) -> Iterator[tuple[int | None, np.ndarray]]:
        """Yields the parts of a leaf, cut as its pieces are: heads that have a tensor each are stacked in one part."""
        for expert, part in self.model.parts(path):
            if expert is None and pieces[0].expert is not None:
                yield from enumerate(part)
            else:
                yield expert, part

    def _write_rows(self, part: np.ndarray, piece: Piece, rows: tuple[int, int], dtype: np.dtype) -> None:
        """Writes some rows of a tensor from the leaf, or the expert of a leaf, that holds them."""
        start, stop = rows
        part = part if piece.columns is None else part[..., slice(*piece.columns)]
        order = self.orders.get(piece.tensor)
        chosen = slice(start, stop) if order is None else order[start:stop]
        with np.errstate(all="ignore"):  # numbers that are not finite were found before, or are allowed
            cut = (part[:, chosen] if piece.transpose else part[chosen]).astype(dtype, copy=False)
        if piece.transpose:
            values = np.empty(cut.shape[::-1], dtype)
            copy_transposed(cut, values)
        else:
            values = np.ascontiguousarray(cut)
        if piece.tensor in self.added:
            values = values + values.dtype.type(self.added[piece.tensor])
        offset = piece.offset + start * math.prod(piece.shape[1:])
        self.progress.advance(self.writer.write(piece.tensor, offset, values))


def tensors_of(path: str, mapped: Mapped, packing: Packing | None) -> Iterator[str]:
    """Yields the tensors that hold a leaf."""
    for piece in mapped.pieces[path]:
        yield from [piece.tensor] if packing is None else packing.tensors_of(path, piece)
