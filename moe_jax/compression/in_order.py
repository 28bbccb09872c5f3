"""Writes a model layer by layer in their order, its experts by a method and its linear maps in codes.

With a text, a pass over it runs beside the writing (`calibration.coded_pass`): every layer is given what those before
it give as they are stored now, and so makes up for some of their errors.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from moe_jax.compression.calibration.coded_pass import CodedPass
from moe_jax.compression.calibration.recording import LayerRows
from moe_jax.compression.coding.coder import ExpertCoder, LeastError, LeastOutputError
from moe_jax.compression.linear_maps import LinearMap, coded_leaves, head_and_rows
from moe_jax.compression.part_report import Losses, MapErrors, PartReport
from moe_jax.compression.report import LayerFigures
from moe_jax.compression.source_layer import Write, check_weights
from moe_jax.core.terminal import Progress
from moe_jax.model_io.in_memory import SourceWithLeaves
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import LinearCodes, ModelConfig
from moe_jax.models.linear_codes import EMBED

CompressLayer = Callable[[int, Write, LayerRows | None], LayerFigures]
"""Compresses the experts of a layer, given what they are given in the pass; None: there is no pass."""

OnLayer = Callable[[int, LayerFigures, int], None]
"""Called with the index of a finished layer, its figures, and the bytes of its experts now."""

_FIRST, _LAST = "embedding", "head"
"""Names of what belongs to no layer: the embedding, and all else."""


class BeginPass(Protocol):
    """Begins the pass over the text, or continues it, see `CodedPass`.

    Given the model with its new embedding, if that is in codes, and how many layers are written.
    """

    def __call__(self, *, embedding: ModelSource | None, written: int) -> CodedPass: ...


class TakesLeaves(Protocol):
    """The part of a `ModelWriter` that the work needs."""

    @property
    def done(self) -> frozenset[str]: ...
    def notes(self, names: Iterable[str]) -> dict[str, Any]: ...
    def note(self, name: str, data: Any) -> None: ...
    def write(self, leaves: Mapping[str, np.ndarray]) -> None: ...


class Nowhere(TakesLeaves):
    """Takes leaves and keeps none, for work that is only to be measured."""

    @property
    def done(self) -> frozenset[str]:
        return frozenset()

    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        return {}

    def note(self, name: str, data: Any) -> None:
        del name, data

    def write(self, leaves: Mapping[str, np.ndarray]) -> None:
        del leaves


class Done(NamedTuple):
    """The figures of the work: of layers by index, of linear maps by part, and of the text if there is one."""

    figures: dict[int, LayerFigures]
    parts: tuple[PartReport, ...]
    losses: Losses | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class InOrder:
    """The work.

    Attributes:
      source: the model as it was.
      config: that of the model to write.
      indices: layers whose experts are compressed.
      compress_layer: compresses them.
      maps: linear maps to put in codes.
      codes: of these, by their paths.
      begin_pass: begins the pass; None: without a text.
      head_moment: returns the second moment of what the head is given, for an embedding that is also the head.
      coder_options: of the coders of the maps: `even` and `feedback` of `LeastOutputError`.
      writer: of the model.
      progress: called after every layer.
      doing: what it is told that is done.
      on_layer: called with every layer whose experts are done, its figures, and the bytes of its experts now.
    """

    source: ModelSource
    config: ModelConfig
    indices: Sequence[int]
    compress_layer: CompressLayer
    maps: Sequence[LinearMap]
    codes: Mapping[str, LinearCodes]
    begin_pass: BeginPass | None
    head_moment: Callable[[], np.ndarray]
    coder_options: Mapping[str, bool]
    writer: TakesLeaves
    progress: Progress
    doing: str
    on_layer: OnLayer

    def write(self) -> Done:
        """Writes everything that an interrupted job has not written, and measures it."""
        by_group: dict[str, list[str]] = {_FIRST: []}
        for path in leaf_specs(self.config):
            names = path.split("/")
            group = names[1] if names[0] == "layers" else _FIRST if names[0] == EMBED else _LAST
            by_group.setdefault(group, []).append(path)
        order = [_FIRST, *sorted(by_group.keys() - {_FIRST, _LAST}, key=int), _LAST]
        notes, losses = self.writer.notes(order), None
        known = [group in notes and self.writer.done.issuperset(by_group[group]) for group in order]
        coded: CodedPass | None = None
        embedding: dict[str, np.ndarray] = {}  # in codes, which may be needed again for the head
        for number, group in enumerate(order):
            self.progress(self.doing, number, len(order))
            # A pass knows less than what is written if it was stopped between the two: the layer is made again.
            is_past = self.begin_pass is None or (coded is not None and group != _LAST and int(group) < coded.next)
            if not (known[number] and is_past):
                notes[group], made = self._write_group(group, by_group[group], coded)
                self.writer.note(group, notes[group])
                if self.begin_pass is not None:
                    written = SourceWithLeaves(self.source, self.config, embedding | made)
                    if group == _FIRST:
                        embedding = made
                        # A pass may outlive what was written, and know layers that have to be made again.
                        count = next(i for i, one in enumerate([*known[1:-1], False]) if not one)
                        coded = self.begin_pass(embedding=written if made else None, written=count)
                    elif group == _LAST:
                        assert coded is not None
                        losses = Losses(*coded.losses_of(written))
                    else:
                        assert coded is not None
                        coded.finish_as(written)
            if group.isdigit() and int(group) in self.indices:
                self.on_layer(int(group), LayerFigures.from_note(notes[group]["figures"]), notes[group]["nbytes"])
        self.progress(self.doing, len(order), len(order))
        figures = {i: LayerFigures.from_note(notes[str(i)]["figures"]) for i in self.indices}
        parts: dict[str, MapErrors] = defaultdict(MapErrors)
        for note in notes.values():
            for part, errors in note["parts"].items():
                parts[part] += MapErrors(**errors)
        reports = tuple(PartReport.of(part, errors, self._words(part)) for part, errors in parts.items())
        return Done(figures, reports, losses)

    def _write_group(
        self, group: str, paths: Sequence[str], coded: CodedPass | None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Writes the leaves of a layer, or others; returns what to note of it, and the leaves that are new."""
        made: dict[str, np.ndarray] = {}
        stored, figures = self.source.specs(), None

        def write(path: str, leaf: np.ndarray) -> None:
            made[path] = leaf
            if path not in self.writer.done:
                self.writer.write({path: leaf})

        if coded is not None and group.isdigit():
            coded.begin(int(group))
        if group.isdigit() and int(group) in self.indices:
            rows, prefix = None if coded is None else coded.rows_of_experts(), f"layers/{group}/mlp/"
            figures = self.compress_layer(int(group), lambda below, leaf: write(prefix + below, leaf), rows)
        parts: dict[str, MapErrors] = defaultdict(MapErrors)
        for one in self.maps:
            if group == (_FIRST if one.path == EMBED else _LAST if one.layer is None else str(one.layer)):
                parts[one.part] += self._write_map(one, write, coded)
        for path in paths:
            if path not in made and path not in self.writer.done and path in stored:
                self.writer.write({path: self.source.read(path)})
        experts = f"layers/{group}/mlp/experts/"
        note = {
            "nbytes": sum(leaf.nbytes for path, leaf in made.items() if path.startswith(experts)),
            "figures": None if figures is None else dataclasses.asdict(figures),
            "parts": {part: dataclasses.asdict(errors) for part, errors in parts.items()},
        }
        return note, made

    def _write_map(
        self, one: LinearMap, write: Callable[[str, np.ndarray], None], coded: CodedPass | None
    ) -> MapErrors:
        codes, leaf = self.codes[one.path], self.source.read(one.leaf)
        kernel = np.ascontiguousarray(one.kernel(check_weights(one.leaf, leaf)), np.float32)
        moment = self._moment(one, coded)
        coder: ExpertCoder = LeastError(even=self.coder_options["even"])
        if moment is not None:
            coder = LeastOutputError(moment, in_order=True, **self.coder_options)
        leaves, approximation = coded_leaves(one, codes, kernel, coder)
        for path, array in leaves.items():
            write(path, array)
        bytes_after = sum(array.nbytes for array in leaves.values())
        return MapErrors.between(kernel, approximation, moment, bytes_before=leaf.nbytes, bytes_after=bytes_after)

    def _words(self, part: str) -> str:
        """Returns the codes of a part in words, the usual ones first."""
        count = Counter(self.codes[one.path].describe() for one in self.maps if one.part == part)
        return "; ".join(words if len(count) == 1 else f"{n} in {words}" for words, n in count.most_common())

    def _moment(self, one: LinearMap, coded: CodedPass | None) -> np.ndarray | None:
        """Returns the second moment of what a map is given; of an embedding that is no head, nothing is."""
        if one.part != "embedding":
            return None if coded is None else next(coded.moments(one.leaf))
        if not self.source.config.tie_embeddings or self.begin_pass is None:
            return None
        return head_and_rows(self.head_moment())
