"""Methods that merge the experts of a group into one (methods.md 5): M-SMoE, MEO and Git Re-Basin.

Each expert joins the most used one whose router logits are most similar to its own, as in M-SMoE (Li et al., 2024,
"Merge, Then Compress", arXiv 2310.01334, section 3.2), with the same number of groups in every layer. The papers of MEO
and Git Re-Basin do not group experts; here they use the same groups. The three methods differ in how the neurons of a
group are aligned and its experts weighted.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.cluster.hierarchy import cut_tree, linkage

from moe_jax.compression.alignment.assignment import align
from moe_jax.compression.alignment.matching import Matching
from moe_jax.compression.calibration.expert_statistics import expert_outputs, statistics_of, tokens_per_expert
from moe_jax.compression.coding.storage import MERGED, REMOVED, AnyLayout
from moe_jax.compression.methods.interface import Analysis, Base, Method, Tick, alignment_progress, check_calibrated
from moe_jax.compression.methods.narrower import (
    check_full,
    full_target,
    neurons_of,
    routed_biases,
    routed_kernels,
    write_universal,
)
from moe_jax.compression.options.of_whole_experts import (
    GitReBasinOptions,
    HCSMoEOptions,
    MEOOptions,
    MergingOptions,
    MSMoEOptions,
    REAPOptions,
)
from moe_jax.compression.report import NO_BASE, LayerFigures, Measure
from moe_jax.compression.source_layer import SourceLayer, Write, design_matrices, unaligned
from moe_jax.core.errors import InputError
from moe_jax.core.finite import cast
from moe_jax.experts.forms import KernelForm
from moe_jax.experts.forms.coding import ByExpert
from moe_jax.models import MoEConfig
from moe_jax.models.moe_config import ROUTER_LEAVES_BY_EXPERT
from moe_jax.models.own_parts import LINEAR
from moe_jax.nn.moe import RouterStatistics

# Of the search for orders that Git Re-Basin makes.
MOST_ROUNDS = 100


class Groups(NamedTuple):
    """A partition of the experts."""

    of: Int[np.ndarray, " E"]  # group of every expert, int32; groups are in the order of their dominant experts
    dominant: Int[np.ndarray, " G"]  # the most used expert of every group, ascending

    def in_words(self) -> str:
        """Returns such as `0 2 5 | 1 3 4`."""
        return " | ".join(" ".join(map(str, np.flatnonzero(self.of == g))) for g in range(len(self.dominant)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merging(MergingOptions, Method):
    """The router keeps its E outputs, the bank holds G = max(1, round(keep E)) experts.

    An error is that of an aligned expert against what is left of it, the one of its group.
    """

    layouts: ClassVar[tuple[AnyLayout, ...]] = (MERGED,)
    origin: ClassVar[str | None] = NO_BASE

    def align(self, layer: SourceLayer, groups: Groups, tick: Tick) -> tuple[Int[np.ndarray, "E f"], dict[str, Any]]:
        """Finds the order of every expert's neurons, by default as they are, and figures of the search by name.

        Neuron i of the aligned expert is neuron `permutations[k, i]` of the expert.
        """
        del groups, tick
        return unaligned(layer)[: layer.moe.routed_experts], {}

    def weights(self, statistics: RouterStatistics) -> Float[np.ndarray, " E"]:
        """The weight of every expert in its group, by default its usage; only ratios matter."""
        return statistics.usage

    def group(self, layer: SourceLayer, statistics: RouterStatistics, count: int) -> Groups:
        """Divides the experts into `count` groups."""
        del layer
        return group_experts(statistics, count)

    def check(self, layers: Sequence[SourceLayer]) -> None:
        check_full(layers)

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        """Groups, weights in them, and aligned neurons."""
        began = time.monotonic()
        statistics = statistics_of(layer)
        groups = self.group(layer, statistics, count_groups(layer.moe.routed_experts, self.keep))
        permutations, figures = self.align(layer, groups, tick)
        return {
            "groups": groups.of,
            "dominant": groups.dominant,
            "weights": shares_of_groups(groups, self.weights(statistics)),
            "permutations": permutations,
            "seconds": np.asarray(time.monotonic() - began),
            **{f"figure_{name}": np.asarray(value) for name, value in figures.items()},
        }

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        return {
            layer.index: full_target(layer, merged_experts=count_groups(layer.moe.routed_experts, self.keep))
            for layer in layers
        }

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        groups = Groups(analysis["groups"], analysis["dominant"])
        write_universal(layer, write)
        measure = Measure(layer.moe.routed_experts, layer.moe.expert.dim)
        for name in layer.shapes:
            merge_matrix(layer, name, groups, analysis, write, measure)
        before = layer.leaf("groups") if layer.moe.merged_experts is not None else slice(None)
        write("groups", groups.of[before])
        found = {name[7:]: value.item() for name, value in analysis.items() if name.startswith("figure_")}
        return measure.figures(
            analysed=analysis["seconds"],
            choice=groups.in_words(),
            uniform_usage=layer.calibration is None or layer.calibration.statistics is None,
            **found,
        )


def shares_of_groups(groups: Groups, weights: Float[np.ndarray, " E"]) -> Float[np.ndarray, " E"]:
    """Weights that sum to 1 in every group; one of zeros gets equal ones."""
    totals, sizes = np.bincount(groups.of, weights)[groups.of], np.bincount(groups.of)[groups.of]
    return np.divide(weights, totals, out=1 / sizes, where=totals > 0)


def merge_matrix(
    layer: SourceLayer, name: str, groups: Groups, analysis: Analysis, write: Write, measure: Measure
) -> None:
    """Writes one matrix of the experts of all groups: means of aligned ones, by the `weights` of the analysis."""
    weights, permutations = analysis["weights"], analysis["permutations"]

    def aligned() -> Iterator[np.ndarray]:
        for kernel, order in zip(routed_kernels(layer, name), permutations, strict=True):
            yield neurons_of(name, kernel, order)

    merged = np.zeros((len(groups.dominant), *layer.shapes[name]), np.float32)
    for expert, kernel in enumerate(aligned()):
        merged[groups.of[expert]] += np.float32(weights[expert]) * kernel
    stored = layer.stored(name, merged)
    del merged
    for expert, kernel in enumerate(aligned()):
        measure.add(expert, kernel, None, stored[groups.of[expert]].astype(np.float32))
    write(f"experts/{name}/kernel", stored)

    biases = routed_biases(layer, name)
    if biases is not None:
        # An output bias belongs to no neuron.
        moved = biases if name == "down" else np.take_along_axis(biases, permutations, axis=1)
        sums = np.zeros((len(groups.dominant), moved.shape[1]))
        np.add.at(sums, groups.of, weights[:, None] * moved.astype(np.float64))
        write(f"experts/{name}/bias", cast(f"the {name} biases of layer {layer.index}", sums, biases.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MSMoE(MSMoEOptions, Merging):
    """The method with the options `MSMoEOptions`."""

    def align(self, layer: SourceLayer, groups: Groups, tick: Tick) -> tuple[Int[np.ndarray, "E f"], dict[str, Any]]:
        return aligned_to_dominant(layer, groups, tick), {}


def aligned_to_dominant(layer: SourceLayer, groups: Groups, tick: Tick) -> Int[np.ndarray, "E f"]:
    """The order of the neurons of every expert that is nearest to the dominant one of its group: exact assignments."""
    permutations = unaligned(layer)[: layer.moe.routed_experts]
    if len(groups.dominant) == len(groups.of):
        return permutations
    designs = design_matrices(layer)
    layer.forget()
    for expert, group in enumerate(groups.of):
        dominant = groups.dominant[group]
        if expert != dominant:
            permutations[expert] = align(designs[expert], designs[dominant])
        tick((expert + 1) / len(groups.of))
    return permutations


@dataclasses.dataclass(frozen=True, kw_only=True)
class MEO(MEOOptions, Merging):
    """The method with the options `MEOOptions`."""

    def weights(self, statistics: RouterStatistics) -> Float[np.ndarray, " E"]:
        return statistics.score


@dataclasses.dataclass(frozen=True, kw_only=True)
class GitReBasin(GitReBasinOptions, Merging):
    """The method with the options `GitReBasinOptions`."""

    def align(self, layer: SourceLayer, groups: Groups, tick: Tick) -> tuple[Int[np.ndarray, "E f"], dict[str, Any]]:
        identity, figures = super().align(layer, groups, tick)
        if len(groups.dominant) == len(groups.of):
            return identity, figures
        designs = design_matrices(layer)[: layer.moe.routed_experts]
        layer.forget()
        matching = Matching(designs, identity)
        matching.descend(MOST_ROUNDS, alignment_progress(tick, len(designs)))
        rounds = len(matching.objectives)
        return matching.permutations, {
            "objective": matching.objective,
            "rounds": rounds,
            "converged": matching.converged,
        }

    def weights(self, statistics: RouterStatistics) -> Float[np.ndarray, " E"]:
        return np.ones(len(statistics.usage))


def count_groups(experts: int, keep: float) -> int:
    """G = max(1, round(keep E))."""
    return max(1, round(keep * experts))


def group_experts(statistics: RouterStatistics, count: int) -> Groups:
    """The `count` most used experts are dominant; each of the others joins the one it is most similar to.

    Ties go to the first expert, in usage and in similarity.
    """
    dominant = np.sort(np.argsort(-statistics.usage, kind="stable")[:count])
    groups = np.argmax(statistics.similarity[:, dominant], axis=1)
    groups[dominant] = np.arange(count)
    return Groups(groups.astype(np.int32), dominant.astype(np.int32))


MOST_TOKENS = 2048
"""Over which outputs are averaged: every expert is applied to all of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HCSMoE(HCSMoEOptions, Merging):
    """The method with the options `HCSMoEOptions`."""

    def check(self, layers: Sequence[SourceLayer]) -> None:
        super().check(layers)
        check_calibrated(layers)

    def group(self, layer: SourceLayer, statistics: RouterStatistics, count: int) -> Groups:
        clusters = cluster_by_distance(mean_outputs(layer), count)
        used = [np.flatnonzero(clusters == cluster) for cluster in range(count)]
        dominant = [members[np.argmax(statistics.usage[members])] for members in used]
        order = np.argsort(dominant)
        return Groups(np.argsort(order)[clusters].astype(np.int32), np.asarray(dominant, np.int32)[order])


def mean_outputs(layer: SourceLayer) -> Float[np.ndarray, "E d"]:
    """Every expert's mean output, float64, for `MOST_TOKENS` of the layer's tokens, whoever they are routed to."""
    rows = layer.rows
    assert rows is not None
    count = len(rows.inputs)
    tokens = np.linspace(0, count - 1, min(MOST_TOKENS, count)).round().astype(np.int64)
    sums = [
        sum(given.sum(axis=0, dtype=np.float64) for _, given in outputs(tokens)) for outputs in expert_outputs(layer)
    ]
    return np.stack(sums) / len(tokens)


def cluster_by_distance(points: Float[np.ndarray, "n d"], count: int) -> Int[np.ndarray, " n"]:
    """Cluster of every point: the two clusters of least mean distance are united, until `count` are left."""
    if len(points) == count:
        return np.arange(count)
    return cut_tree(linkage(points, method="average", metric="euclidean"), n_clusters=count)[:, 0]


def check_removable(layers: Mapping[int, MoEConfig], keep: float) -> None:
    """Raises `InputError` if a share of the experts, and of the outputs of their router, cannot be all that is left."""
    for index, moe in layers.items():
        where = f"layer {index}"
        left = count_groups(moe.num_experts, keep)
        if moe.universal == "coder":
            raise InputError(f"{where}: universal 'coder' has a gate network, from which no expert can be removed")
        if moe.router != LINEAR:
            raise InputError(f"{where}: experts can be removed from linear routers, and its router is {moe.router!r}")
        if moe.selection.groups > 1:
            raise InputError(
                f"{where}: experts are chosen by groups={moe.selection.groups}, and these would no longer be equal"
            )
        if moe.merged_experts is not None:
            raise InputError(f"{where}: its experts are merged, so that several outputs of the router share one")
        if left < moe.top_k:
            raise InputError(
                f"keep={keep:g} leaves {left} of {moe.num_experts} experts in {where}, where every token is "
                f"routed to top_k={moe.top_k}; keep at least {moe.top_k / moe.num_experts:g}"
            )


class Removing(Method):
    """A method that leaves the most salient experts, and as many outputs of the router."""

    layouts: ClassVar[tuple[AnyLayout, ...]] = (REMOVED,)
    origin: ClassVar[str | None] = NO_BASE

    keep: float

    @classmethod
    def check_configs(cls, layers: Mapping[int, MoEConfig], keep: float) -> None:
        check_removable(layers, keep)

    def check(self, layers: Sequence[SourceLayer]) -> None:
        if any(layer.num_experts > layer.moe.bank_experts for layer in layers):
            raise InputError("--extended does not go with this method, which makes no deltas")
        self.check_configs({layer.index: layer.moe for layer in layers}, self.keep)
        check_calibrated(layers)

    def most_salient(self, saliency: Float[np.ndarray, " E"]) -> Int[np.ndarray, " G"]:
        """Returns the experts that stay, ascending; of equally salient ones the first."""
        return np.sort(np.argsort(-saliency, kind="stable")[: count_groups(len(saliency), self.keep)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class REAP(REAPOptions, Removing):
    """The method with the options `REAPOptions`."""

    @classmethod
    def check_configs(cls, layers: Mapping[int, MoEConfig], keep: float) -> None:
        super().check_configs(layers, keep)
        for index, moe in layers.items():
            if isinstance(moe.bank.form, ByExpert):
                raise InputError(
                    f"layer {index}: its experts are in parts of unlike codes, and none can be removed from these; "
                    "remove experts first, and compress what is left"
                )

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        """`kept`: the experts that stay, ascending; `saliency` of all."""
        began = time.monotonic()
        experts = layer.moe.num_experts
        saliency = (
            tokens_per_expert(layer)[:experts].astype(np.float64)
            if self.criterion == "frequency"
            else weighted_output_norms(layer, tick)
        )
        return {
            "kept": self.most_salient(saliency),
            "saliency": saliency,
            "seconds": np.asarray(time.monotonic() - began),
        }

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        return {
            layer.index: dataclasses.replace(layer.moe, num_experts=count_groups(layer.moe.num_experts, self.keep))
            for layer in layers
        }

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        """Leaves are taken as they are stored: no expert is made anew."""
        experts, kept = layer.moe.num_experts, analysis["kept"]
        # The universal FFN, if it is in the bank, is the last one there and stays.
        in_bank = np.append(kept, np.arange(experts, layer.moe.bank_experts))
        shared = _shared_leaves(layer)
        for path in layer.leaves:
            if path in ROUTER_LEAVES_BY_EXPERT:
                write(path, np.ascontiguousarray(layer.leaf(path)[..., kept]))
            elif path.startswith("experts/") and not path.startswith("experts/base/") and path not in shared:
                leaf = layer.leaf(path)
                assert len(leaf) == layer.moe.bank_experts, (path, leaf.shape)
                write(path, leaf[in_bank])
        layer.forget()
        measure = Measure(experts, layer.moe.expert.dim)
        for name, shape in layer.shapes.items():
            for expert, kernel in enumerate(itertools.islice(layer.kernels(name), experts)):
                left = kernel.astype(np.float32) if expert in kept else np.zeros(shape, np.float32)
                measure.add(expert, kernel, None, left)
        removed = " ".join(str(expert) for expert in range(experts) if expert not in kept)
        return measure.figures(analysed=analysis["seconds"], choice=f"without {removed}" if removed else "all")


def _shared_leaves(layer: SourceLayer) -> set[str]:
    """Paths of the leaves that all experts of a layer have in common, beside a base."""
    form = layer.moe.bank.form
    assert isinstance(form, KernelForm)
    return {
        f"experts/delta/{name}/{leaf}"
        for name, matrix in layer.matrices.items()
        for leaf in form.of_matrix(matrix).common_leaves
    }


def weighted_output_norms(layer: SourceLayer, tick: Tick = lambda share: None) -> Float[np.ndarray, " E"]:
    """The mean of `w ||f(x)||` over the tokens that are routed to each expert; 0 of one to which none is."""
    rows = layer.rows
    assert rows is not None
    found = np.zeros(layer.moe.num_experts)
    for expert, outputs in enumerate(expert_outputs(layer)):
        tokens, choice = np.nonzero(rows.experts == expert)
        weights = rows.weights[tokens, choice].astype(np.float64)
        for part, given in outputs(tokens):
            found[expert] += weights[part] @ np.linalg.norm(given.astype(np.float64), axis=1)
        found[expert] /= max(len(tokens), 1)
        tick((expert + 1) / len(found))
    return found
