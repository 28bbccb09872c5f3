"""Options of methods that leave fewer experts, or fewer neurons of every expert."""

import dataclasses
from typing import ClassVar, Literal

from moe_jax.compression.options.in_common import SHARES, MethodOptions
from moe_jax.core.errors import InputError, check_member
from moe_jax.core.form_options import DESIGNS, check_keep

CRITERIA = ("reap", "frequency")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergingOptions(MethodOptions):
    """Groups of experts become one each.

    Attributes:
      keep: share of the experts that stays, in (0, 1]; their number is rounded, and at least 1.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.125, 0.25, 0.5, 0.75))

    keep: float

    def __post_init__(self) -> None:
        check_keep(self.keep)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MSMoEOptions(MergingOptions):
    """Neurons are aligned to the dominant expert of the group by an exact assignment, experts weighted by usage.

    M-SMoE (Li et al., 2024, "Merge, Then Compress", arXiv 2310.01334).
    """

    implementation: ClassVar[str] = "fewer_experts.MSMoE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MEOOptions(MergingOptions):
    """Experts are weighted by their router's scores; neurons stay where they are.

    "Merging Experts into One" (He et al., 2023, arXiv 2310.09832) merges the chosen experts anew for every token, by
    its own scores. What can be stored is the mean: experts of a group are weighted by their mean probability on the
    text.
    """

    implementation: ClassVar[str] = "fewer_experts.MEO"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GitReBasinOptions(MergingOptions):
    """Every expert is aligned to the mean of all others, again and again until no order changes; plain means per group.

    Weight matching of many models (Ainsworth et al., 2023, arXiv 2209.04836, algorithm 3). There the models are taken
    in random order; here always in the order of the experts, so that results repeat.
    """

    implementation: ClassVar[str] = "fewer_experts.GitReBasin"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HCSMoEOptions(MergingOptions):
    """Experts of similar mean outputs on --calibrate, clustered hierarchically and merged by usage; neurons stay.

    HC-SMoE (Chen et al., 2024, "Retraining-Free Merging of Sparse MoE via Hierarchical Clustering", arXiv 2410.08589):
    Euclidean distances and average linkage.
    """

    implementation: ClassVar[str] = "fewer_experts.HCSMoE"
    needs_calibration: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class REAPOptions(MethodOptions):
    """Whole experts removed, and their outputs of the router: those that add least on --calibrate.

    REAP (Lasby et al., 2025, arXiv 2510.13999). What stays is not changed by a bit, in whatever bank it is. An error is
    that of experts of which nothing is left.

    Attributes:
      keep: share of the experts that stays, in (0, 1]; not fewer than a token is routed to.
      criterion: `reap`: the norm of an expert's outputs times the router's weights, its mean over the tokens that are
        routed to it; `frequency`: the share of the tokens that are.
    """

    implementation: ClassVar[str] = "fewer_experts.REAP"
    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.5, 0.75))
    needs_calibration: ClassVar[bool] = True

    keep: float
    criterion: Literal["reap", "frequency"] = "reap"

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_member("criterion", self.criterion, CRITERIA)


@dataclasses.dataclass(frozen=True, kw_only=True)
class REAMOptions(MergingOptions):
    """As reap, but what would go is merged by saliency into the most similar expert that stays, neurons aligned.

    REAM (Jha et al., 2026, "Merging Improves Pruning of Experts in LLMs", arXiv 2604.04356): similar are the logits of
    the router and the outputs on --calibrate. The router has an output for every expert that stays.

    Attributes:
      keep: share of the experts that stays, in (0, 1]; not fewer than a token is routed to.
    """

    implementation: ClassVar[str] = "ream.REAM"
    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.5, 0.75))
    needs_calibration: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredPruningOptions(MethodOptions):
    """The neurons whose rows of the design matrix have the largest L1 norms; the experts become narrower.

    Pruned for each matrix, a neuron that one of them has dropped contributes nothing, for act(0) = 0: only neurons that
    all matrices keep are stored. An input bias is part of its matrix's row and goes with it; the output bias stays.
    Errors are those of what the method stands for, the matrices pruned each on its own.

    Attributes:
      keep: share of the neurons that stays, in (0, 1].
      design: `concat`: a neuron stays or goes as a whole; `separate`: every matrix drops its own.
    """

    implementation: ClassVar[str] = "narrower.StructuredPruning"
    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", SHARES)

    keep: float
    design: Literal["concat", "separate"] = "concat"

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_member("design", self.design, DESIGNS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPFusionOptions(MethodOptions):
    """The rows of the design matrix are clustered; a centroid stands for its cluster, and the experts become narrower.

    A cluster's centroid makes its row of gate and up; its row of down is the centroid's as often as the cluster has
    neurons. Clusters are found by Lloyd's algorithm from neurons drawn at random.

    Attributes:
      keep: number of clusters as a share of the neurons, in (0, 1].
      seed: of the neurons that clusters begin with.
    """

    implementation: ClassVar[str] = "narrower.MLPFusion"
    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", SHARES)

    keep: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_keep(self.keep)
        if self.seed < 0:
            raise InputError(f"seed={self.seed} must not be negative")
