"""Grouped product with kernels that exist only while they are multiplied: `lhs[m] @ (kernel of the group of m)`.

The kernel of one expert after another is made, one tile of columns after another, from the base and the expert's own
arrays, multiplied with the rows of its group, and dropped; the backward pass makes it once more. Only one tile exists
at a time, never an [E, i, o] array (methods.md 3).

The backend is chosen when the program is lowered (`kernels.by_platform`):

- TPU: tiles are made in fast memory by the kernels of `kernels.tpu`, where the form has a *fused tile*.
- NVIDIA GPUs: no loops of dynamic length, each turn of which would ask the host. Where a form's tiles can be made in a
  Triton kernel (`Tiles.in_triton`), every program makes its own: best where that is little work, or where an expert has
  few rows. Otherwise XLA makes the kernels of a block of experts, and a grouped kernel multiplies with them, block by
  block; only the kernels of one block, and their gradient in float32, exist at a time.
- Otherwise loops of plain XLA, with tiles sized for the cache of a CPU.
"""

import abc
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, UInt16

from moe_jax.functional.few_rows.bfloat16_bits import widened
from moe_jax.functional.few_rows.bfloat16_kernels import sums_in_float32
from moe_jax.functional.group_loops import (
    Groups,
    by_group_size,
    longest_tile,
    looped_product,
    of_this_turn,
    over_columns,
    over_numbers,
    over_tiles,
    row_by_row,
    tile_width,
    when,
)
from moe_jax.kernels.by_platform import PRODUCT, Bound, by_platform
from moe_jax.kernels.hardware import Capability
from moe_jax.kernels.plain import zero_rows_beyond
from moe_jax.kernels.tpu.fused_tile import FusedTile

if TYPE_CHECKING:
    from moe_jax.kernels.gpu.grouped import TritonProducts


logger = logging.getLogger(__name__)

Stacked = dict[str, Array]

# Entries of the kernels of a block, which has at least one expert: 128 MiB in bfloat16. An H100 writes them in 40
# microseconds, many times the time that it takes to start a kernel.
BLOCK_ENTRIES = 1 << 26

# If an expert has more rows than this on average, kernels that are expensive to make are made in blocks: otherwise they
# would be made again for every 128 rows.
FEW_ROWS = 128

# On a CPU, most rows of an expert for which no kernel is made where that can be done without
# (`Tiles.product_of_rows`): with more it is faster to make a kernel once. Rows of an only expert are written out, those
# of several have their turns of a loop. Measured: between 5 and 16, by form and size.
FEW_ROWS_ON_CPU, FEW_ROWS_OF_ONE_EXPERT = 6, 4


class InTriton(NamedTuple):
    """How the experts' own kernels are made in a Triton kernel.

    Attributes:
      maker: a `kernels.gpu.triton_makers.Maker`.
      arrays: the arrays that it reads.
      is_cheap: making a kernel costs little beside the product, so that it may be repeated for every tile of rows.
    """

    maker: Any
    arrays: Sequence[Array]
    is_cheap: bool


class Tiles(abc.ABC):
    """Makes the kernel of one expert, a tile of columns at a time. Static and hashable: arrays are passed beside it.

    Attributes:
      shape: [i, o] of the kernel, or of the part of it that this device has.
    """

    shape: tuple[int, int]

    @property
    def adds_to_base(self) -> bool:
        """Whether a kernel is the base plus something that does not depend on it."""
        return True

    @abc.abstractmethod
    def tile(
        self, base: Float[Array, "i w"] | None, arrays: Stacked, start: Int[Array, ""] | int, width: int
    ) -> Float[Array, "i w"]:
        """Returns columns start ... start + width of the kernel, float32; differentiable in base and floating arrays.

        Args:
          base: these columns of the base, float32; None: there is none.
          arrays: of one expert, by name.
          start, width: which columns.
        """

    def product_of_rows(
        self, rows: Float[Array, "M i"], arrays: Stacked, expert: Int[Array, ""]
    ) -> Float[Array, "M o"] | None:
        """Returns the product of few rows with what is added to the base, or else the kernel; float32.

        No kernel is made for it, as on a CPU it would be written to memory and read again. None: there is no such way.

        Args:
          rows: of one expert.
          arrays: of all experts, by name.
          expert: which it is.
        """
        return None

    def fused(self) -> FusedTile | str:
        """Returns how tiles are made inside a TPU kernel, which adds them to the base; or why they are not."""
        return f"nothing says how those of {type(self).__name__} are made inside a Pallas kernel"

    def in_triton(self, arrays: Stacked) -> InTriton | None:
        """Returns how the kernel, or its difference from the base, is made in a Triton kernel; None: it cannot be.

        Args:
          arrays: of all experts, by name.
        """
        return None

    def thin_gradients(
        self, lhs: Array, dout: Array, arrays: Stacked, group_sizes: Array, products: "TritonProducts"
    ) -> Stacked | None:
        """Returns the trained arrays' gradients without gradients of whole kernels, float32; None: not possible.

        Args:
          lhs: rows sorted by group.
          dout: gradient of the product of the rows with the kernels.
          arrays: of all experts, by name.
          group_sizes: rows per group.
          products: the grouped products of the platform; see `kernels.gpu.grouped.TritonProducts`.
        """
        return None


class Operands(NamedTuple):
    """The arrays of a product with kernels that are made.

    Attributes:
      lhs: rows sorted by group.
      base: shared by all groups; None: there is none. A CPU may be given it as bits, for products alone
        (`few_rows.bfloat16_bits`).
      trained: floating-point arrays of the experts by name, stacked over the groups.
      fixed: arrays of the experts without a gradient by name, integer or frozen ones, stacked over the groups.
      group_sizes: rows per group, int32. Rows beyond their sum give zeros.
    """

    lhs: Float[Array, "M i"]
    base: Float[Array, "i o"] | UInt16[Array, "o i"] | None
    trained: Stacked
    fixed: Stacked
    group_sizes: Int[Array, " E"]

    def gradient_of_base(self, dout: Array) -> Float[Array, "i o"]:
        """Returns the gradient of a base that is part of all kernels: theirs sum to one product of all rows."""
        # Both: zero times what is not finite, as padding may be, is not zero.
        lhs, dout = (zero_rows_beyond(rows, jnp.sum(self.group_sizes)) for rows in (self.lhs, dout))
        return lax.dot_general(lhs, dout, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def synthesised_matmul(
    lhs: Float[Array, "M i"],
    base: Float[Array, "i o"] | None,
    trained: Stacked,
    fixed: Stacked,
    group_sizes: Int[Array, " E"],
    tiles: Tiles,
) -> Float[Array, "M o"]:
    """Returns `out[m] = lhs[m] @ kernel[group of row m]`.

    Kernels are made in float32 and rounded to the dtype of `lhs` for the product.

    Args:
      lhs, base, trained, fixed, group_sizes: see `Operands`.
      tiles: makes kernels of the base and the arrays.
    """
    out = jax.ShapeDtypeStruct((lhs.shape[0], tiles.shape[1]), lhs.dtype)
    product = _choose(tiles, lhs.dtype, out, loops=_looped_product, tpu=_fused_product, gpu=block_product)
    return product(Operands(lhs, base, trained, fixed, group_sizes))


def _forward(*arguments: Any) -> tuple:
    return checkpoint_name(synthesised_matmul(*arguments), PRODUCT), Operands(*arguments[:-1])


def _backward(tiles: Tiles, given: Operands, dout: Array) -> tuple:
    out = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), given[:3])
    backends = {"loops": _looped_gradients, "tpu": _fused_gradients, "gpu": block_gradients}
    return *_choose(tiles, given.lhs.dtype, out, **backends)(given, dout), None, None


synthesised_matmul.defvjp(_forward, _backward)


def _choose(
    tiles: Tiles, dtype: jnp.dtype, out: Any, *, loops: Callable[..., Any], tpu: Callable[..., Any], gpu: Any
) -> Callable[..., Any]:
    """Returns the one of these backends that the program calls on the platform that it is lowered for."""
    tile, fused = tiles.fused(), None
    if isinstance(tile, str):
        _say_why_not_fused(tile)
    else:
        fused = Bound(tpu, tile=tile, shape=tiles.shape)
    return by_platform(Bound(loops, tiles=tiles), dtype, out, tpu=fused, gpu=Bound(gpu, tiles=tiles))


@lru_cache(maxsize=64)
def _say_why_not_fused(reason: str) -> None:
    logger.info("kernels of experts are made by loops of XLA on TPU: %s", reason)


# ---- loops (CPU, and what has no kernel) ------------------------------------------------------------------------


def _looped_product(given: Operands, *, tiles: Tiles) -> Array:
    if not _multiplies_rows(tiles, given):
        return _product_with_tiles(given, tiles=tiles)
    ways = {"cpu": _product_by_group_size, "default": _product_with_tiles}
    return lax.platform_dependent(given, **{platform: partial(way, tiles=tiles) for platform, way in ways.items()})


def _product_with_tiles(given: Operands, *, tiles: Tiles) -> Array:
    return _looped_tiles(given, Groups.of(given.group_sizes), tiles=tiles)


def _looped_tiles(given: Operands, groups: Groups, *, tiles: Tiles) -> Array:
    lhs, base, trained, fixed, _ = given

    def kernel_of(e: Array) -> Callable[[Array, int], Array]:
        arrays, at = of_this_turn(trained | fixed, e)
        leaves = _expert(arrays, at)

        def tile(start: Array, width: int) -> Array:
            of_all, (_, first) = of_this_turn(base, (e, start))
            return tiles.tile(_base_tile(of_all, first, width), leaves, start, width).astype(lhs.dtype)

        return tile

    return looped_product(lhs, groups, tiles.shape[1], kernel_of)


def _multiplies_rows(tiles: Tiles, given: Operands) -> bool:
    row = jax.ShapeDtypeStruct((1, given.lhs.shape[1]), given.lhs.dtype)
    expert = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.eval_shape(tiles.product_of_rows, row, given.trained | given.fixed, expert) is not None


def _product_by_group_size(given: Operands, *, tiles: Tiles) -> Array:
    few = FEW_ROWS_ON_CPU if given.group_sizes.shape[0] > 1 else FEW_ROWS_OF_ONE_EXPERT
    return by_group_size(
        given.lhs,
        given.group_sizes,
        few,
        one_by_one=partial(_product_row_by_row, given, tiles=tiles),
        with_kernels=partial(_looped_tiles, given, tiles=tiles),
    )


def _product_row_by_row(given: Operands, groups: Groups, *, tiles: Tiles) -> Array:
    lhs, base, trained, fixed, _ = given

    def product(row: Array, e: Array) -> Array:
        arrays, at = of_this_turn(trained | fixed, e)
        own = tiles.product_of_rows(row, arrays, at)
        assert own is not None
        return own

    products = row_by_row(lhs, groups, tiles.shape[1], product)
    if base is not None:
        products = products + zero_rows_beyond(sums_in_float32(lhs, base), groups.rows)
    return products.astype(lhs.dtype)


def _looped_gradients(given: Operands, dout: Array, *, tiles: Tiles) -> tuple:
    lhs, base, trained, fixed, group_sizes = given
    rows, slack = lhs.shape[0], longest_tile(lhs.shape[0])
    starts, columns = jnp.cumsum(group_sizes) - group_sizes, tile_width(tiles.shape, rows)
    lhs_padded, dout_padded = (jnp.pad(a, ((0, slack), (0, 0))) for a in (lhs, dout))

    def group(e: Array, sums: tuple) -> tuple:
        # In float32, so that their gradients are too: a tile is float32 whatever it is made from.
        mine, others = jax.tree.map(_float32, _expert(trained, e)), _expert(fixed, e)

        def column_tile(start: Array, width: int, sums: tuple) -> tuple:
            dlhs, dbase, dtrained = sums
            base_tile = _base_tile(base, start, width)
            tile, tile_vjp = jax.vjp(
                lambda base_tile, arrays: tiles.tile(base_tile, arrays | others, start, width), base_tile, mine
            )
            kernel = tile.astype(lhs.dtype)

            def rows_of_group(count: int, offset: Array, sums: tuple) -> tuple:
                dlhs, dkernel = sums
                at = starts[e] + offset
                left = lax.dynamic_slice_in_dim(lhs_padded, at, count, 0)
                right = lax.dynamic_slice(dout_padded, (at, start), (count, width))
                left, right = (zero_rows_beyond(rows, group_sizes[e] - offset) for rows in (left, right))
                before = lax.dynamic_slice_in_dim(dlhs, at, count, 0)
                product = lax.dot_general(right, kernel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
                dlhs = lax.dynamic_update_slice_in_dim(dlhs, before + product, at, 0)
                if base is None and not trained:
                    return dlhs, dkernel
                outer = lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
                return dlhs, dkernel + outer

            zeros = jnp.zeros((tiles.shape[0], width), jnp.float32)
            dlhs, dkernel = over_tiles(group_sizes[e], rows, rows_of_group, (dlhs, zeros))
            dbase_tile, dmine = tile_vjp(dkernel)
            dtrained = jax.tree.map(lambda total, new: total.at[e].add(new), dtrained, dmine)
            if dbase is not None:
                columns = lax.dynamic_slice_in_dim(dbase, start, width, 1) + dbase_tile
                dbase = lax.dynamic_update_slice_in_dim(dbase, columns, start, 1)
            return dlhs, dbase, dtrained

        return when(group_sizes[e] > 0, partial(over_columns, columns, tiles.shape[1], column_tile), sums)

    dbase = None if base is None else jnp.zeros(tiles.shape, jnp.float32)
    # Sums over tiles of columns and of rows: float32 whatever the dtype of the rows and of the parameters.
    zeros = jnp.zeros(lhs_padded.shape, jnp.float32), dbase, jax.tree.map(_float32_zeros, trained)
    dlhs, dbase, dtrained = over_numbers(group_sizes.shape[0], group, zeros)
    dtrained = jax.tree.map(lambda total, array: total.astype(array.dtype), dtrained, trained)
    return dlhs[:rows].astype(lhs.dtype), None if base is None else dbase.astype(base.dtype), dtrained


def _base_tile(base: Array | None, start: Any, width: int) -> Float[Array, "i w"] | None:
    if base is None:
        return None
    if base.dtype == jnp.uint16:
        return widened(lax.dynamic_slice_in_dim(base, start, width, 0)).T
    return lax.dynamic_slice_in_dim(base, start, width, 1).astype(jnp.float32)


def _float32(array: Array) -> Array:
    return array.astype(jnp.float32)


def _float32_zeros(array: Array) -> Array:
    return jnp.zeros(array.shape, jnp.float32)


def _expert(stacked: Stacked, e: Array) -> Stacked:
    return {name: lax.dynamic_index_in_dim(array, e, 0, keepdims=False) for name, array in stacked.items()}


# ---- fused tiles (TPU) ------------------------------------------------------------------------------------------


def _fused_product(given: Operands, *, tile: FusedTile, shape: tuple[int, int], **options: Any) -> Array:
    from moe_jax.kernels.tpu.grouped_product import Kernels, grouped_product

    lhs, base, trained, fixed, group_sizes = given
    return grouped_product(lhs, Kernels(base, trained | fixed, tile), group_sizes, shape, **options)


def _fused_gradients(given: Operands, dout: Array, *, tile: FusedTile, **options: Any) -> tuple:
    lhs, base, trained, fixed, group_sizes = given
    dlhs = _fused_product(given._replace(lhs=dout), tile=tile, transposed=True, **options)
    dbase = None if base is None else given.gradient_of_base(dout).astype(base.dtype)
    del options["shape"]
    dtrained = tile.gradients(lhs, dout, trained | fixed, tuple(trained), group_sizes, **options)
    return dlhs, dbase, {name: dtrained[name].astype(array.dtype) for name, array in trained.items()}


# ---- NVIDIA GPUs ------------------------------------------------------------------------------------------------


def block_product(
    given: Operands, *, tiles: Tiles, capability: Capability | None, interpret: bool = False
) -> Float[Array, "M o"]:
    """Returns the synthesised product; see `synthesised_matmul`.

    Args:
      given: the arrays.
      tiles: makes kernels.
      capability: of the GPU; None: unknown.
      interpret: run kernels on any platform, slowly.
    """
    from moe_jax.kernels.gpu.grouped import TritonProducts

    lhs, base, trained, fixed, group_sizes = given
    products = TritonProducts(capability, interpret)
    fused = _in_triton(tiles, lhs.shape[0], trained | fixed, group_sizes)
    if fused is not None:
        return products.made_product(lhs, base, fused.arrays, group_sizes, fused.maker, tiles.shape)

    def block(out: Array, experts: Any) -> tuple[Array, None]:
        arrays, sizes, origin = experts
        kernels = _kernels(tiles, base, arrays).astype(lhs.dtype)
        return products.product(lhs, kernels, sizes, origin=origin, into=out), None

    out = jnp.zeros((lhs.shape[0], tiles.shape[1]), lhs.dtype)
    return lax.scan(block, out, _blocks(tiles.shape, trained | fixed, group_sizes))[0]


def block_gradients(
    given: Operands, dout: Float[Array, "M o"], *, tiles: Tiles, capability: Capability | None, interpret: bool = False
) -> tuple[Float[Array, "M i"], Float[Array, "i o"] | None, Stacked]:
    """Returns the gradients of `block_product` in the rows, the base and the trained arrays, in their dtypes.

    Args:
      given, tiles, capability, interpret: see `block_product`.
      dout: gradient of its result.
    """
    from moe_jax.kernels.gpu.grouped import TritonProducts

    lhs, base, trained, fixed, group_sizes = given
    products = TritonProducts(capability, interpret)
    dbase = given.gradient_of_base(dout) if base is not None and tiles.adds_to_base else None
    thin = tiles.thin_gradients(lhs, dout, trained | fixed, group_sizes, products) if trained else {}
    sums_base = base is not None and dbase is None
    has_outer = sums_base or thin is None
    fused = _in_triton(tiles, lhs.shape[0], trained | fixed, group_sizes)
    dlhs = jnp.zeros(lhs.shape, lhs.dtype)
    if fused is not None:
        arguments = dout, base, fused.arrays, group_sizes, fused.maker, tiles.shape
        dlhs = products.made_product(*arguments, transposed=True)

    def block(sums: tuple[Array, Array | None], experts: Any) -> tuple[tuple[Array, Array | None], Stacked | None]:
        (dlhs, dbase), (arrays, sizes, origin) = sums, experts
        own = {name: array.astype(jnp.float32) if name in trained else array for name, array in arrays.items()}
        moving = {name: own.pop(name) for name in trained}

        def make(base: Array | None, moving: Stacked) -> Array:
            return _kernels(tiles, base, own | moving)

        kernels, pull = jax.vjp(make, None if base is None else base.astype(jnp.float32), moving)
        if fused is None:
            kernels = kernels.astype(lhs.dtype)
            dlhs = products.product(dout, kernels, sizes, transposed=True, origin=origin, into=dlhs)
        if not has_outer:
            return (dlhs, dbase), None
        new_base, dmoving = pull(products.outer(lhs, dout, sizes, origin=origin, dtype=jnp.float32))
        return (dlhs, None if dbase is None else dbase + new_base), dmoving if thin is None else None

    sum_of_bases, dtrained = jnp.zeros(tiles.shape, jnp.float32) if sums_base else None, None
    if fused is None or has_outer:
        blocks = _blocks(tiles.shape, trained | fixed, group_sizes)
        (dlhs, sum_of_bases), dtrained = lax.scan(block, (dlhs, sum_of_bases), blocks)
    if dbase is None:
        dbase = sum_of_bases
    dtrained = dtrained if thin is None else thin
    assert dtrained is not None
    own = {name: dtrained[name].reshape(array.shape).astype(array.dtype) for name, array in trained.items()}
    return dlhs, None if base is None or dbase is None else dbase.astype(base.dtype), own


def _in_triton(tiles: Tiles, rows: int, arrays: Stacked, group_sizes: Array) -> InTriton | None:
    """Returns how kernels are made in a Triton kernel; None: making them in blocks is better, or the only way."""
    found = tiles.in_triton(arrays)
    few = rows <= FEW_ROWS * group_sizes.shape[0]
    return found if found is not None and (found.is_cheap or few) else None


def _kernels(tiles: Tiles, base: Array | None, arrays: Stacked) -> Float[Array, "B i o"]:
    """Returns the kernels of a block, float32."""
    base = None if base is None else base.astype(jnp.float32)
    count = next(iter(arrays.values())).shape[0]
    if count == 1:
        return tiles.tile(base, {name: array[0] for name, array in arrays.items()}, 0, tiles.shape[1])[None]
    return jax.vmap(lambda own: tiles.tile(base, own, 0, tiles.shape[1]))(arrays)


def _blocks(shape: tuple[int, int], arrays: Stacked, group_sizes: Array) -> tuple[Stacked, Array, Array]:
    """Returns arrays and group sizes with an axis of blocks in front, and the first row of every block."""
    size = experts_per_block(group_sizes.shape[0], shape)
    starts = jnp.cumsum(group_sizes) - group_sizes
    split = {name: array.reshape(-1, size, *array.shape[1:]) for name, array in arrays.items()}
    return split, group_sizes.reshape(-1, size), starts[::size]


def experts_per_block(experts: int, shape: tuple[int, int]) -> int:
    """Returns the largest divisor of `experts` such that a block's kernels have at most `BLOCK_ENTRIES` entries."""
    most = max(1, BLOCK_ENTRIES // (shape[0] * shape[1]))
    return max(size for size in range(1, min(most, experts) + 1) if experts % size == 0)
