"""`msmoe`: merging as M-SMoE does it (Li et al., 2024, "Merge, Then Compress", arXiv 2310.01334; METHODS 5)."""

import dataclasses

import numpy as np
from jaxtyping import Float

from moe_jax.compress.baselines.grouping import Groups
from moe_jax.compress.baselines.merging import Aligned, Merging
from moe_jax.compress.baselines.without_centre import unaligned
from moe_jax.compress.calibration import RouterStatistics
from moe_jax.compress.design import design_matrices
from moe_jax.compress.method import Tick
from moe_jax.compress.source_layer import SourceLayer
from moe_jax.compress.transport import align


@dataclasses.dataclass(frozen=True, kw_only=True)
class MSMoE(Merging):
    """Neurons are aligned to the dominant expert of the group by an exact assignment, experts weighted by usage.
    """

    def align(self, layer: SourceLayer, groups: Groups, tick: Tick) -> Aligned:
        """See `Merging`."""
        permutations = unaligned(layer)[: layer.moe.routed_experts]
        if len(groups.dominant) == len(groups.of):
            return Aligned(permutations)
        designs = design_matrices(layer)
        layer.forget()
        for expert, group in enumerate(groups.of):
            dominant = groups.dominant[group]
            if expert != dominant:
                permutations[expert] = align(designs[expert], designs[dominant])
            tick((expert + 1) / len(groups.of))
        return Aligned(permutations)

    def weights(self, statistics: RouterStatistics) -> Float[np.ndarray, " E"]:
        """See `Merging`."""
        return statistics.usage
