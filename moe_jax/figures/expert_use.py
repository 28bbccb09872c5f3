"""The use of experts by tokens of pictures and of texts, in numbers."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

MOST_PICTURES = 4
"""Pictures of which it is kept which expert saw which patch."""


class SeenPatches(NamedTuple):
    """A picture as the model sees it, and by layer the expert that each of its tokens was given to first, -1: none."""

    pixels: UInt8[np.ndarray, "H W 3"]
    experts: dict[int, Int[np.ndarray, "rows columns"]]


class ExpertUse(NamedTuple):
    """Numbers of assignments.

    Attributes:
      of_pictures, of_text: by layer, the assignments of tokens of pictures, and of all others, to every expert.
      seen: the first pictures; empty if their tokens are no grid.
      tokens: number of tokens of pictures, and of others.
    """

    of_pictures: dict[int, Float[np.ndarray, " E"]]
    of_text: dict[int, Float[np.ndarray, " E"]]
    seen: list[SeenPatches]
    tokens: tuple[int, int]

    def shares(self) -> dict[int, Float[np.ndarray, " E"]]:
        """Returns, by layer, the share of all assignments that every expert has."""
        sums = {layer: self.of_pictures[layer] + self.of_text[layer] for layer in self.of_text}
        return {layer: both / max(both.sum(), 1) for layer, both in sums.items()}
