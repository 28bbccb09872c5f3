"""Batches of pairs, an input and its target, for models with an encoder: every pair has a row of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np

from moe_jax.data.sequence_packing import Batch, RowsIterator
from moe_jax.data.tokens.tokenizer import Pair


class PairBatches(grain.IterDataset):
    """An endless iterator over batches of pairs, padded to equal lengths; after the last pair, everything is padding.

    Every batch holds what a batch of `PackedBatches` holds (a row has at most one segment) and, for the R rows of this
    process and S = `input_len`:
      inputs Int32[R, S], inputs_valid Bool[R, S] (false: padding),
      cut Int32[R, 2]: whether input and target were cut.

    Rows, processes and positions are as in `sequence_packing`.

    Args:
      records: the records in training order, each a list of pairs, one or none.
      rows: the rows of the global batch that this process prepares.
      num_rows: B, rows of the global batch.
      input_len: S; no input is longer.
      seq_len: T; no target is longer.
      identity, at_once: see `PackedBatches`.
    """

    def __init__(
        self,
        records: grain.MapDataset,
        *,
        rows: Sequence[int],
        num_rows: int,
        input_len: int,
        seq_len: int,
        identity: Mapping[str, int] | None = None,
        at_once: int = 1,
    ):
        super().__init__()
        self._make = lambda: RowsIterator(
            [_PairRow(records, row, num_rows, input_len, seq_len) for row in rows], dict(identity or {}), at_once
        )

    def __iter__(self) -> grain.DatasetIterator:
        return self._make()


class _PairRow:
    """One row of the batch. `offset` is always 0: a pair is never divided between two rows."""

    def __init__(self, records: grain.MapDataset, number: int, stride: int, input_len: int, seq_len: int):
        self.number = self.record = number
        self.offset = 0
        self._records = records
        self._stride = stride
        self._lengths = input_len, seq_len

    def seek(self, record: int, offset: int) -> None:
        """Moves to a record; `offset` must be 0."""
        self.record, self.offset = record, offset

    def fill(self) -> Batch:
        """Returns the arrays of the next pair, padded; at the end of the data all padding."""
        found: Any = []
        while not found and self.record < len(self._records):
            found = self._records[self.record]
            self.record += self._stride
        input_len, seq_len = self._lengths
        batch = stack_pairs(found, 1, input_len=input_len, seq_len=seq_len)
        return {name: array[0] for name, array in batch.items()}


def stack_pairs(pairs: Sequence[Pair], rows: int, *, input_len: int | None, seq_len: int) -> Batch:
    """Returns pairs as a batch, as `PairBatches` describes it.

    Args:
      pairs: at most one for every row; further rows are padding.
      rows: R.
      input_len: S; None: the model has no encoder, and the batch no inputs.
      seq_len: T.
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
