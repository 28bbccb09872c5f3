"""One candidate per layer, chosen so that all together stay within a budget and their errors add up to little.

A multiple-choice knapsack. Its linear relaxation is solved by walking down the lower convex hulls of (bytes, error) of
all layers, always along the steepest (Sinha and Zoltners, "The multiple-choice knapsack problem", 1979): the Lagrangian
solution for the budgets at which a walk ends on a vertex. Between those, steps that no longer fit are skipped and the
walk goes on with the others.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moe_jax.core.errors import InputError


class Candidate(NamedTuple):
    """One way to compress a layer.

    Attributes:
      nbytes: size of the layer, compressed in this way.
      error: of the layer, compressed in this way; errors of layers are added up.
      choice: whatever the caller needs to recognise it.
    """

    nbytes: int
    error: float
    choice: Any = None


def allocate(candidates: Mapping[int, Sequence[Candidate]], budget_bytes: int) -> dict[int, Candidate]:
    """Chooses one candidate per layer.

    The sum of errors exceeds the least possible one by at most the gain of the first step that did not fit, which is
    next to nothing for many layers. A larger budget never gives a larger sum.

    Args:
      candidates: by layer, in any order.
      budget_bytes: for all layers together.

    Returns:
      By layer, in the order of `candidates`; their bytes are at most the budget.

    Raises:
      InputError: if even the smallest candidates of all layers are too large.
    """
    chosen = {layer: min(some, key=lambda c: (c.nbytes, c.error)) for layer, some in candidates.items()}
    left = budget_bytes - sum(candidate.nbytes for candidate in chosen.values())
    if left < 0:
        raise InputError(
            f"a budget of {budget_bytes:,} bytes is too small for the experts of {len(chosen)} layers: "
            f"they take at least {budget_bytes - left:,} bytes"
        )
    better = {layer: list(some) for layer, some in candidates.items()}
    steps: list[tuple[float, int, Candidate]] = []

    def push_steepest(layer: int) -> None:
        """The step to the next vertex of the hull, among what is better than the present choice and fits."""
        now = chosen[layer]
        better[layer] = [c for c in better[layer] if c.error < now.error and 0 < c.nbytes - now.nbytes <= left]
        if better[layer]:
            slopes = [(now.error - c.error) / (c.nbytes - now.nbytes) for c in better[layer]]
            steepest = max(slopes)
            heapq.heappush(steps, (-steepest, layer, better[layer][slopes.index(steepest)]))

    for layer in candidates:
        push_steepest(layer)
    while steps:
        _, layer, to = heapq.heappop(steps)
        cost = to.nbytes - chosen[layer].nbytes
        if cost <= left:
            chosen[layer] = to
            left -= cost
        push_steepest(layer)
    return chosen
