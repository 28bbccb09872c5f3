"""Every format of quantised kernels against its description in float64: tiles, gradients, banks over meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import leaf_spec, make_mesh, path_name
from moe_jax.experts import BankConfig, FFNConfig, make_bank
from moe_jax.experts.forms import Quantized
from moe_jax.experts.shapes import Matrix, Window
from moe_jax.functional import synthesis
from moe_jax.functional.few_rows import blocks, packed_codes
from moe_jax.functional.routing.token_choices import Routing
from tests.experts.code_reference import decoded
from tests.support.numerics import assert_close, normal, randomised
from tests.support.tiers import examples, long, one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

FORMATS = {
    "a table": Quantized(bits=3, group_size=16, table=True),
    "a table for one scale": Quantized(bits=2, table=True),
    "a table of 16": Quantized(bits=4, group_size=8, table=True),
    "8-bit scales": Quantized(bits=3, group_size=8, scale_bits=8),
    "8-bit scales of signs": Quantized(bits=1, group_size=16, scale_bits=8),
    "zero points": Quantized(bits=4, group_size=8, zero_points=True),
    "zero points and 8-bit scales": Quantized(bits=3, group_size=16, zero_points=True, scale_bits=8),
    "signs with zero points": Quantized(bits=1, group_size=8, zero_points=True),
    "row scales": Quantized(bits=3, group_size=8, row_scales=True),
    "signs with row scales": Quantized(bits=1, group_size=16, row_scales=True, scale_bits=8),
    "both": Quantized(bits=2, group_size=16, table=True, scale_bits=8),
}


def random_leaves(form, matrix, seed, stack=()):
    """Leaves of the shapes and dtypes that a fresh kernel has."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32).astype(leaf.dtype)
        kind = np.iinfo(leaf.dtype)
        return jnp.asarray(rng.integers(kind.min, kind.max, leaf.shape, endpoint=True), leaf.dtype)

    fresh = jax.eval_shape(lambda: form.fresh(nnx.Rngs(0), matrix, stack, jnp.dtype(jnp.float32)))
    return {name: draw(leaf) for name, leaf in fresh.items()}


@settings(max_examples=examples(8), deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 50), st.integers(1, 7), st.integers(0, 99))
def test_kernels_are_what_the_format_says(name, rows, columns, seed):
    form, matrix = FORMATS[name], Matrix("up", (rows, columns))
    leaves = random_leaves(form, matrix, seed)
    expected = decoded(leaves, form, rows)
    np.testing.assert_allclose(form.materialise(None, leaves, matrix), expected, rtol=1e-6, atol=1e-7)


PLAIN = {f"{bits} bits": Quantized(bits=bits, group_size=8) for bits in (1, 2, 3, 4, 8)} | {"one": Quantized(bits=3)}


@settings(max_examples=examples(8), deadline=None)
@given(
    st.sampled_from(sorted(FORMATS | PLAIN)),
    st.integers(1, 7).map(lambda blocks: 8 * blocks),
    st.integers(1, 7),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_few_rows_need_no_kernel(name, size, columns, count, seed):
    """The sums may be rounded in any order."""
    form, matrix = (FORMATS | PLAIN)[name], Matrix("up", (size, columns))
    leaves = random_leaves(form, matrix, seed, (2,))
    rows = normal(seed, count, size)
    expected = decoded({name: leaf[1] for name, leaf in leaves.items()}, form, size)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blocks, "_TILE_BYTES", size)
        got = jax.jit(form.product_of_rows)(rows, leaves, jnp.int32(1))
    wide = np.asarray(rows, np.float64)
    # Of levels and scales: a zero point may cancel what it is taken from.
    largest = 2 ** (form.bits + 1) * np.max(np.abs(expected), initial=0) + 2 ** (form.bits + 1)
    np.testing.assert_allclose(got, wide @ expected, atol=2.0**-22 * size * float(np.max(np.abs(wide))) * largest)


def test_blocks_lie_within_groups():
    assert [packed_codes.rows_of_block(*given) for given in ((64, 32), (64, None), (40, 24), (172, 64))] == [
        16,
        16,
        8,
        None,
    ]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad):
    """No other row has a part in it."""
    form, matrix = Quantized(bits=4, group_size=64), Matrix("up", (128, 5))
    rows, sizes = normal(0, 2, 128).at[1, 70].set(bad), jnp.asarray([2], jnp.int32)
    got = form.grouped(rows, random_leaves(form, matrix, 1, (1,)), sizes, matrix)
    np.testing.assert_array_equal(np.isfinite(got), [[True] * 5, [False] * 5])


@pytest.mark.parametrize(("rows", "made"), [(2, False), (6, False), (7, True), (12, True)])
def test_few_rows_are_multiplied_with_codes(rows, made, monkeypatch):
    """The kernels of experts are made where a group may have many rows; of one row, both ways give the same."""
    form, matrix = Quantized(bits=4, group_size=64), Matrix("up", (192, 40))
    leaves, x, sizes = (
        random_leaves(form, matrix, 3, (3,)),
        normal(4, rows, 192),
        jnp.asarray([1, 0, rows - 1], jnp.int32),
    )

    def product(x):
        return form.grouped(x, leaves, sizes, matrix)

    tiles = []
    tile = Quantized.tile
    monkeypatch.setattr(Quantized, "tile", lambda *given: tiles.append(given) or tile(*given))
    got = product(x)
    assert bool(tiles) == made
    monkeypatch.setattr(synthesis, "FEW_ROWS_ON_CPU", 0)
    assert_close(got, product(x))


@pytest.mark.parametrize(("rows", "made"), [(1, False), (4, False), (5, True)])
def test_few_rows_of_one_kernel_are_multiplied_with_codes(rows, made, monkeypatch):
    """Rows beyond the only group give zeros either way."""
    form, matrix = Quantized(bits=4, group_size=64), Matrix("up", (192, 40))
    leaves, x = random_leaves(form, matrix, 3, (1,)), normal(4, rows, 192)
    tiles = []
    tile = Quantized.tile
    monkeypatch.setattr(Quantized, "tile", lambda *given: tiles.append(given) or tile(*given))
    got = form.grouped(x, leaves, jnp.asarray([rows - 1], jnp.int32), matrix)
    assert bool(tiles) == made
    kernel = form.materialise(None, {name: leaf[0] for name, leaf in leaves.items()}, matrix)
    assert_close(got, jnp.where(jnp.arange(rows)[:, None] < rows - 1, x @ kernel, 0), tolerance=1e-5)


def test_codes_of_few_rows_are_multiplied_as_they_are_on_a_cpu_alone():
    form, matrix = Quantized(bits=4, group_size=64, zero_points=True), Matrix("up", (128, 5))
    leaves = random_leaves(form, matrix, 1, (3,))

    def product(x, sizes):
        return form.grouped(x, leaves, sizes, matrix)

    traced = jax.jit(product).trace(normal(0, 2, 128), jnp.asarray([2, 0, 0], jnp.int32))
    for platform in ("cpu", "tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert any(kernel in text for kernel in ("tensor<128x5xf32>", "custom_call")) == (platform != "cpu")


@pytest.mark.parametrize("name", ["2 bits", "3 bits", "4 bits", "a table of 16", "zero points", "8-bit scales"])
@pytest.mark.parametrize("size", [64, 4096])
def test_codes_are_not_unpacked_into_memory(name, size):
    """Sums over blocks of 8 or 16 rows are all that is written of a kernel, however many rows it has."""
    form, matrix = (FORMATS | PLAIN)[name], Matrix("up", (size, 256))
    form = dataclasses.replace(form, group_size=64)
    leaves = random_leaves(form, matrix, 0, (2,))
    program = jax.jit(form.product_of_rows).lower(normal(0, 1, size), leaves, jnp.int32(1)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * size * 256 / 8


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_is_a_part_of_the_kernel(name):
    """Of shards that begin inside a group, and some columns of these."""
    form, matrix = FORMATS[name], Matrix("up", (48, 12))
    leaves = random_leaves(form, matrix, 0)
    expected = decoded(leaves, form, 48)
    in_bytes = 48 * form.bits // 8
    part = leaves | {"codes": leaves["codes"][in_bytes // 2 :]}
    window = Window((24, 12), (48, 12), jnp.asarray([24, 0], jnp.int32), jnp.asarray(4, jnp.int32), 5)
    got = jax.jit(lambda part: form.tile(None, part, window))(part)
    np.testing.assert_allclose(got, expected[24:, 4:9], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_those_of_finite_differences(name):
    """Of every trained leaf; kernels are linear in each, so that a difference is exact but for rounding."""
    form, matrix = FORMATS[name], Matrix("up", (20, 3))
    leaves = random_leaves(form, matrix, 1)
    target = np.random.default_rng(2).standard_normal((20, 3))
    trained = {leaf: array.astype(jnp.float32) for leaf, array in leaves.items() if form.is_trained(leaf, array)}

    def value(trained):
        return jnp.sum(form.materialise(None, leaves | trained, matrix) * jnp.asarray(target, jnp.float32))

    gradients = jax.jit(jax.grad(value))(trained)
    for leaf, array in trained.items():
        for place in np.ndindex(array.shape):
            moved = {**leaves, **trained, leaf: np.asarray(array, np.float64)}
            values = []
            for size in (0.75, 1.25):  # of the same sign, which may say what a code stands for
                moved[leaf] = moved[leaf].copy()
                moved[leaf][place] = size * float(array[place])
                values.append(np.sum(decoded(moved, form, 20) * target))
            slope = (values[1] - values[0]) / (0.5 * float(array[place]))
            assert float(gradients[leaf][place]) == pytest.approx(slope, rel=1e-3, abs=1e-3)


@one_in(11, first=9)
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        *((name, {"expert": 4, "tensor": 2}) for name in FORMATS if name != "a table of 16"),
        ("a table of 16", {"data": 2, "fsdp": 2, "expert": 2}),
    ],
    ids=str,
)
@long
def test_banks_over_a_mesh_are_those_of_one_device(name, axes):
    config, expert = BankConfig(FORMATS[name], base="none"), FFNConfig(dim=32, gated=False, activation="gelu")

    def make():
        return make_bank(config, expert, 4, 16, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32"))

    graphdef, params, rest = randomised(make)
    rng = np.random.default_rng(0)
    experts = jnp.asarray([rng.choice(4, 2, replace=False) for _ in range(16)], jnp.int32)
    weights, x, target = jnp.asarray(rng.random((16, 2)), jnp.float32), normal(1, 16, 16), normal(2, 16, 16)

    def value(params, rest, x):
        y = nnx.merge(graphdef, params, rest)(x, Routing(experts, weights))
        return jnp.sum(y * target), y

    program = jax.grad(value, argnums=(0, 2), has_aux=True)
    expected = jax.jit(program)(params, rest, x)
    bank = nnx.merge(graphdef, params, rest)
    kernels = nnx.jit(lambda bank: bank.kernels(1))(bank)
    for name, matrix in bank._matrices.items():
        own = {leaf: np.asarray(array)[1] for leaf, array in bank.arrays_of(name).items()}
        np.testing.assert_allclose(kernels[name], decoded(own, config.form, matrix.shape[0]), rtol=1e-6, atol=1e-6)
    mesh = make_mesh(axes)

    def put(path, leaf):
        return jax.device_put(leaf, NamedSharding(mesh, leaf_spec(f"experts/{path_name(path)}")))

    params, rest = (jax.tree_util.tree_map_with_path(put, state) for state in (params, rest))
    with jax.set_mesh(mesh):
        assert_close(jax.jit(program)(params, rest, x), expected)


@one_in(2)
@pytest.mark.parametrize("name", FORMATS)
def test_fresh_deltas_are_zero_and_no_kernel_in_pallas_is_asked_for_them(name):
    form, matrix = FORMATS[name], Matrix("up", (32, 8))

    @jax.jit
    def made():
        fresh = form.fresh(nnx.Rngs(0), matrix, (2,), jnp.dtype(jnp.float32))
        return fresh, form.materialise(None, {leaf: array[0] for leaf, array in fresh.items()}, matrix)

    fresh, kernel = made()
    assert not np.asarray(kernel).any()
    assert "kernels know no codes" in form.fused_tile(matrix.shape, matrix.shape)
    assert form.in_triton(fresh, matrix.shape, jnp.zeros(2, jnp.int32)) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bits": 8, "table": True}, "bits=8 have no table of levels: only 4, 3 or 2 bits have"),
        ({"bits": 4, "scale_bits": 4, "group_size": 8}, "scale_bits=4 must be 16 or 8"),
        ({"bits": 4, "scale_bits": 8}, "scale_bits=8 go with groups"),
        ({"bits": 4, "zero_points": True}, "zero points go"),
        ({"bits": 4, "group_size": 8, "table": True, "zero_points": True}, "(no table)"),
        ({"bits": 1, "table": True}, "bits=1 have no table"),
    ],
)
def test_formats_that_make_no_sense(options, said):
    with pytest.raises(InputError) as caught:
        Quantized(**options)
    assert said in str(caught.value)
