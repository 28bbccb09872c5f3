"""`ream`: the experts that REAP would remove are merged into those that stay (Jha et al., 2026, arXiv 2604.04356).

*Kept* are the experts of the largest saliency of REAP. Each other one joins the kept one that is most like it: by the
mean of two cosines, of the logits that the router gives them on the text, and of their outputs, weighted by the router.
*Merged* are their kernels, the neurons of each in the order that is nearest to those of the kept one, with weights by
saliency. Their outputs of the router go, as with REAP; those that stay are not changed.

Where this may differ from the paper: outputs are compared on the tokens, at most `MOST_TOKENS`, that go to the expert
that is to be merged, by its own weights of the router, for there the other has to take its place; neurons are aligned
by their weights alone; and no layer sees the outputs of those before it that are already merged.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int

from moe_jax.compression.calibration.expert_statistics import expert_outputs, statistics_of
from moe_jax.compression.coding.storage import JOINED, AnyLayout
from moe_jax.compression.methods.fewer_experts import (
    Groups,
    Removing,
    aligned_to_dominant,
    count_groups,
    merge_matrix,
    shares_of_groups,
    weighted_output_norms,
)
from moe_jax.compression.methods.interface import Analysis, Base, Tick
from moe_jax.compression.methods.narrower import full_target, write_universal
from moe_jax.compression.options.of_whole_experts import REAMOptions
from moe_jax.compression.report import LayerFigures, Measure
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.models import MoEConfig
from moe_jax.models.moe_config import ROUTER_LEAVES_BY_EXPERT

MOST_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class REAM(REAMOptions, Removing):
    """The method with the options `REAMOptions`."""

    layouts: ClassVar[tuple[AnyLayout, ...]] = (JOINED,)

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        """`groups` of all experts, `dominant` ones, which stay, `weights` in groups, and aligned `permutations`."""
        began = time.monotonic()
        saliency = weighted_output_norms(layer, lambda share: tick(share / 2))
        kept = self.most_salient(saliency)
        logits = statistics_of(layer).similarity[:, kept]
        groups = join_most_alike(kept, (logits + output_similarity(layer, kept)) / 2)
        return {
            "groups": groups.of,
            "dominant": groups.dominant,
            "weights": shares_of_groups(groups, saliency),
            "permutations": aligned_to_dominant(layer, groups, lambda share: tick((1 + share) / 2)),
            "seconds": np.asarray(time.monotonic() - began),
        }

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        return {
            layer.index: full_target(layer, num_experts=count_groups(layer.moe.num_experts, self.keep))
            for layer in layers
        }

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        """An error is that of an aligned expert against what is left of it, the one of its group."""
        groups = Groups(analysis["groups"], analysis["dominant"])
        for path in layer.leaves:
            if path in ROUTER_LEAVES_BY_EXPERT:
                write(path, np.ascontiguousarray(layer.leaf(path)[..., groups.dominant]))
        write_universal(layer, write)
        measure = Measure(layer.moe.routed_experts, layer.moe.expert.dim)
        for name in layer.shapes:
            merge_matrix(layer, name, groups, analysis, write, measure)
        return measure.figures(analysed=analysis["seconds"], choice=groups.in_words())


def join_most_alike(kept: Int[np.ndarray, " G"], similarity: Float[np.ndarray, "E G"]) -> Groups:
    """Groups of the kept experts; each other one joins the kept one of largest similarity, of equal ones the first."""
    groups = np.argmax(similarity, axis=1)
    groups[kept] = np.arange(len(kept))
    return Groups(groups.astype(np.int32), kept.astype(np.int32))


def output_similarity(layer: SourceLayer, kept: Int[np.ndarray, " G"]) -> Float[np.ndarray, "E G"]:
    """Cosines, float64, of the outputs of every expert that is not kept with those of the kept ones.

    They are taken over its tokens, weighted with the router: `sum_t w_t^2 <f(x_t), g(x_t)>` by the roots of the same of
    f with f and g with g. Of an expert without tokens, and of kept ones, they are 0.
    """
    rows = layer.rows
    assert rows is not None
    some: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for expert in sorted(set(range(layer.moe.num_experts)) - set(kept.tolist())):
        tokens, choice = np.nonzero(rows.experts == expert)
        every = np.linspace(0, len(tokens) - 1, min(MOST_TOKENS, len(tokens))).round().astype(np.int64)
        if len(every):
            some[expert] = tokens[every], rows.weights[tokens, choice][every].astype(np.float64)
    found = np.zeros((layer.moe.num_experts, len(kept)))
    if not some:
        return found
    own = {
        expert: np.concatenate([given for _, given in outputs(some[expert][0])]).astype(np.float64)
        for expert, outputs in enumerate(expert_outputs(layer))
        if expert in some
    }
    tokens = np.concatenate([index for index, _ in some.values()])
    ends = np.cumsum([len(index) for index, _ in some.values()])[:-1]
    of_kept = (outputs for expert, outputs in enumerate(expert_outputs(layer)) if expert in kept)
    for group, outputs in enumerate(of_kept):
        others = np.split(np.concatenate([given for _, given in outputs(tokens)]).astype(np.float64), ends)
        for (expert, (_, weights)), other in zip(some.items(), others, strict=True):
            squares = weights[:, None] ** 2
            product, *lengths = (
                float(np.sum(squares * one * two))
                for one, two in ((own[expert], other), (own[expert], own[expert]), (other, other))
            )
            norm = np.sqrt(np.prod(lengths))
            found[expert, group] = product / norm if norm > 0 else 0
    return found
