"""Which experts are merged with which: those whose routers say nearly the same, around the ones used most.

This is how M-SMoE groups (Li et al., 2024, "Merge, Then Compress", arXiv 2310.01334, section 3.2), with the same number
of groups in every layer. MEO and Git Re-Basin say nothing about groups; here they take the same, so that the three
differ in how experts of a group are aligned and weighted.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from moe_jax.compress.calibration import RouterStatistics
from moe_jax.compress.source_layer import SourceLayer
from moe_jax.errors import InputError


class Groups(NamedTuple):
    """A partition of the experts.

    Attributes:
      of: group of every expert, int32; groups are in the order of their dominant experts.
      dominant: the most used expert of every group, ascending.
    """

    of: Int[np.ndarray, " E"]
    dominant: Int[np.ndarray, " G"]


def count_groups(experts: int, keep: float) -> int:
    """G = max(1, round(keep E))."""
    return max(1, round(keep * experts))


def group_experts(statistics: RouterStatistics, count: int) -> Groups:
    """The `count` most used experts are dominant; each of the others joins the one it is most similar to.

    Of experts used alike the first are dominant, and of dominant ones equally similar the first is joined.
    """
    dominant = np.sort(np.argsort(-statistics.usage, kind="stable")[:count])
    groups = np.argmax(statistics.similarity[:, dominant], axis=1)
    groups[dominant] = np.arange(count)
    return Groups(groups.astype(np.int32), dominant.astype(np.int32))


def statistics_of(layer: SourceLayer) -> RouterStatistics:
    """What is known of the router, for the experts in the bank: on a text, or else from its weights.

    Without a text all experts count as used alike, and are as similar as the columns of the router's (last) matrix.

    Raises:
      InputError: if the router has weights that are not finite.
    """
    known = layer.statistics
    if known is None:
        matrix = layer.leaf("router/out/kernel" if layer.moe.universal == "coder" else "router/kernel")
        columns = matrix.astype(np.float64)
        if not np.isfinite(columns).all():
            raise InputError(f"the router of layer {layer.index} has entries that are not finite")
        norms = np.linalg.norm(columns, axis=0)
        products = np.outer(norms, norms)
        similarity = np.divide(columns.T @ columns, products, out=np.zeros_like(products), where=products > 0)
        uniform = np.full(len(norms), 1 / len(norms))
        known = RouterStatistics(uniform, uniform, similarity)
    if layer.moe.merged_experts is None:
        return known
    # Experts that are merged already: what goes to one of them is added up.
    member = np.eye(layer.moe.merged_experts)[layer.leaf("groups")]
    share = member / member.sum(axis=0)
    return RouterStatistics(known.usage @ member, known.score @ member, share.T @ known.similarity @ share)


def describe(groups: Groups) -> str:
    """Groups in words, such as `0 2 5 | 1 3 4`."""
    return " | ".join(" ".join(map(str, np.flatnonzero(groups.of == g))) for g in range(len(groups.dominant)))
