"""The synthesised product block by block against one product for every row; the interpreter runs Triton's products."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_jax.experts.forms import LowRank, Quantized
from moe_jax.experts.forms.optional import FormTiles
from moe_jax.experts.forms.sparse import to_csr
from moe_jax.functional import synthesis
from moe_jax.functional.codes import codes_shape, scales_shape
from moe_jax.functional.sparse import by_entry
from moe_jax.functional.sparse.by_entry import EntryTiles
from moe_jax.functional.synthesis import (
    Operands,
    Tiles,
    block_gradients,
    block_product,
    experts_per_block,
    synthesised_matmul,
)
from tests.support.environment import INTERPRET
from tests.support.numerics import assert_close
from tests.support.tiers import one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

EXPERTS, SHAPE, ROWS = 4, (16, 24), 21


class Scaled(Tiles):
    """`W diag(s)`: what it adds to the base depends on the base."""

    shape, adds_to_base = SHAPE, False

    def tile(self, base, arrays, start, width):
        return base * arrays["s"][None, start : start + width]


class ByBlocks(FormTiles):
    """Without a tile in Triton."""

    def in_triton(self, arrays):
        return None


def random(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def experts(kind):
    """What makes tiles, whether there is a base, and trained and fixed arrays."""
    rng = np.random.default_rng(0)
    if kind == "low-rank":
        arrays = {"a": random(rng, EXPERTS, SHAPE[0], 3), "b": random(rng, EXPERTS, 3, SHAPE[1])}
        return FormTiles(LowRank(rank=3), SHAPE, SHAPE), arrays, {}
    if kind == "scaled":
        return Scaled(), {"s": random(rng, EXPERTS, SHAPE[1])}, {}
    if kind == "entries":
        positions = [np.sort(rng.choice(SHAPE[0] * SHAPE[1], 50, replace=False)) for _ in range(EXPERTS)]
        columns, row_ends = (np.stack(part) for part in zip(*(to_csr(p, SHAPE) for p in positions), strict=True))
        fixed = {"columns": jnp.asarray(columns), "row_ends": jnp.asarray(row_ends)}
        return EntryTiles(SHAPE), {"values": random(rng, EXPERTS, 50)}, fixed
    codes = jnp.asarray(rng.integers(0, 256, (EXPERTS, *codes_shape(SHAPE, 2))), jnp.uint8)
    scales = random(rng, EXPERTS, *scales_shape(SHAPE, 8))
    return ByBlocks(Quantized(bits=2, group_size=8), SHAPE, SHAPE), {"scales": scales}, {"codes": codes}


def each(arrays):
    return [{name: array[e] for name, array in arrays.items()} for e in range(EXPERTS)]


@cache
def programs(kind):
    """Values and gradients by blocks of two experts (low-rank ones in Triton), and by one product for every row."""
    tiles, trained, fixed = experts(kind)
    options = {"tiles": tiles, "capability": None, "interpret": INTERPRET}

    @jax.jit
    def by_blocks(lhs, base, sizes, dout):
        given = Operands(lhs, base, trained, fixed, sizes)
        return block_product(given, **options), block_gradients(given, dout, **options)

    @jax.jit
    def by_rows(lhs, base, sizes, dout):
        def product(lhs, base, trained):
            kernels = [tiles.tile(base, own, 0, SHAPE[1]) for own in each(trained | fixed)]
            group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(ROWS, dtype=jnp.int32), side="right")
            return jnp.einsum("mi,mio->mo", lhs, jnp.stack([*kernels, jnp.zeros(SHAPE)])[group])

        y, pull = jax.vjp(product, lhs, base, trained)
        return y, pull(dout)

    return by_blocks, by_rows


@one_in(2)
@pytest.mark.parametrize("kind", ["low-rank", "quantized", "scaled", "entries"])
def test_values_and_gradients(kind, monkeypatch):
    monkeypatch.setattr(synthesis, "BLOCK_ENTRIES", 2 * SHAPE[0] * SHAPE[1])
    assert experts_per_block(EXPERTS, SHAPE) == 2
    by_blocks, by_rows = programs(kind)

    @settings(max_examples=5)
    @given(cuts=st.lists(st.integers(0, ROWS), min_size=EXPERTS, max_size=EXPERTS), seed=st.integers(0, 99))
    @example(cuts=[0] * EXPERTS, seed=0)
    @example(cuts=[0, ROWS, ROWS, ROWS], seed=0)
    def check(cuts, seed):
        rng = np.random.default_rng(seed)
        sizes = jnp.asarray(np.diff(np.sort(cuts), prepend=0), jnp.int32)
        data = random(rng, ROWS, SHAPE[0]), random(rng, *SHAPE), sizes, random(rng, ROWS, SHAPE[1])
        assert_close(by_blocks(*data), by_rows(*data))

    check()


@pytest.mark.parametrize("kind", ["low-rank", "scaled"])
def test_bfloat16_rounds_kernels_and_results_alone(kind):
    (by_blocks, by_rows), rng = programs(kind), np.random.default_rng(0)
    exact = [random(rng, *shape) for shape in ((ROWS, SHAPE[0]), SHAPE, (ROWS, SHAPE[1]))]
    lhs, base, dout = (array.astype(jnp.bfloat16) for array in exact)
    sizes = jnp.asarray([9, 0, 5, 7], jnp.int32)
    got = by_blocks(lhs, base, sizes, dout)
    expected = by_rows(*(array.astype(jnp.float32) for array in (lhs, base)), sizes, dout.astype(jnp.float32))
    assert got[0].dtype == got[1][0].dtype == got[1][1].dtype == jnp.bfloat16
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        error = jnp.linalg.norm((one.astype(jnp.float32) - other).reshape(-1)) / jnp.linalg.norm(other.reshape(-1))
        # Rounding is 0.0017 of the norm, and of two factors of a product together 0.0024.
        assert error < 0.003


def test_gpus_are_given_blocks_forwards_and_backwards():
    tiles, trained, fixed = experts("quantized")
    lhs, base = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, SHAPE[0]), SHAPE))
    sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)

    def value(lhs, base, trained, sizes):
        return jnp.sum(synthesised_matmul(lhs, base, trained, fixed, sizes, tiles) ** 2)

    # The kernels of a block of experts, beside each other, are made on GPUs alone.
    kernels = f"tensor<{EXPERTS}x{SHAPE[0]}x{SHAPE[1]}xf32>"

    def made(function, platform) -> int:
        traced = jax.jit(function).trace(lhs, base, trained, sizes)
        return traced.lower(lowering_platforms=(platform,)).as_text().count(kernels)

    backwards = jax.grad(value, argnums=(0, 1, 2))
    assert 0 < made(value, "cuda") < made(backwards, "cuda")
    assert made(value, "cpu") == made(backwards, "cpu") == 0


def test_blocks_hold_a_bounded_number_of_entries():
    assert experts_per_block(8, (4096, 14336)) == 1
    assert experts_per_block(64, (2048, 1024)) == 32
    assert experts_per_block(60, (2048, 1408)) == 20
    assert experts_per_block(7, (16, 16)) == 7


def test_entries_as_gpus_make_them_are_those_of_the_loops(monkeypatch):
    for function in (block_product, block_gradients):
        monkeypatch.setattr(by_entry, function.__name__, partial(function, interpret=INTERPRET))
    (_, trained, positions), rng = experts("entries"), np.random.default_rng(0)
    lhs, dout, sizes = random(rng, ROWS, SHAPE[0]), random(rng, ROWS, SHAPE[1]), jnp.asarray([9, 0, 5, 7], jnp.int32)
    given, options = (lhs, trained["values"], positions, sizes), {"width": SHAPE[1]}

    def together(product, gradients, **more):
        return jax.jit(lambda *given: (product(*given[:4], **more), gradients(*given, **more)))(*given, dout)

    loops = together(by_entry._looped_product, by_entry._looped_gradients, **options)
    blocks = together(by_entry._gpu_product, by_entry._gpu_gradients, **options, capability=None)
    assert_close(blocks, loops)
