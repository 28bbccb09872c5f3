"""Products with kernels that are made tile by tile, against kernels that are stored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.experts.forms import LowRank, Quantized, Sparse
from moe_jax.experts.forms.optional import FormTiles
from moe_jax.experts.forms.sparse import encode_positions, to_csr
from moe_jax.functional import group_loops
from moe_jax.functional.codes import codes_shape, pack, scales_shape
from moe_jax.functional.sparse.by_entry import grouped_sparse_matmul
from moe_jax.functional.synthesis import synthesised_matmul
from tests.support.numerics import assert_close
from tests.support.tiers import one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

GROUPS, SHAPE, ROWS, ENTRIES = 3, (16, 128), 21, 70


def random(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def delta(kind):
    """What makes tiles, and trained and fixed arrays of random deltas."""
    rng = np.random.default_rng(0)
    if kind == "low-rank":
        arrays = {"a": random(rng, GROUPS, SHAPE[0], 3), "b": random(rng, GROUPS, 3, SHAPE[1])}
        return FormTiles(LowRank(rank=3), SHAPE, SHAPE), arrays, {}
    if kind == "sparse":
        positions = [np.sort(rng.choice(SHAPE[0] * SHAPE[1], ENTRIES, replace=False)) for _ in range(GROUPS)]
        packed = zip(*(to_csr(p, SHAPE) for p in positions), strict=True)
        columns, ends = (jnp.asarray(np.stack(part)) for part in packed)
        tiles = FormTiles(Sparse(rate=0.9), SHAPE, SHAPE)
        return tiles, {"values": random(rng, GROUPS, ENTRIES)}, {"columns": columns, "row_ends": ends}
    codes = jnp.asarray(rng.integers(0, 256, (GROUPS, *codes_shape(SHAPE, 4))), jnp.uint8)
    tiles = FormTiles(Quantized(bits=4, group_size=8), SHAPE, SHAPE)
    return tiles, {"scales": random(rng, GROUPS, *scales_shape(SHAPE, 8))}, {"codes": codes}


def stored(tiles, trained, fixed, base):
    """All kernels, and a last one of zeros for rows in no group."""
    experts = [{name: array[e] for name, array in (trained | fixed).items()} for e in range(GROUPS)]
    kernels = [tiles.tile(base, arrays, 0, SHAPE[1]) for arrays in experts]
    return jnp.stack([*kernels, jnp.zeros(SHAPE, jnp.float32)])


@functools.cache
def program(kind, columns, reference):
    """`columns` of a tile, which the test sets, are part of the program."""
    tiles, _, fixed = delta(kind)

    def value(lhs, base, trained, sizes, target):
        if reference:
            group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(ROWS, dtype=jnp.int32), side="right")
            y = jnp.einsum("mi,mio->mo", lhs, stored(tiles, trained, fixed, base)[group])
        else:
            y = synthesised_matmul(lhs, base, trained, fixed, sizes, tiles)
        return jnp.sum(y * target), y

    return jax.jit(jax.grad(value, argnums=(0, 1, 2), has_aux=True))


def spoiled(rows, sizes):
    """Rows of no group that are not finite, as padding may be."""
    return jnp.where(np.arange(ROWS)[:, None] < sum(sizes), rows, jnp.nan)


group_sizes = st.lists(st.integers(0, ROWS // GROUPS), min_size=GROUPS, max_size=GROUPS)


@one_in(4)
@pytest.mark.parametrize("columns", [128, 64, 48], ids=["one tile", "equal tiles", "a narrower last tile"])
@pytest.mark.parametrize("kind", ["low-rank", "sparse", "quantized"])
def test_synthesised_product_and_gradient(kind, columns, monkeypatch):
    monkeypatch.setattr(group_loops, "TILE_ENTRIES_FOR_FEW", SHAPE[0] * columns)
    assert group_loops.tile_width(SHAPE, ROWS) == columns
    trained = delta(kind)[1]

    @settings(max_examples=10)
    @given(group_sizes, st.integers(0, 99))
    def check(sizes, seed):
        rng = np.random.default_rng(seed)
        lhs, data = random(rng, ROWS, SHAPE[0]), (random(rng, *SHAPE), trained, jnp.asarray(sizes, jnp.int32))
        target = random(rng, ROWS, SHAPE[1])
        expected = program(kind, columns, True)(lhs, *data, target)
        got = program(kind, columns, False)(spoiled(lhs, sizes), *data, target)
        assert_close(got, expected)

    check()


@settings(max_examples=10)
@given(group_sizes, st.integers(0, 99))
def test_entrywise_product_and_gradient(sizes, seed):
    _, trained, _ = delta("sparse")
    rng = np.random.default_rng(seed)
    lhs, target = random(rng, ROWS, SHAPE[0]), random(rng, ROWS, SHAPE[1])
    got = entrywise()(spoiled(lhs, sizes), trained["values"], jnp.asarray(sizes, jnp.int32), target)
    gradients, y = program("sparse", SHAPE[1], True)(
        lhs, jnp.zeros(SHAPE, jnp.float32), trained, jnp.asarray(sizes, jnp.int32), target
    )
    assert_close(got, ((gradients[0], gradients[2]["values"]), y))


@functools.cache
def entrywise():
    _, _, fixed = delta("sparse")

    def value(lhs, values, sizes, target):
        y = grouped_sparse_matmul(lhs, values, fixed, sizes, SHAPE[1])
        return jnp.sum(y * target), y

    return jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))


def relative_error(got, expected):
    got = np.asarray(got.astype(jnp.float32), np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def in_bfloat16(rng, *shape):
    """Random numbers, and the same exactly in float64."""
    array = random(rng, *shape).astype(jnp.bfloat16)
    return array, np.asarray(array.astype(jnp.float32), np.float64)


@pytest.mark.parametrize("tiles", [1, 8, 64])
def test_rounding_does_not_grow_with_the_number_of_tiles(tiles, monkeypatch):
    """Sums over tiles are float32: what is left in bfloat16 is one rounding, of 2^-8 at most."""
    rng, (fan_in, fan_out) = np.random.default_rng(0), (8, 1024)
    monkeypatch.setattr(group_loops, "TILE_ENTRIES_FOR_FEW", fan_in * fan_out // tiles)
    assert group_loops.tile_width((fan_in, fan_out), ROWS) == fan_out // tiles
    (lhs, x), (base, w), (dout, dy) = (
        in_bfloat16(rng, *s) for s in ((ROWS, fan_in), (fan_in, fan_out), (ROWS, fan_out))
    )
    (a, a64), (b, b64) = in_bfloat16(rng, 1, fan_in, 4), in_bfloat16(rng, 1, 4, fan_out)
    shape, sizes = (fan_in, fan_out), jnp.full(1, ROWS, jnp.int32)
    tiles = FormTiles(LowRank(rank=a.shape[-1]), shape, shape)

    @jax.jit
    def gradients(lhs, trained, dout):
        return jax.vjp(lambda lhs, trained: synthesised_matmul(lhs, base, trained, {}, sizes, tiles), lhs, trained)[1](
            dout
        )

    dlhs, dtrained = gradients(lhs, {"a": a, "b": b}, dout)
    assert dlhs.dtype == dtrained["a"].dtype == jnp.bfloat16
    outer = x.T @ dy
    assert relative_error(dlhs, dy @ (w + a64[0] @ b64[0]).T) < 0.003
    assert relative_error(dtrained["a"][0], outer @ b64[0].T) < 0.003
    assert relative_error(dtrained["b"][0], a64[0].T @ outer) < 0.003


def test_rounding_does_not_grow_with_the_entries_and_rows_of_a_sparse_delta():
    rng, shape, entries, rows = np.random.default_rng(0), (8, 64), 400, 2048
    (lhs, x), (values, v), (dout, dy) = (
        in_bfloat16(rng, *s) for s in ((rows, shape[0]), (1, entries), (rows, shape[1]))
    )
    positions = np.sort(rng.choice(np.prod(shape), entries, replace=False))
    columns, row_ends = (jnp.asarray(places)[None] for places in to_csr(positions, shape))
    fixed, sizes = {"columns": columns, "row_ends": row_ends}, jnp.full(1, rows, jnp.int32)
    kernel = np.zeros(shape)
    kernel.reshape(-1)[positions] = v[0]

    @jax.jit
    def product_and_gradients(lhs, values, dout):
        y, vjp = jax.vjp(lambda lhs, values: grouped_sparse_matmul(lhs, values, fixed, sizes, shape[1]), lhs, values)
        return y, *vjp(dout)

    y, dlhs, dvalues = product_and_gradients(lhs, values, dout)
    assert y.dtype == dlhs.dtype == dvalues.dtype == jnp.bfloat16
    assert relative_error(y, x @ kernel) < 0.003
    assert relative_error(dlhs, dy @ kernel.T) < 0.003
    assert relative_error(dvalues[0], (x.T @ dy).reshape(-1)[positions]) < 0.003


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["csr", "coo", "bitmap"]), st.integers(1, 9), st.integers(1, 40), st.integers(0, 999))
def test_sparse_tiles_hold_the_entries_of_their_part(encoding, rows, columns, seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, rows * columns + 1))
    positions = np.sort(rng.choice(rows * columns, count, replace=False))
    values = rng.standard_normal(count).astype(np.float32)
    dense = np.zeros((rows, columns), np.float32)
    dense.reshape(-1)[positions] = values
    leaves = {name: jnp.asarray(leaf) for name, leaf in encode_positions(positions, dense.shape, encoding).items()}
    leaves["values"] = jnp.asarray(values)

    top, left = int(rng.integers(rows)), int(rng.integers(columns))
    part = dense[top:, left:]
    start = int(rng.integers(part.shape[1]))
    width = int(rng.integers(1, part.shape[1] - start + 1))
    tiles = FormTiles(Sparse(rate=0.5, encoding=encoding), part.shape, dense.shape)
    leaves["origin"] = jnp.asarray([top, left], jnp.int32)
    tile = jax.jit(lambda leaves: tiles.tile(None, leaves, start, width))(leaves)
    np.testing.assert_array_equal(tile, part[:, start : start + width])


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([8, 4, 3, 2]), st.sampled_from([None, 8]), st.integers(1, 40), st.integers(0, 99))
def test_quantised_values_of_sparse_deltas(bits, group_size, count, seed):
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, 2**bits, count)
    scales = rng.uniform(-1, 1, 1 if group_size is None else -(-count // group_size)).astype(np.float32)
    codes = jax.jit(lambda drawn: pack(drawn[:, None], bits)[:, 0])(jnp.asarray(drawn, jnp.int32))
    form = Sparse(rate=0.5, encoding="coo", bits=bits, group_size=group_size)
    leaves = {"value_codes": codes, "value_scales": jnp.asarray(scales), "columns": jnp.zeros(count, jnp.uint16)}
    values = jax.jit(form.values)(leaves)
    per_value = np.repeat(scales, count if group_size is None else group_size)[:count]
    levels = 2 * drawn + 1 - 2**bits - (per_value < 0)
    np.testing.assert_array_equal(values, levels.astype(np.float32) * per_value)


@pytest.mark.parametrize("given", ["no base", "nothing trained"])
def test_gradients_where_there_is_no_base_or_nothing_else_is_trained(given):
    tiles, trained, fixed = delta("quantized")
    rng, sizes = np.random.default_rng(1), jnp.asarray([5, 0, 9], jnp.int32)
    lhs, base, target = random(rng, ROWS, SHAPE[0]), random(rng, *SHAPE), random(rng, ROWS, SHAPE[1])
    if given == "no base":
        base = None
    else:
        trained, fixed = {}, trained | fixed

    def value(differentiated, reference):
        base, trained = differentiated
        if reference:
            group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(ROWS, dtype=jnp.int32), side="right")
            y = jnp.einsum("mi,mio->mo", lhs, stored(tiles, trained, fixed, base)[group])
        else:
            y = synthesised_matmul(lhs, base, trained, fixed, sizes, tiles)
        return jnp.sum(y * target)

    got, expected = (
        jax.jit(jax.grad(value), static_argnums=1)((base, trained), reference) for reference in (False, True)
    )
    assert_close(got, expected)
