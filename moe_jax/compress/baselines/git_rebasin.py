"""`git-rebasin`: weight matching of many models (Ainsworth et al., 2023, arXiv 2209.04836, algorithm 3; METHODS 5)."""

import dataclasses

import numpy as np
from jaxtyping import Float

from moe_jax.compress.baselines.grouping import Groups
from moe_jax.compress.baselines.merging import Aligned, Merging
from moe_jax.compress.baselines.without_centre import unaligned
from moe_jax.compress.calibration import RouterStatistics
from moe_jax.compress.design import design_matrices
from moe_jax.compress.matching import Matching
from moe_jax.compress.method import Tick
from moe_jax.compress.source_layer import SourceLayer

MOST_ROUNDS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class GitReBasin(Merging):
    """Every expert is aligned to the mean of all others, again and again until no order changes; plain means per group.

    Algorithm 3 comes to the models in random order; here it is always that of the experts, so that results repeat.
    """

    def align(self, layer: SourceLayer, groups: Groups, tick: Tick) -> Aligned:
        """See `Merging`."""
        identity = unaligned(layer)[: layer.moe.routed_experts]
        if len(groups.dominant) == len(groups.of):
            return Aligned(identity)
        designs = design_matrices(layer)[: layer.moe.routed_experts]
        layer.forget()
        matching = Matching(designs, identity)

        def progress(round_: int, done: int, objective: float) -> None:
            # How many rounds there will be is not known: each takes half of what is left.
            tick(1 - 0.5 ** (round_ - 1 + done / len(designs)))

        matching.descend(MOST_ROUNDS, progress)
        figures = {
            "objective": matching.objective,
            "rounds": len(matching.objectives),
            "converged": matching.converged,
        }
        return Aligned(matching.permutations, figures)

    def weights(self, statistics: RouterStatistics) -> Float[np.ndarray, " E"]:
        """See `Merging`."""
        return np.ones(len(statistics.usage))
