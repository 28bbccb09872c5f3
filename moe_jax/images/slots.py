"""Places of pictures in texts: as many tokens as a picture has features, and which feature stands at which token."""

from collections.abc import Sequence
from typing import NamedTuple

from moe_jax.core.errors import InputError


class PlacedRow(NamedTuple):
    """A row of tokens with pictures in it.

    Attributes:
      ids: token ids, with a placeholder for every feature of a picture.
      slots: for every token, which feature of the row's pictures takes its place, counted from 1; 0: none.
      pictures: number of pictures of the row.
    """

    ids: list[int]
    slots: list[int]
    pictures: int


def place_pictures(
    rows: Sequence[Sequence[int]], pictures: int, *, placeholder: int, per_picture: int
) -> list[PlacedRow]:
    """Makes room for pictures in rows of tokens, which take them in the order of their placeholders.

        >>> from moe_jax.images.slots import place_pictures
        >>> place_pictures([[5, 99, 6], [7]], 1, placeholder=99, per_picture=2)[0]
        PlacedRow(ids=[5, 99, 99, 6], slots=[0, 1, 2, 0], pictures=1)

    Args:
      rows: token ids, with one placeholder for each picture, or in all rows one for each of its features.
      pictures: number of pictures of all rows together.
      placeholder: the id that stands for a picture; where it is no token's, -1, token 0 takes its places.
      per_picture: features of a picture.

    Raises:
      InputError: if placeholders and pictures differ in number.
    """
    counts = [sum(token == placeholder for token in row) for row in rows]
    given = sum(counts)
    if given == pictures:
        rows = [
            [one for token in row for one in [token] * (per_picture if token == placeholder else 1)] for row in rows
        ]
    elif given == pictures * per_picture and not any(count % per_picture for count in counts):
        counts = [count // per_picture for count in counts]
    else:
        raise InputError(
            f"pictures: {pictures}, and placeholders for them in the text: {given}; expected an <image> for each, or "
            "the token that the model has for it"
        )
    return [
        PlacedRow([max(token, 0) for token in row], _slots(row, placeholder), count)
        for row, count in zip(rows, counts, strict=True)
    ]


def _slots(row: Sequence[int], placeholder: int) -> list[int]:
    slots, last = [], 0
    for token in row:
        last += token == placeholder
        slots.append(last if token == placeholder else 0)
    return slots
