"""The schedule of every kernel over rows sorted by group: which block of rows meets which group."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Visits(NamedTuple):
    """A list of visits, in the order of the rows; all arrays are int32[V].

    Every block of rows is visited once for each group that has rows in it, and once if no group has. Visits of a block
    are consecutive, and so are those of a group.

    Attributes:
      block: index of the block of rows.
      group: of the rows. If no group has rows in the block, it is the last group that was visited.
      first, end: rows first ... end belong to the group; none do where `end` is 0.
    """

    block: Int[Array, " V"]
    group: Int[Array, " V"]
    first: Int[Array, " V"]
    end: Int[Array, " V"]


def group_visits(
    group_sizes: Int[Array, " E"], rows: int, block: int, *, every_group: bool = False
) -> tuple[Visits, Int[Array, ""]]:
    """Returns the visits of `rows` rows in blocks of `block` rows, and their number; entries beyond it are unused.

    Args:
      group_sizes: rows per group, int32. Their sum may be less than `rows`.
      rows: of all groups and beyond, at least 1.
      block: rows of a block. The last block may reach beyond the rows.
      every_group: visit every group at least once, and no block in which no group has rows. A group without rows is
        visited with `end` 0.
    """
    blocks, groups = -(-rows // block), group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    begin = starts // block
    counts = jnp.where(group_sizes > 0, (ends - 1) // block - begin + 1, int(every_group))

    # Blocks that no group reaches come last, as if they were another group.
    reached = (ends[-1:] + block - 1) // block
    begin, counts = jnp.concatenate([begin, reached]), jnp.concatenate([counts, blocks - reached])
    past = jnp.cumsum(counts)
    visit = jnp.arange(blocks + groups, dtype=jnp.int32)
    owner = jnp.sum((visit[:, None] >= past[None, :]).astype(jnp.int32), axis=1)
    owner = jnp.minimum(owner, groups)

    group = jnp.minimum(owner, groups - 1)
    last = jnp.max(jnp.where(group_sizes > 0, jnp.arange(groups, dtype=jnp.int32), 0))
    without_rows = (owner == groups) | (group_sizes[group] == 0)
    visits = Visits(
        # Entries beyond the last visit may have any valid block.
        block=jnp.clip(begin[owner] + visit - (past - counts)[owner], 0, blocks - 1),
        group=jnp.where(owner == groups, last, group),
        first=jnp.where(without_rows, 0, starts[group]),
        end=jnp.where(without_rows, 0, ends[group]),
    )
    return visits, past[-2] if every_group else past[-1]


def visits_of_shares(
    group_sizes: Int[Array, " E"], rows: int, block: int, shares: int
) -> tuple[Visits, Int[Array, ""]]:
    """Returns the visits of equal shares of the blocks, share by share, and the largest number of visits of a share.

    Args:
      group_sizes, rows, block: see `group_visits`.
      shares: divides the number of blocks. A share with fewer visits than another is filled up with visits that do
        nothing: in its last block, for the group that was visited last.
    """
    if shares == 1:
        return group_visits(group_sizes, rows, block)
    ends, own = jnp.cumsum(group_sizes), -(-rows // block) // shares * block
    start = jnp.arange(shares, dtype=jnp.int32)[:, None] * own
    first, end = (jnp.clip(edges[None, :] - start, 0, own) for edges in (ends - group_sizes, ends))
    visits, counts = jax.vmap(lambda sizes: group_visits(sizes, own, block))(end - first)
    first, end = (jnp.where(visits.end == 0, 0, edges + start) for edges in (visits.first, visits.end))
    every = Visits(visits.block + start // block, visits.group, first, end)
    return Visits(*(values.reshape(-1) for values in every)), jnp.max(counts)


class ShareEntries:
    """The entries of one share, in a list of the entries of all shares."""

    def __init__(self, values: Any, start: Any):
        self._values, self._start = values, start

    def __getitem__(self, v: Any) -> Any:
        return self._values[self._start + v]
