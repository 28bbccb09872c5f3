"""The training data of a recipe: files, mixed, shuffled, tokenised and made into batches (Grain).

Row r of the global batch reads the records r, r + B, r + 2B, ... in turn. The content of a row therefore does not
depend on the number of processes, each process prepares only its own rows, and the position of the data is one (record,
offset) per row.
"""

import abc
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grain
import numpy as np

from moe_jax.core.errors import InputError
from moe_jax.data.rows import Example
from moe_jax.data.sections import DataSection, SourceSection, input_length
from moe_jax.data.sources import Files, open_sources
from moe_jax.data.tokenizer import Pair, Pairs, Tokenizer
from moe_jax.files.storage_path import as_path
from moe_jax.models import ModelConfig

Batch = dict[str, np.ndarray]


class Row(abc.ABC):
    """One row of the global batch, and its position: a record, and an offset in it.

    Args:
      records: in training order.
      number: of the row.
      stride: B, rows of the global batch.
    """

    def __init__(self, records: grain.MapDataset, number: int, stride: int):
        self.number, self._stride, self._records = number, stride, records
        self.seek(number, 0)

    def seek(self, record: int, offset: int) -> None:
        """Moves to a position."""
        self.record, self.offset = record, offset

    @abc.abstractmethod
    def fill(self) -> Batch:
        """Returns the arrays of the next sequence."""


class RowBatches(grain.IterDataset):
    """An endless iterator over batches of rows that are filled one by one; after the last record, all is padding.

    Its position consists of those of the rows; one that belongs to data with another `identity` is refused. If records
    have to be waited for, so many rows are filled `at_once`.
    """

    def __init__(self, rows: Callable[[], Sequence[Row]], *, identity: Mapping[str, int], at_once: int = 1):
        super().__init__()
        self._make = lambda: _RowsIterator(rows(), dict(identity), at_once)

    def __iter__(self) -> grain.DatasetIterator:
        return self._make()


class _RowsIterator(grain.DatasetIterator):
    def __init__(self, rows: Sequence[Row], identity: dict[str, int], at_once: int):
        super().__init__()
        self._rows, self._identity = rows, identity
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="rows") if at_once > 1 else None

    def __next__(self) -> Batch:
        run = map if self._pool is None else self._pool.map
        filled = list(run(lambda row: row.fill(), self._rows))
        return {key: np.stack([row[key] for row in filled]) for key in filled[0]}

    def get_state(self) -> dict[str, Any]:
        return {"identity": self._identity, "rows": {str(row.number): [row.record, row.offset] for row in self._rows}}

    def set_state(self, state: dict[str, Any]) -> None:
        if state["identity"] != self._identity:
            raise InputError(
                f"the training data changed: this position belongs to {state['identity']}, the files now make "
                f"{self._identity}; put the old files back or start a new run"
            )
        for row in self._rows:
            row.seek(*state["rows"][str(row.number)])


class PackedRow(Row):
    """A row of packed sequences of T = `seq_len` tokens. Its records are `Pairs`.

    A batch of R such rows holds:
      tokens Int32[R, T], targets Int32[R, T], weights Float32[R, T] (0: not scored),
      segment_ids Int32[R, T] (documents of a row count from 1; 0 is padding), positions Int32[R, T] (from 0 in every
      segment).

    `whole`: a new sequence is started rather than a document cut that fits into one.
    """

    def __init__(self, records: grain.MapDataset, number: int, stride: int, *, seq_len: int, whole: bool):
        super().__init__(records, number, stride)
        self._seq_len, self._whole = seq_len, whole

    def seek(self, record: int, offset: int) -> None:
        super().seek(record, offset)
        self._pairs: Pairs | None = None

    def fill(self) -> Batch:
        row = Pairs(*(np.zeros(self._seq_len, dtype) for dtype in (np.int32, np.int32, np.float32, bool)))
        filled = 0
        while filled < self._seq_len and self.record < len(self._records):
            pairs: Any = self._records[self.record] if self._pairs is None else self._pairs
            self._pairs = pairs
            if self.offset == len(pairs.tokens):
                self.seek(self.record + self._stride, 0)
                continue
            count = self._take(self._seq_len - filled)
            if count == 0:
                break
            for target, source in zip(row, pairs, strict=True):
                target[filled : filled + count] = source[self.offset : self.offset + count]
            filled += count
            self.offset += count
        # A document that was cut continues as a new segment, because attention cannot see the previous row.
        row.starts[:1] = True
        index = np.arange(self._seq_len)
        inside = index < filled
        return {
            "tokens": row.tokens,
            "targets": row.targets,
            "weights": row.weights,
            "segment_ids": np.where(inside, np.cumsum(row.starts), 0).astype(np.int32),
            "positions": np.where(inside, index - np.maximum.accumulate(index * row.starts), 0).astype(np.int32),
        }

    def _take(self, space: int) -> int:
        """Returns the number of pairs to put into the `space` left in the row; 0 to end the row here."""
        assert self._pairs is not None
        left = len(self._pairs.tokens) - self.offset
        if not self._whole:
            return min(space, left)
        later_starts = np.flatnonzero(self._pairs.starts[self.offset + 1 :])
        document = int(later_starts[0]) + 1 if len(later_starts) else left
        if document <= space:
            return document
        return 0 if space < self._seq_len else space


class PairRow(Row):
    """A row of pairs, padded to equal lengths; its records are lists of one pair or none. `offset` is always 0.

    A batch of R such rows holds what one of `PackedRow` holds (a row has at most one segment) and, for S = `input_len`:
      inputs Int32[R, S], inputs_valid Bool[R, S] (false: padding),
      cut Int32[R, 2]: whether input and target were cut.

    No input is longer than S, and no target than T = `seq_len`.
    """

    def __init__(self, records: grain.MapDataset, number: int, stride: int, *, input_len: int, seq_len: int):
        super().__init__(records, number, stride)
        self._lengths = {"input_len": input_len, "seq_len": seq_len}

    def fill(self) -> Batch:
        found: Any = []
        while not found and self.record < len(self._records):
            found = self._records[self.record]
            self.record += self._stride
        return {name: array[0] for name, array in stack_pairs(found, 1, **self._lengths).items()}


def stack_pairs(pairs: Sequence[Pair], rows: int, *, input_len: int | None, seq_len: int) -> Batch:
    """Returns pairs, at most one for every row, as a batch with the arrays of `PairRow`; further rows are padding.

    Without `input_len`, the model has no encoder, and the batch no inputs.
    """
    counted = ("tokens", "targets", "segment_ids", "positions")
    batch: Batch = {name: np.zeros((rows, seq_len), np.int32) for name in counted}
    batch["weights"] = np.zeros((rows, seq_len), np.float32)
    for row, pair in enumerate(pairs):
        count = len(pair.tokens)
        for name in ("tokens", "targets", "weights"):
            batch[name][row, :count] = getattr(pair, name)
        batch["segment_ids"][row, :count] = 1
        batch["positions"][row, :count] = np.arange(count)
    if input_len is None:
        return batch
    batch["inputs"] = np.zeros((rows, input_len), np.int32)
    batch["inputs_valid"] = np.zeros((rows, input_len), bool)
    batch["cut"] = np.zeros((rows, 2), np.int32)
    for row, pair in enumerate(pairs):
        assert pair.inputs is not None
        batch["inputs"][row, : len(pair.inputs)] = pair.inputs
        batch["inputs_valid"][row, : len(pair.inputs)] = True
        batch["cut"][row] = pair.input_was_cut, pair.target_was_cut
    return batch


# Number of pairs of every source that are read before training, to count those that are too long.
_PAIRS_LOOKED_AT = 1000


def open_data(
    section: DataSection,
    config: ModelConfig,
    tokenizer_path: Path,
    *,
    seed: int,
    batch_size: int,
    rows: Sequence[int],
    note: Callable[[str], object] = lambda line: None,
) -> grain.DatasetIterator:
    """Opens the files of a recipe as an iterator over batches: of `PackedRow`, or of `PairRow` for an encoder.

    The iterator's `get_state()` is JSON-able and `set_state()` continues with the very next batch.

    Args:
      config: of the model trained.
      seed: decides the order of the records.
      batch_size: B, rows of the global batch.
      rows: rows of it that this process prepares.
      note: called with remarks on the data, a line each.

    Raises:
      FileNotFoundError: a path or pattern that matches no file.
      InputError: no sources, a malformed file, less text than one sequence, or texts for a model with an encoder.
    """
    sources = open_sources(section, config, batch_size, tokenizer_path)
    sizes = [source.size for source in sources]
    tokenizer = Tokenizer(tokenizer_path, config, bos=section.bos, eos=section.eos)
    records = _ordered(section, sources, sizes, seed)
    if config.has_encoder:
        lengths = {"input_len": input_length(section), "seq_len": section.seq_len}

        def make_pairs(examples: list[Example]) -> list[Pair]:
            return [tokenizer.pair(example, **lengths) for example in examples]

        cuts = _describe_cuts(section, sources, make_pairs)
        if cuts is not None:
            note(cuts)
        make = partial(PairRow, records.map(make_pairs), stride=batch_size, **lengths)
    else:
        for source, found in zip(section.sources, sources, strict=True):
            _check_length(source, found, tokenizer, section.seq_len)

        def tokenise(examples: list) -> Pairs:
            return tokenizer.pairs(examples)

        packing = {"seq_len": section.seq_len, "whole": section.packing == "whole"}
        make = partial(PackedRow, records.map(tokenise), stride=batch_size, **packing)
    dataset: grain.IterDataset = RowBatches(
        lambda: [make(row) for row in rows],
        identity={"records": sum(map(len, sources)), "bytes": sum(sizes)},
        at_once=max(as_path(source.path).at_once for source in section.sources),
    )
    if section.prefetch:
        dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=section.prefetch)
    return iter(dataset)


def _describe_cuts(
    section: DataSection, sources: Sequence[Files], make_pairs: Callable[[Any], list[Pair]]
) -> str | None:
    """Returns a sentence on how many of the first pairs of every source are too long; None if none is."""
    pairs = []
    for settings, source in zip(section.sources, sources, strict=True):
        first = (pair for index in range(len(source)) for pair in make_pairs(source[index]))
        found = list(itertools.islice(first, _PAIRS_LOOKED_AT))
        if not found:
            raise InputError(f"{settings.path} holds no pairs")
        pairs += found
    inputs, targets = sum(pair.input_was_cut for pair in pairs), sum(pair.target_was_cut for pair in pairs)
    if not inputs and not targets:
        return None
    return (
        f"of the first {len(pairs):,} pairs, {inputs:,} inputs are longer than data.input_len = "
        f"{input_length(section)} and {targets:,} targets than data.seq_len = {section.seq_len}: their ends are left "
        "out (metrics.jsonl: cut_inputs, cut_targets)"
    )


def _ordered(section: DataSection, sources: Sequence[Files], sizes: Sequence[int], seed: int) -> grain.MapDataset:
    datasets = [grain.MapDataset.source(source) for source in sources]
    weights = [source.weight for source in section.sources if source.weight is not None]
    if len(weights) < len(section.sources):
        merged = grain.MapDataset.concatenate(datasets)
        return (merged.shuffle(seed) if section.shuffle else merged).repeat(section.epochs)
    if section.shuffle:
        datasets = [dataset.shuffle(seed) for dataset in datasets]
    # Records of different sources differ in length; weights are shares of text, not of records.
    records_per_byte = [len(source) / max(size, 1) for source, size in zip(sources, sizes, strict=True)]
    return grain.MapDataset.mix(
        [dataset.repeat(section.epochs) for dataset in datasets],
        weights=[weight * density for weight, density in zip(weights, records_per_byte, strict=True)],
    )


def _check_length(source: SourceSection, records: Files, tokenizer: Tokenizer, seq_len: int) -> None:
    """Raises `InputError` unless there is text for one sequence; reads no more than necessary to decide."""
    count = documents = 0
    for index in range(len(records)):
        pairs = tokenizer.pairs(records[index])
        count += len(pairs.tokens)
        documents += int(pairs.starts.sum())
        if count >= seq_len:
            return
    if not documents:
        raise InputError(f"{source.path} holds no text")
    raise InputError(
        f"{source.path} is too short: {count + documents} tokens in {documents} documents do not fill one sequence of "
        f"data.seq_len = {seq_len} (and the token after it); give more text or a smaller data.seq_len"
    )
