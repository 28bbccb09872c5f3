"""Loops over groups of rows, each with its own kernel: what a CPU's grouped products are made of.

XLA:CPU has no grouped product. Groups are visited one after the other in loops of dynamic length, and their rows in
tiles. Where groups have few rows it is faster to multiply each row by itself, and to make no kernel (`row_by_row`);
where some have few and others many, `by_group_size` does both.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.plain import zero_rows_beyond

# Rows of a tile on CPU: long tiles make fast matrix products, short ones at the end of a group waste little.
TILES = (256, 64)
# With at most `MOST_ROWS` of all groups, what is left of one is multiplied in shorter tiles: one of 64 would be mostly
# empty where experts are many. With more, as in training, remainders would take longer (measured).
SHORTER_TILE = 16
# By the most rows of all groups together. Of one token, groups have a single row; up to four take hardly longer than
# one, and up to 16 hardly longer than eight (measured).
TILES_OF_FEW = {2: 1, 16: 4, 64: 16}
# Most entries of a tile of a kernel. With many rows a tile is used often and may be large; with few rows it should stay
# in the cache (measured on kernels of 4096 x 11008 and 11008 x 4096: 100 to 300 columns are fastest, and a whole kernel
# takes three times as long).
TILE_ENTRIES = 1 << 22
FEW_ROWS, TILE_ENTRIES_FOR_FEW = 64, 3 << 19
# Most rows of all groups that count as the rows of texts which are continued, of which an expert may have few.
MOST_ROWS = 512
# Comparisons that take no longer than the shortest search.
_COMPARED = 1 << 14


def over_tiles(size: Array, rows: int, body: Callable[[int, Array, Any], Any], carry: Any) -> Any:
    """Folds `body(tile, offset, carry)` over tiles of a group of rows: long tiles while they fit, then shorter ones.

    Args:
      size: rows of the group. The last tile may reach beyond them.
      rows: of all groups together, at most.
      body: called with the number of rows of a tile and its first row in the group.
      carry: initial value.
    """
    longest = longest_tile(rows)
    if rows <= max(TILES_OF_FEW):
        # Of one size: what XLA moves in front of a loop over them, it would move in front of each of several.
        tiles = [longest]
    else:
        shorter = (SHORTER_TILE,) if rows <= MOST_ROWS else ()
        tiles = list(dict.fromkeys(min(tile, longest) for tile in (*TILES, *shorter)))
    done = jnp.zeros((), size.dtype)
    for tile in tiles:
        left = size - done
        count = (left + tile - 1) // tile if tile == tiles[-1] else left // tile
        carry = lax.fori_loop(
            0, count, lambda turn, carry, tile=tile, done=done: body(tile, done + turn * tile, carry), carry
        )
        done = done + count * tile
    return carry


def over_numbers(count: int, body: Callable[[Array, Any], Any], carry: Any) -> Any:
    """Folds `body(number, carry)` over the numbers below `count`, which are int32, also with `jax_enable_x64`."""
    return lax.fori_loop(0, count, lambda number, carry: body(number.astype(jnp.int32), carry), carry)


def over_columns(tile: int, columns: int, body: Callable[[Array, int, Any], Any], carry: Any) -> Any:
    """Folds `body(start, width, carry)` over tiles of columns; the last is narrower where `tile` does not divide."""
    full, remainder = divmod(columns, tile)
    if full == 1:
        carry = body(jnp.zeros((), jnp.int32), tile, carry)
    else:
        carry = over_numbers(full, lambda t, carry: body(t * tile, tile, carry), carry)
    return body(jnp.full((), full * tile, jnp.int32), remainder, carry) if remainder else carry


def tile_width(shape: tuple[int, int], rows: int) -> int:
    """Returns the number of columns of a tile of a kernel [i, o] that meets `rows` rows: at least one.

    A divisor of o is preferred where one is nearly as wide: all tiles then run the same program.
    """
    limit = TILE_ENTRIES_FOR_FEW if rows <= FEW_ROWS else TILE_ENTRIES
    widest = min(shape[1], max(1, limit // shape[0]))
    divisor = max(width for width in range(1, widest + 1) if shape[1] % width == 0)
    if 4 * divisor >= 3 * widest:
        return divisor
    return widest - widest % 16 if widest > 16 else widest


def when(condition: Array, body: Callable[[Any], Any], carry: Any) -> Any:
    """Returns `body(carry)` if the condition holds, else `carry`; as a loop, so that XLA updates in place."""
    return lax.fori_loop(0, condition.astype(jnp.int32), lambda _, carry: body(carry), carry)


def over_groups_with_rows(group_sizes: Int[Array, " E"], body: Callable[[Array, Any], Any], carry: Any) -> Any:
    """Folds `body(group, carry)` over the groups that have rows, in their order.

    The others are left out of the loop: inside of it, behind a condition, XLA would make their kernels all the same,
    since these do not depend on the loop that stands for the condition, and would be moved in front of it.
    """
    has_rows = group_sizes > 0
    (with_rows,) = jnp.nonzero(has_rows, size=group_sizes.shape[0], fill_value=0)
    count = jnp.sum(has_rows, dtype=jnp.int32)
    return lax.fori_loop(0, count, lambda n, carry: body(with_rows[n].astype(jnp.int32), carry), carry)


def of_this_turn(arrays: Any, turn: Any) -> tuple[Any, Any]:
    """Returns arrays, and the numbers of a turn of loops, so that XLA converts nothing of the arrays outside of these.

    XLA:CPU has no operations on bfloat16, not even one that takes a slice: it converts the whole array, and because
    that is the same in every turn, it does so in front of all loops, and keeps the copy in float32: of the experts of
    all layers, while tokens are generated. Behind the barrier the array is another one in every turn, as far as the
    compiler knows; the conversion then becomes part of the slice.
    """
    return lax.optimization_barrier((arrays, turn))


def longest_tile(rows: int) -> int:
    """Returns the rows of the longest tile of `over_tiles`: padding by this many keeps every tile inside the array."""
    few = next((tile for most, tile in TILES_OF_FEW.items() if rows <= most), None)
    return min(max(TILES), max(8, 1 << (rows - 1).bit_length())) if few is None else few


class Groups(NamedTuple):
    """Groups of consecutive rows, in their order.

    Attributes:
      sizes: rows per group; 0 also for a group that is left to others.
      starts: the first row of each.
      rows: of all groups, those that are left to others too. What comes after them is in no group.
    """

    sizes: Int[Array, " E"]
    starts: Int[Array, " E"]
    rows: Int[Array, ""]

    @classmethod
    def of(cls, sizes: Int[Array, " E"]) -> "Groups":
        """Returns groups of these sizes, one after the other."""
        ends = jnp.cumsum(sizes)
        return cls(sizes, ends - sizes, ends[-1])

    def only(self, taken: Bool[Array, " E"]) -> "Groups":
        """Returns these groups, of which all but those that are taken are left to others."""
        return self._replace(sizes=jnp.where(taken, self.sizes, 0))

    def of_rows(self, most: int) -> tuple[Int[Array, " m"], Int[Array, " m"]]:
        """Returns which rows are in a group, and in which, for at most so many; what comes after them is anything."""
        ends, numbers = jnp.cumsum(self.sizes), jnp.arange(most, dtype=self.sizes.dtype)
        # Comparisons with all are one loop, but their number would grow with that of the rows.
        method = "compare_all" if most * self.sizes.shape[0] <= _COMPARED else "scan_unrolled"
        groups = jnp.searchsorted(ends, numbers, side="right", method=method)
        return (self.starts - ends + self.sizes)[groups] + numbers, groups.astype(jnp.int32)


def looped_product(
    lhs: Float[Array, "M k"],
    groups: Groups,
    width: int,
    kernel_of: Callable[[Array], Callable[[Array, int], Array]],
    *,
    contract_out: bool = False,
) -> Float[Array, "M n"]:
    """Returns the product of rows sorted by group with their kernels, of which one tile of columns exists at a time.

    Args:
      lhs: rows. Those that are in no group give zeros, those of groups that are left to others anything.
      groups: of the rows.
      width: n.
      kernel_of: given a group, returns a function of the first column of a tile and its width to the tile.
      contract_out: tiles are rows [w, k] of the kernels, which are multiplied transposed.
    """
    rows = lhs.shape[0]
    columns = tile_width((lhs.shape[1], width), rows)
    contract = (((1,), (1 if contract_out else 0,)), ((), ()))

    def group(padded: Array, e: Array, out: Array) -> Array:
        tile_of = kernel_of(e)

        def column_tile(start: Array, columns: int, out: Array) -> Array:
            kernel = tile_of(start, columns)

            def multiply(tile: int, offset: Array, out: Array) -> Array:
                at = groups.starts[e] + offset
                block = lax.dynamic_slice_in_dim(padded, at, tile, 0)
                return lax.dynamic_update_slice(out, lax.dot_general(block, kernel, contract), (at, start))

            return over_tiles(groups.sizes[e], rows, multiply, out)

        return over_columns(columns, width, column_tile, out)

    return _product_of_groups(lhs, groups, width, group)


def group_by_group(
    lhs: Float[Array, "M k"],
    groups: Groups,
    width: int,
    product_of: Callable[[Int[Array, ""]], Callable[[Float[Array, "m k"]], Float[Array, "m n"]]],
) -> Float[Array, "M n"]:
    """Does what `looped_product` does with a product of one's own of the rows of a group, a tile of rows at a time.

    Args:
      lhs, groups, width: see there.
      product_of: given a group, returns what multiplies rows with its kernel.
    """

    def group(padded: Array, e: Array, out: Array) -> Array:
        product = product_of(e)

        def multiply(tile: int, offset: Array, out: Array) -> Array:
            at = groups.starts[e] + offset
            own = product(lax.dynamic_slice_in_dim(padded, at, tile, 0)).astype(out.dtype)
            return lax.dynamic_update_slice_in_dim(out, own, at, 0)

        return over_tiles(groups.sizes[e], lhs.shape[0], multiply, out)

    return _product_of_groups(lhs, groups, width, group)


def _product_of_groups(
    lhs: Float[Array, "M k"], groups: Groups, width: int, group: Callable[[Array, Array, Array], Array]
) -> Float[Array, "M n"]:
    """Folds `group(rows, group, out)` over groups, with padding after the rows, so that every tile lies inside.

    Rows that a tile has beyond its group are overwritten by the groups that they belong to, which come later.
    """
    rows, slack = lhs.shape[0], longest_tile(lhs.shape[0])
    padded = jnp.pad(lhs, ((0, slack), (0, 0)))
    out = over_groups_with_rows(groups.sizes, partial(group, padded), jnp.zeros((rows + slack, width), lhs.dtype))
    return zero_rows_beyond(out[:rows], groups.rows)


def row_by_row(
    lhs: Float[Array, "M k"],
    groups: Groups,
    width: int,
    product: Callable[[Float[Array, "m k"], Int[Array, ""]], Float[Array, "m n"]],
) -> Float[Array, "M n"]:
    """Does what `looped_product` does without making kernels, for few rows: each is multiplied by itself; float32.

    Where there is a single group, all rows are multiplied together.

    Args:
      lhs, groups, width: see there.
      product: of rows with the kernel of a group, float32.
    """
    if groups.sizes.shape[0] == 1:  # a loop would take longer than what is in it
        return zero_rows_beyond(product(lhs, jnp.zeros((), jnp.int32)), groups.rows)
    rows, of_rows = groups.of_rows(lhs.shape[0])

    def multiply(n: Array, out: Array) -> Array:
        own = product(lax.dynamic_slice_in_dim(lhs, rows[n], 1, 0), of_rows[n])
        return lax.dynamic_update_slice_in_dim(out, own, rows[n], 0)

    count = jnp.minimum(jnp.sum(groups.sizes), lhs.shape[0]).astype(jnp.int32)
    return lax.fori_loop(jnp.zeros((), jnp.int32), count, multiply, jnp.zeros((lhs.shape[0], width), jnp.float32))


def by_group_size(
    lhs: Float[Array, "M k"],
    group_sizes: Int[Array, " E"],
    few: int,
    *,
    one_by_one: Callable[[Groups], Float[Array, "M n"]],
    with_kernels: Callable[[Groups], Float[Array, "M n"]],
) -> Float[Array, "M n"]:
    """Returns the product of rows sorted by group, those of groups of at most `few` rows made one by one.

    How many groups have rows is not known before: the experts of all layers may be among them
    (`experts.arrangements`), and a router may send all tokens to the same. So every group is asked for its size.

    Args:
      lhs: rows. Those beyond the groups give zeros.
      group_sizes: rows per group, int32.
      few: rows of a group up to which it is faster to make no kernel.
      one_by_one, with_kernels: products of the rows of some groups, as `row_by_row` and `looped_product` return them.
    """
    groups, rows = Groups.of(group_sizes), lhs.shape[0]
    if 0 < rows <= few:
        return one_by_one(groups)
    if not 0 < rows <= MOST_ROWS or group_sizes.shape[0] == 1:
        return with_kernels(groups)
    is_short = group_sizes <= few
    of_rows = is_short[groups.of_rows(rows)[1]][:, None]
    return jnp.where(of_rows, one_by_one(groups.only(is_short)), with_kernels(groups.only(~is_short)))
