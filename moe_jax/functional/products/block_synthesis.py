"""The synthesised product on GPUs.

It has no loops of dynamic length, as other platforms have: on a GPU each turn of one asks the host, and a tile that
suits the cache of a CPU is too little work.

- Some forms of experts have tiles that a Triton kernel makes where it multiplies with them (`Tiles.in_triton`). Every
  program makes its own tile: this is best where making it is little work, or where an expert has few rows.
- Otherwise XLA makes whole kernels for a block of experts, and a grouped kernel multiplies with them, block by block.
  The number of blocks is static. Only the kernels of one block, and their gradient in float32, exist at a time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.kernels.ragged_dot import zero_rows_beyond

# Entries of the kernels of a block, which has at least one expert: 128 MiB in bfloat16. An H100 writes them in 40
# microseconds, many times the time that it takes to start a kernel.
BLOCK_ENTRIES = 1 << 26

# If an expert has more rows than this on average, kernels that are expensive to make are made in blocks: otherwise they
# would be made again for every 128 rows.
FEW_ROWS = 128

Stacked = dict[str, Array]


class InTriton(NamedTuple):
    """How the experts' own kernels are made in a Triton kernel.

    Attributes:
      maker: a `kernels.gpu.triton_grouped.Maker`.
      arrays: the arrays that it reads.
      is_cheap: making a kernel costs little beside the product, so that it may be repeated for every tile of rows.
    """

    maker: Any
    arrays: Sequence[Array]
    is_cheap: bool


class Tiles(Protocol):
    """The part of `functional.products.synthesis.Tiles` that this module needs; documented there."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def adds_to_base(self) -> bool: ...

    def tile(self, base: Array | None, arrays: Stacked, start: int, width: int) -> Array: ...

    def thin_gradients(
        self, lhs: Array, dout: Array, arrays: Stacked, group_sizes: Array, products: Any
    ) -> Stacked | None: ...

    def in_triton(self, arrays: Stacked) -> InTriton | None: ...


class Products(Protocol):
    """Grouped products; documented in `kernels.gpu.grouped.TritonProducts`."""

    def product(
        self,
        lhs: Array,
        rhs: Array,
        group_sizes: Array,
        *,
        transposed: bool = False,
        origin: Array | None = None,
        into: Array | None = None,
    ) -> Array: ...

    def made_product(
        self,
        lhs: Array,
        base: Array | None,
        arrays: Sequence[Array],
        group_sizes: Array,
        maker: Any,
        shape: tuple[int, int],
        *,
        transposed: bool = False,
    ) -> Array: ...

    def outer(
        self, lhs: Array, dout: Array, group_sizes: Array, *, origin: Array | None = None, dtype: Any = None
    ) -> Array: ...


def block_product(
    lhs: Float[Array, "M i"],
    base: Float[Array, "i o"] | None,
    trained: Stacked,
    fixed: Stacked,
    group_sizes: Int[Array, " E"],
    *,
    tiles: Tiles,
    products: Products,
) -> Float[Array, "M o"]:
    """Returns the synthesised product; see `functional.products.synthesis.synthesised_matmul`.

    Args:
      lhs, base, trained, fixed, group_sizes: as `synthesised_matmul` takes them.
      tiles: makes kernels.
      products: multiplies with them.
    """

    fused = _fused(tiles, lhs.shape[0], trained | fixed, group_sizes)
    if fused is not None:
        return products.made_product(lhs, base, fused.arrays, group_sizes, fused.maker, tiles.shape)

    def block(out: Array, experts: Any) -> tuple[Array, None]:
        arrays, sizes, origin = experts
        kernels = _kernels(tiles, base, arrays).astype(lhs.dtype)
        return products.product(lhs, kernels, sizes, origin=origin, into=out), None

    out = jnp.zeros((lhs.shape[0], tiles.shape[1]), lhs.dtype)
    return lax.scan(block, out, _blocks(tiles.shape, trained | fixed, group_sizes))[0]


def block_gradients(
    lhs: Float[Array, "M i"],
    base: Float[Array, "i o"] | None,
    trained: Stacked,
    fixed: Stacked,
    group_sizes: Int[Array, " E"],
    dout: Float[Array, "M o"],
    *,
    tiles: Tiles,
    products: Products,
) -> tuple[Float[Array, "M i"], Float[Array, "i o"] | None, Stacked]:
    """Returns the gradients of `block_product` in the rows, the base and the trained arrays, in their dtypes.

    Args:
      lhs, base, trained, fixed, group_sizes, tiles, products: see `block_product`.
      dout: gradient of its result.
    """
    dbase = None
    if base is not None and tiles.adds_to_base:
        # Kernels are the base plus the experts' own parts: the gradients of all kernels sum to one product.
        inside = zero_rows_beyond(dout, jnp.sum(group_sizes))
        dbase = lax.dot_general(lhs, inside, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    thin = tiles.thin_gradients(lhs, dout, trained | fixed, group_sizes, products) if trained else {}
    sums_base = base is not None and dbase is None
    has_outer = sums_base or thin is None
    fused = _fused(tiles, lhs.shape[0], trained | fixed, group_sizes)
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


def _fused(tiles: Tiles, rows: int, arrays: Stacked, group_sizes: Array) -> InTriton | None:
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
