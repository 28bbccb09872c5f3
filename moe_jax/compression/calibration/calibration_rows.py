"""Rows of tokens that a model is run on: windows of a text, or documents, some of them with pictures."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

Pixels = Callable[[], UInt8[np.ndarray, "m H W 3"]]
"""Returns the m pictures of a row."""


class ScoredRow(Protocol):
    """A document as the model's inputs, as `moe_jax.data.tokenizer.Pair` is."""

    @property
    def tokens(self) -> Int[np.ndarray, " n"]: ...
    @property
    def targets(self) -> Int[np.ndarray, " n"]: ...
    @property
    def weights(self) -> Float[np.ndarray, " n"]: ...
    @property
    def slots(self) -> Int[np.ndarray, " n"] | None: ...
    @property
    def pictures(self) -> int: ...
    @property
    def pixels(self) -> Pixels | None: ...


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CalibrationRows:
    """N rows of L tokens each; shorter ones end with padding, which counts nowhere.

    Attributes:
      tokens: Int32[N, L].
      targets: Int32[N, L], the next tokens.
      weights: Float32[N, L], 0 for targets that are not part of the loss.
      valid: Bool[N, L], false: padding.
      slots: Int32[N, L], which feature of the row's pictures stands at a token, counted from 1; 0: none.
      pictures: number of pictures of every row.
      pixels: for every row with pictures, in turn, what returns theirs.
      sources: names of the sources that the rows come from, in turn, with the number of rows of each.
    """

    tokens: Int[np.ndarray, "N L"]
    targets: Int[np.ndarray, "N L"]
    weights: Float[np.ndarray, "N L"]
    valid: Bool[np.ndarray, "N L"]
    slots: Int[np.ndarray, "N L"]
    pictures: tuple[int, ...]
    pixels: tuple[Pixels, ...] = ()
    sources: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of_windows(cls, windows: Int[np.ndarray, "N L"]) -> "CalibrationRows":
        """Windows of a text, of which all tokens but the first of each are in the loss."""
        weights = np.ones(windows.shape, np.float32)
        weights[:, -1] = 0
        return cls(
            tokens=windows,
            targets=np.roll(windows, -1, axis=1),
            weights=weights,
            valid=np.ones(windows.shape, bool),
            slots=np.zeros(windows.shape, np.int32),
            pictures=(0,) * len(windows),
        )

    @classmethod
    def of_documents(cls, documents: Sequence[ScoredRow]) -> "CalibrationRows":
        """Documents, a row for each, as long as the longest."""
        shape = (len(documents), max(len(one.tokens) for one in documents))
        tokens, targets, slots = (np.zeros(shape, np.int32) for _ in range(3))
        weights, valid = np.zeros(shape, np.float32), np.zeros(shape, bool)
        for row, one in enumerate(documents):
            count = len(one.tokens)
            tokens[row, :count], targets[row, :count], weights[row, :count] = one.tokens, one.targets, one.weights
            valid[row, :count] = True
            if one.slots is not None:
                slots[row, :count] = one.slots
        pixels = tuple(one.pixels for one in documents if one.pixels is not None)
        return cls(
            tokens=tokens,
            targets=targets,
            weights=weights,
            valid=valid,
            slots=slots,
            pictures=tuple(one.pictures for one in documents),
            pixels=pixels,
        )

    @classmethod
    def joined(cls, parts: Mapping[str, "CalibrationRows"]) -> "CalibrationRows":
        """The rows of several sources, by their names, one after another; as long as the longest."""
        length = max(part.length for part in parts.values())

        def padded(name: str) -> np.ndarray:
            arrays = (getattr(part, name) for part in parts.values())
            return np.concatenate([np.pad(array, ((0, 0), (0, length - array.shape[1]))) for array in arrays])

        every = parts.values()
        return cls(
            **{name: padded(name) for name in ("tokens", "targets", "weights", "valid", "slots")},
            pictures=tuple(itertools.chain.from_iterable(part.pictures for part in every)),
            pixels=tuple(itertools.chain.from_iterable(part.pixels for part in every)),
            sources=tuple((name, len(part)) for name, part in parts.items()),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """L, the tokens of a row."""
        return self.tokens.shape[1]

    @property
    def count(self) -> int:
        """Number of tokens without padding."""
        return int(self.valid.sum())

    @property
    def tokens_by_source(self) -> dict[str, int]:
        """Number of tokens without padding of each of the sources, in the order of the rows."""
        found, begin = {}, 0
        for name, count in self.sources:
            found[name] = int(self.valid[begin : begin + count].sum())
            begin += count
        return found

    @property
    def num_pictures(self) -> int:
        """Number of pictures of all rows."""
        return sum(self.pictures)

    @property
    def predicting(self) -> Bool[np.ndarray, "N L"]:
        """The tokens whose predictions count: all but padding and features of pictures."""
        return self.valid & (self.slots == 0)

    def first(self, count: int) -> "CalibrationRows":
        """Returns the first rows."""
        names = ("tokens", "targets", "weights", "valid", "slots", "pictures")
        seen = sum(pictures > 0 for pictures in self.pictures[:count])
        cut = {name: getattr(self, name)[:count] for name in names}
        return dataclasses.replace(self, **cut, pixels=self.pixels[:seen], sources=())

    def at(self, rows: Int[np.ndarray, " n"]) -> "CalibrationRows":
        """Returns some rows, of those without pictures."""
        assert not self.num_pictures
        names = ("tokens", "targets", "weights", "valid", "slots")
        return CalibrationRows(**{name: getattr(self, name)[rows] for name in names}, pictures=(0,) * len(rows))

    def each_picture(self) -> Iterator[UInt8[np.ndarray, "H W 3"]]:
        """Yields the pictures of all rows; those of one row are in memory at a time."""
        return itertools.chain.from_iterable(pixels() for pixels in self.pixels)

    def digest(self) -> str:
        """Returns a SHA-256 of all of it. Of plain windows, it is that of their tokens."""
        found = hashlib.sha256(np.ascontiguousarray(self.tokens).tobytes())
        if self.num_pictures or not self.valid.all() or not self.weights[:, :-1].all() or self.weights[:, -1].any():
            for array in (self.targets, self.weights, self.valid, self.slots, np.asarray(self.pictures)):
                found.update(np.ascontiguousarray(array).tobytes())
            for picture in self.each_picture():
                found.update(picture.tobytes())
        return found.hexdigest()


def as_rows(given: Int[np.ndarray, "N L"] | CalibrationRows) -> CalibrationRows:
    """Returns rows; an array is windows of a text."""
    return given if isinstance(given, CalibrationRows) else CalibrationRows.of_windows(given)
