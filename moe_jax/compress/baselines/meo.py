"""`meo`: merging as in "Merging Experts into One" (He et al., 2023, arXiv 2310.09832; METHODS 5)."""

import dataclasses

import numpy as np
from jaxtyping import Float

from moe_jax.compress.baselines.grouping import Groups
from moe_jax.compress.baselines.merging import Aligned, Merging
from moe_jax.compress.baselines.without_centre import unaligned
from moe_jax.compress.calibration import RouterStatistics
from moe_jax.compress.method import Tick
from moe_jax.compress.source_layer import SourceLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MEO(Merging):
    """Experts are weighted by their router's scores; neurons stay where they are.

    MEO merges the chosen experts anew for every token, by its own scores. What can be stored is the mean: experts of a
    group are weighted by their mean probability on the text.
    """

    def align(self, layer: SourceLayer, groups: Groups, tick: Tick) -> Aligned:
        """See `Merging`."""
        return Aligned(unaligned(layer)[: layer.moe.routed_experts])

    def weights(self, statistics: RouterStatistics) -> Float[np.ndarray, " E"]:
        """See `Merging`."""
        return statistics.score
