"""Ways to store a layer whose experts are in two parts, of other bits each: the knapsack then chooses among layers."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from moe_jax.compression.allocation.knapsack import Candidate

MOST_SIZES = 16
"""Sizes of the second part that are tried for two choices."""


class Alike(NamedTuple):
    """Experts that all have one choice.

    Attributes:
      nbytes: of the layer, all experts being stored so.
      own: of these, bytes of one expert.
      more: bytes that a layer takes more if it has such a part beside another, for what the disk knows of leaves.
      errors: of every expert, float64[E]; those of experts are added up.
      choice: see `Candidate`.
    """

    nbytes: int
    own: int
    more: int
    errors: Float[np.ndarray, " E"]
    choice: tuple


class InParts(NamedTuple):
    """The choice of a layer in two parts.

    Attributes:
      parts: choices.
      part_of: of every expert, the part that it is in.
    """

    parts: tuple[tuple, tuple]
    part_of: tuple[int, ...]


def in_two_parts(some: Sequence[Alike], *, multiple: int = 1) -> list[Candidate]:
    """Every two of some choices, and of all ways to divide the experts into so many each, the one of least error.

    Experts of a part take the same room, so that those belong into the larger codes whose error falls most.

    Args:
      some: choices around the same centre, or all without one.
      multiple: the number of experts in every part is a multiple of it.
    """
    found = []
    for few, many in itertools.permutations(some, 2):
        if many.own <= few.own:
            continue
        order = np.argsort(few.errors - many.errors, kind="stable")[::-1]
        gained = np.cumsum((few.errors - many.errors)[order])
        experts = len(order)
        sizes = [n for n in range(multiple, experts, multiple) if (experts - n) % multiple == 0]
        for size in sizes[:: -(-len(sizes) // MOST_SIZES) or 1]:
            if gained[size - 1] <= 0:
                continue
            part_of = np.zeros(experts, int)
            part_of[order[:size]] = 1
            nbytes = few.nbytes + size * (many.own - few.own) + many.more
            error = float(few.errors.sum() - gained[size - 1])
            found.append(Candidate(nbytes, error, InParts((few.choice, many.choice), tuple(part_of.tolist()))))
    return found


def without_worse(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates that no other one equals or beats in both bytes and error."""
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.nbytes, c.error)):
        if not best or candidate.error < best[-1].error:
            best.append(candidate)
    return best
