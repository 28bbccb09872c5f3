"""The batches of a recovery: rows of a text in an order that a seed decides, and the rows that are held out."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grain
import numpy as np

from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.core.errors import InputError

Arrays = dict[str, np.ndarray]

HELD_OUT = 16
"""Rows that are held out, if that is at most one in `_ONE_IN`."""
_ONE_IN = 8
FEWEST = 4
"""Rows that a text has to have."""


class DividedRows(NamedTuple):
    """The rows of a text: those that are learnt from, and those that are held out."""

    tuned: CalibrationRows
    held_out: CalibrationRows


def divide_rows(rows: CalibrationRows, *, seed: int) -> DividedRows:
    """Draws the rows that are held out: 16, or of fewer than 128 one in eight, but at least one.

    Raises:
      InputError: for fewer than 4 rows, rows with pictures, or if nothing of either part is scored.
    """
    if rows.num_pictures:
        raise InputError("--recover learns from texts, and rows of this file have pictures; leave it out")
    if len(rows) < FEWEST:
        raise InputError(
            f"--recover: the text has {len(rows)} rows of {rows.length} tokens, and {FEWEST} are the fewest, of which "
            "one is held out; give a longer text, or a smaller --seq-len"
        )
    count = min(HELD_OUT, max(1, len(rows) // _ONE_IN))
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(rows))
    held_out, tuned = (np.sort(some) for some in (order[:count], order[count:]))
    divided = DividedRows(rows.at(tuned), rows.at(held_out))
    if not all(part.weights.any() for part in divided):
        raise InputError("--recover: no token of the text is scored: there is nothing to learn from; give another")
    return divided


class TextBatches:
    """Batches of rows, without an end: `batches[step]` are those of a step, whatever was read before.

    Every pass over the rows has an order of its own, which the seed decides.
    """

    def __init__(self, rows: CalibrationRows, *, batch_size: int, seed: int):
        records = grain.MapDataset.source([_arrays(rows, slice(row, row + 1)) for row in range(len(rows))])
        self._batches = records.shuffle(seed).repeat().batch(batch_size, batch_fn=_joined)

    def __getitem__(self, step: int) -> Arrays:
        """Returns the arrays of a batch, as `nn.inputs.Batch` says."""
        found = self._batches[step]
        assert isinstance(found, dict)
        return found


def batches_once(rows: CalibrationRows, batch_size: int) -> Iterator[Arrays]:
    """Yields all rows once, in order; the last batch is filled up with rows of which nothing is scored."""
    for start in range(0, len(rows), batch_size):
        found = _arrays(rows, slice(start, start + batch_size))
        missing = batch_size - len(found["tokens"])
        yield {name: np.pad(array, ((0, missing), (0, 0))) for name, array in found.items()}


def _arrays(rows: CalibrationRows, some: slice) -> Arrays:
    valid = rows.valid[some]
    return {
        "tokens": rows.tokens[some],
        "targets": rows.targets[some],
        "weights": rows.weights[some],
        "segment_ids": valid.astype(np.int32),
        "positions": np.broadcast_to(np.arange(rows.length, dtype=np.int32), valid.shape),
    }


def _joined(parts: Sequence[Arrays]) -> Arrays:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
