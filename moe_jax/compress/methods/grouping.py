"""Groups of experts to merge: each expert joins the most used one whose router logits are most similar to its own.

This is how M-SMoE groups (Li et al., 2024, "Merge, Then Compress", arXiv 2310.01334, section 3.2), with the same number
of groups in every layer. MEO and Git Re-Basin say nothing about groups; here they take the same, so that the three
differ in how experts of a group are aligned and weighted.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from moe_jax.nn.router_stats import RouterStatistics


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


def describe_groups(groups: Groups) -> str:
    """Groups in words, such as `0 2 5 | 1 3 4`."""
    return " | ".join(" ".join(map(str, np.flatnonzero(groups.of == g))) for g in range(len(groups.dominant)))
