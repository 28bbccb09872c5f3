"""Packs documents into sequences of equal length; an iterator whose position is a few integers.

Row r of the global batch reads the records r, r + B, r + 2B, ... in turn. The content of a row therefore does not
depend on the number of processes, each process prepares only its own rows, and the position is one (record, offset) per
row.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grain
import numpy as np

from moe_jax.core.errors import InputError
from moe_jax.data.tokens.tokenizer import Pairs

Batch = dict[str, np.ndarray]


class PackedBatches(grain.IterDataset):
    """An endless iterator over batches of packed sequences; after the last record, everything is padding.

    Every batch holds, for the R rows of this process and T = `seq_len`:
      tokens Int32[R, T], targets Int32[R, T], weights Float32[R, T] (0: not scored),
      segment_ids Int32[R, T] (documents of a row count from 1; 0 is padding), positions Int32[R, T] (from 0 in every
      segment).

    Args:
      records: the records in training order, each as `Pairs`.
      rows: the rows of the global batch that this process prepares.
      num_rows: B, rows of the global batch.
      seq_len: T.
      whole: start a new sequence rather than cut a document that fits into one.
      identity: identifies the data; a position that belongs to other data is refused.
      at_once: number of rows that are filled at the same time, if records have to be waited for.
    """

    def __init__(
        self,
        records: grain.MapDataset,
        *,
        rows: Sequence[int],
        num_rows: int,
        seq_len: int,
        whole: bool = False,
        identity: Mapping[str, int] | None = None,
        at_once: int = 1,
    ):
        super().__init__()
        self._make = lambda: RowsIterator(
            [_Row(records, row, num_rows, seq_len, whole) for row in rows], dict(identity or {}), at_once
        )

    def __iter__(self) -> grain.DatasetIterator:
        return self._make()


class Row(Protocol):
    """One row of the batch, and its position in the records."""

    number: int
    record: int
    offset: int

    def seek(self, record: int, offset: int) -> None: ...

    def fill(self) -> Batch: ...


class RowsIterator(grain.DatasetIterator):
    """An iterator over batches whose rows are filled one by one; its position consists of the positions of the rows.

    Args:
      rows: of this process.
      identity, at_once: see `PackedBatches`.
    """

    def __init__(self, rows: Sequence[Row], identity: dict[str, int], at_once: int = 1):
        super().__init__()
        self._rows = rows
        self._identity = identity
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


class _Row:
    """One row of the batch, and its position in the records."""

    def __init__(self, records: grain.MapDataset, number: int, stride: int, seq_len: int, whole: bool):
        self.number = number
        self.record = number
        self.offset = 0
        self._records = records
        self._stride = stride
        self._seq_len = seq_len
        self._whole = whole
        self._pairs: Pairs | None = None

    def seek(self, record: int, offset: int) -> None:
        """Moves to a position: a record, and an offset in its pairs."""
        self.record, self.offset, self._pairs = record, offset, None

    def fill(self) -> Batch:
        """Returns the next sequence; every array has length `seq_len`."""
        row = Pairs(
            np.zeros(self._seq_len, np.int32),
            np.zeros(self._seq_len, np.int32),
            np.zeros(self._seq_len, np.float32),
            np.zeros(self._seq_len, bool),
        )
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
        row.starts[:1] = filled > 0
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
