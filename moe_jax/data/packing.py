"""Rows of batches: documents one after another in a row (packed), or a pair in each."""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from moe_jax.core.bad_documents import BadDocument
from moe_jax.core.errors import InputError
from moe_jax.data.pictures.picture_loading import LoadedPicture
from moe_jax.data.tokenizer import Document, Pair, Pairs

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


class SeenPairs(NamedTuple):
    """A record as pairs of tokens, and the pictures that its slots count."""

    pairs: Pairs
    pictures: Sequence[LoadedPicture] = ()


class PictureRoom(NamedTuple):
    """Room for pictures in every row of a batch.

    Attributes:
      count: M, pictures in a row at most.
      size: height and width of their pixels.
      per_picture: tokens that a picture takes.
      features: n and w, number and width of a picture's features, where known features are given; None: none are.
      dtype: of the features.
    """

    count: int
    size: tuple[int, int]
    per_picture: int
    features: tuple[int, int] | None = None
    dtype: np.dtype = np.dtype(np.float32)

    def arrays(self, pictures: Sequence[LoadedPicture]) -> Batch:
        """Returns the arrays of a row's pictures, and zeros where there are none.

        These are pixels UInt8[M, H, W, 3]; where features are kept also features [M, n, w], known Bool[M] (a picture
        whose features are there, or no picture), and digests UInt8[M, 32].
        """
        made: Batch = {"pixels": np.zeros((self.count, *self.size, 3), np.uint8)}
        if self.features is not None:
            made["features"] = np.zeros((self.count, *self.features), self.dtype)
            made["known"] = np.ones(self.count, bool)
            made["digests"] = np.zeros((self.count, 32), np.uint8)
        for index, picture in enumerate(pictures):
            if picture.pixels is not None:
                made["pixels"][index] = picture.pixels
            if self.features is not None:
                made["digests"][index] = picture.digest
                made["known"][index] = picture.features is not None
                if picture.features is not None:
                    made["features"][index] = picture.features
        return made


class PackedRow(Row):
    """A row of packed sequences of T = `seq_len` tokens. Its records are `SeenPairs`.

    A batch of R such rows holds:
      tokens Int32[R, T], targets Int32[R, T], weights Float32[R, T] (0: not scored),
      segment_ids Int32[R, T] (documents of a row count from 1; 0 is padding), positions Int32[R, T] (from 0 in every
      segment),
    and where there is `room` for pictures:
      slots Int32[R, T] (which feature of the row's pictures stands at a token, from 1; 0: none), and what
      `PictureRoom.arrays` returns.

    `whole`: a new sequence is started rather than a document cut that fits into one. One with pictures is never cut.
    """

    def __init__(
        self,
        records: grain.MapDataset,
        number: int,
        stride: int,
        *,
        seq_len: int,
        whole: bool,
        room: PictureRoom | None = None,
    ):
        self._seq_len, self._whole, self._room = seq_len, whole, room
        super().__init__(records, number, stride)

    def seek(self, record: int, offset: int) -> None:
        super().seek(record, offset)
        self._seen: SeenPairs | None = None

    def fill(self) -> Batch:
        kinds = (np.int32, np.int32, np.float32, bool, np.int32)
        row = Pairs(*(np.zeros(self._seq_len, dtype) for dtype in kinds))
        pictures: list[LoadedPicture] = []
        filled = 0
        while filled < self._seq_len and self.record < len(self._records):
            seen: Any = self._records[self.record] if self._seen is None else self._seen
            self._seen = seen
            if self.offset == len(seen.pairs.tokens):
                self.seek(self.record + self._stride, 0)
                continue
            count = self._take(seen, self._seq_len - filled, len(pictures))
            if count == 0:
                break
            part = slice(filled, filled + count)
            for target, source in zip(row, seen.pairs, strict=True):
                target[part] = source[self.offset : self.offset + count]
            if self._room is not None:
                slots = row.slots[part]
                slots[slots > 0] += len(pictures) * self._room.per_picture
            pictures += seen.pictures
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
            **({} if self._room is None else {"slots": row.slots, **self._room.arrays(pictures)}),
        }

    def _take(self, seen: SeenPairs, space: int, pictures: int) -> int:
        """Returns the number of pairs to put into the `space` left in the row; 0 to end the row here."""
        left = len(seen.pairs.tokens) - self.offset
        if seen.pictures:
            assert self._room is not None and self.offset == 0, "one with pictures is taken as a whole"
            fits = left <= space and pictures + len(seen.pictures) <= self._room.count
            return left if fits else 0
        if not self._whole:
            return min(space, left)
        later_starts = np.flatnonzero(seen.pairs.starts[self.offset + 1 :])
        document = int(later_starts[0]) + 1 if len(later_starts) else left
        if document <= space:
            return document
        # One that no row holds is cut anyway, and begins where the row is.
        return space if document > self._seq_len else 0


def check_room(count: int, per_picture: int, seq_len: int) -> None:
    """Raises `InputError` for more pictures in a row than can stand in it: there would be memory for each of them."""
    if count * per_picture > seq_len:
        raise InputError(
            f"{count:,} pictures in a row (data.max_pictures): one takes {per_picture:,} tokens, so that "
            f"{seq_len // per_picture:,} go into data.seq_len = {seq_len:,}"
        )


def fitted(document: Document, room: PictureRoom | None, seq_len: int) -> Document:
    """Returns a document with pictures that fits into a row: the end of a longer one is left out. Others stay.

    Raises:
      BadDocument: with the place of its row, for more pictures than there is room for, or fewer tokens than the
        pictures take.
    """
    count = len(document.pictures)
    if not count:
        return document
    where = document.pictures[0].where
    if room is None:
        raise BadDocument(f"{where}: a picture, where the first examples had none; set data.max_pictures")
    if count > room.count:
        raise BadDocument(f"{where}: {count} pictures, data.max_pictures = {room.count} are the most in a row")
    if len(document.ids) <= seq_len + 1:
        return document
    assert document.slots is not None
    if document.slots[: seq_len + 1].max() < count * room.per_picture:
        tokens = f"{count} pictures of {room.per_picture} tokens each"
        raise BadDocument(f"{where}: {tokens} and its text do not fit into data.seq_len = {seq_len}")
    ids, scored, slots = (array[: seq_len + 1] for array in (document.ids, document.scored, document.slots))
    return Document(ids, scored, slots, document.pictures)


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

    Without `input_len`, the model has no encoder, and the batch no inputs. Pairs with pictures all have equally many,
    and their batch has slots and pixels, too.
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
    if pairs and pairs[0].pictures:
        batch["slots"] = np.zeros((rows, seq_len), np.int32)
        pixels = []
        for row, pair in enumerate(pairs):
            assert pair.slots is not None and pair.pixels is not None
            batch["slots"][row, : len(pair.slots)] = pair.slots
            pixels.append(pair.pixels())
        batch["pixels"] = np.stack([*pixels, *[np.zeros_like(pixels[0])] * (rows - len(pairs))])
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
