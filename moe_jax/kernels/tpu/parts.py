"""Common parts of TPU kernels: which rows meet which group, loops over pieces of a block, products, unpacked codes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, UInt8


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


COLUMNS = 256
"""Columns of a piece: enough to keep the units busy, few enough for a compiler that unrolls every register."""


def in_pieces(size: int, step: int, body: Callable[[Any, int], None]) -> None:
    """Calls `body(start, size of the piece)` for pieces of `step`; the last is shorter where that does not divide."""
    whole, remainder = divmod(size, step)
    if whole == 1:
        body(0, step)
    elif whole:
        lax.fori_loop(0, whole, lambda n, _: body(pl.multiple_of(n * step, step), step), None)
    if remainder:
        body(whole * step, remainder)


def over_strips(visits: Visits, v: Any, rows: int, strip: int, body: Callable[[Any, Bool[Array, "m 1"]], None]) -> None:
    """Calls `body(first row in the block, which of the rows are the group's)` for every strip with rows of the group.

    Args:
      visits: of all blocks.
      v: index of the visit.
      rows: of a block.
      strip: rows of a strip; divides `rows`.
      body: of the loop.
    """
    top, first, end = visits.block[v] * rows, visits.first[v], visits.end[v]

    def one(index: Any, _: None) -> None:
        at = pl.multiple_of(index * strip, strip)
        number = lax.broadcasted_iota(jnp.int32, (strip, 1), 0) + at + top
        body(at, jnp.logical_and(number >= first, number < end))

    # `//` would need the signs, which Mosaic lowers with a look at the default device.
    low = lax.div(jnp.maximum(first - top, 0), strip)
    high = lax.div(jnp.clip(end - top, 0, rows) + (strip - 1), strip)
    lax.fori_loop(low, high, one, None)


def changed(values: Any, v: Any) -> Any:
    """Whether a value of a list differs from that of the visit before, or this is the first visit."""
    return jnp.logical_or(v == 0, values[v] != values[jnp.maximum(v - 1, 0)])


def dot(left: Array, right: Array, contract: tuple[int, int]) -> Float[Array, "m n"]:
    """Returns the product over one axis of each operand, float32; float32 operands are not rounded to bfloat16."""
    exact = left.dtype == jnp.float32
    return lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def split(array: Array) -> tuple[Array, Array]:
    """Returns two bfloat16 terms whose sum is the array, to 16 bits."""
    array = array.astype(jnp.float32)
    # Truncated by a mask: XLA may leave out a conversion there and back, and Mosaic has no `reduce_precision`.
    bits = lax.bitcast_convert_type(array, jnp.int32) & jnp.int32(-(1 << 16))
    large = lax.bitcast_convert_type(bits, jnp.float32)
    return large.astype(jnp.bfloat16), (array - large).astype(jnp.bfloat16)


def unpack(packed: UInt8[Array, "b q"], bits: int) -> Int[Array, "p q"]:
    """Returns the codes of all rows that fill whole bytes, int32.

    The codes of a byte belong to consecutive rows. Two or four of them are spread over the parts of a word, which
    become rows when the word is read as numbers of 16 or 8 bits, because this is how short numbers lie in the
    registers. Otherwise the word is repeated, which takes more instructions.
    """
    words, mask = packed.astype(jnp.int32), (1 << bits) - 1
    if bits == 8:
        return words
    if bits == 4:
        return pltpu.bitcast((words & mask) | ((words >> 4) << 16), jnp.int16).astype(jnp.int32)
    if bits == 2:
        spread = (words & mask) | (((words >> 2) & mask) << 8) | (((words >> 4) & mask) << 16) | ((words >> 6) << 24)
        return pltpu.bitcast(spread, jnp.int8).astype(jnp.int32)
    if bits == 3:
        parts = words.reshape(-1, 3, words.shape[1])
        words = parts[:, 0, :] | (parts[:, 1, :] << 8) | (parts[:, 2, :] << 16)
    height, width = words.shape
    repeated = jnp.broadcast_to(words[:, None, :], (height, 8, width)).reshape(8 * height, width)
    shift = (lax.broadcasted_iota(jnp.int32, repeated.shape, 0) & 7) * bits
    return lax.shift_right_logical(repeated, shift) & mask


def scaled_rows(row: Any, step: int, numerator: int, denominator: int) -> Any:
    """Returns `row * numerator / denominator` for a row that is a multiple of `step`, where it is a whole number."""
    if isinstance(row, int):
        return row * numerator // denominator
    return pl.multiple_of(lax.div(row * numerator, denominator), step * numerator // denominator)


def looked_up(table: Float[Array, "1 128"], codes: Int[Array, "p q"]) -> Float[Array, "p q"]:
    """Returns `table[0, codes]`: a register holds the table, and the units that move entries between lanes read it."""
    height, width = codes.shape
    strips = []
    for start in range(0, width, table.shape[1]):
        strip = codes[:, start : start + table.shape[1]]
        missing = table.shape[1] - strip.shape[1]
        strip = jnp.pad(strip, ((0, 0), (0, missing))) if missing else strip
        entries = jnp.broadcast_to(table, (height, table.shape[1]))
        found = jnp.take_along_axis(entries, strip, axis=1, mode="promise_in_bounds")
        strips.append(found[:, : found.shape[1] - missing])
    return jnp.concatenate(strips, axis=1) if len(strips) > 1 else strips[0]
