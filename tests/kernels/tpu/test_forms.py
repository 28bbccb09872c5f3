"""Products of experts in every form that has a fused tile, in interpret mode, against kernels that are stored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.experts.forms import Full, LowRank, Quantized, Sparse
from moe_jax.experts.forms.kernel_of_codes import NF4
from moe_jax.experts.forms.optional import FormTiles
from moe_jax.experts.hidden_rows import FFNs, Kernels, hidden_rows
from moe_jax.experts.shapes import BASE, Matrix, Part
from moe_jax.functional.codes import SCALE_LEVELS, codes_shape, quantize_nf4, scales_shape
from moe_jax.functional.dense import hidden
from moe_jax.kernels.tpu import grouped_product
from moe_jax.kernels.tpu.tiles import NF4Tile, scale_levels
from tests.kernels.tpu import references
from tests.kernels.tpu.conftest import ORDERS
from tests.support.numerics import assert_close
from tests.support.tiers import EVERY, one_in

pytestmark = pytest.mark.usefixtures("strict_numerics", "fused")

GROUPS, ROWS, SHAPE = 3, 37, (48, 136)


def random(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def leaves(form, rng):
    if isinstance(form, LowRank):
        return {"a": random(rng, GROUPS, SHAPE[0], form.rank), "b": random(rng, GROUPS, form.rank, SHAPE[1])}
    if isinstance(form, Full):
        return {"kernel": random(rng, GROUPS, *SHAPE)}
    if isinstance(form, NF4):
        return {f"nf4/{name}": leaf for name, leaf in quantize_nf4(random(rng, GROUPS, *SHAPE)).items()}
    codes = rng.integers(0, 256, (GROUPS, *codes_shape(SHAPE, form.bits)))
    scales = random(rng, GROUPS, *scales_shape(SHAPE, form.group_size))
    return {"codes": jnp.asarray(codes, jnp.uint8), "scales": scales}


@functools.cache
def program(form, with_base, split, reference):
    """Gradients of everything, and the product; `split` is the axis of which this device has the second half."""
    shape = tuple(side // 2 if axis == split else side for axis, side in zip(("in", "out"), SHAPE, strict=True))
    origin = np.array([side if axis == split else 0 for axis, side in zip(("in", "out"), shape, strict=True)])
    part = None if split is None else Part(shape, jnp.asarray(origin, jnp.int32))
    matrix = Matrix("up", SHAPE, split or "out")
    tiles = FormTiles(form, shape, SHAPE)

    def value(rows, trained, fixed, sizes, target):
        arrays = trained | fixed
        if reference:
            base = arrays.pop(BASE, None)
            here = {"origin": part.origin} if part else {}
            kernels = jax.vmap(lambda own: tiles.tile(base, own | here, 0, shape[1]))(arrays)
            y = references.product(rows, kernels, sizes)
        else:
            y = form.grouped(rows, arrays, sizes, matrix, part)
        return jnp.sum(y * target), y

    return shape, jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))


def local(form, arrays, split):
    """What the device has that holds the second half."""
    for name, spec in (form.specs(split) | {BASE: (("tensor", None) if split == "in" else (None, "tensor"))}).items():
        if name in arrays and "tensor" in spec:
            axis = list(spec).index("tensor")
            arrays[name] = jnp.split(arrays[name], 2, axis=axis)[1]
    return arrays


group_sizes = st.one_of(
    st.lists(st.integers(0, ROWS // GROUPS), min_size=GROUPS, max_size=GROUPS),
    st.sampled_from([[0, ROWS, 0], [0, 0, 0], [16, 0, 21]]),
)

# Of two bits and of whole kernels, hidden states and products in every order are below.
FEW = [
    (LowRank(rank=3), True, None),
    (Quantized(bits=4, group_size=16), True, "in"),
    (Quantized(bits=3), False, "out"),
    (Quantized(bits=1, group_size=8), True, None),
    (NF4(), False, "in"),
]
REST = [
    (Quantized(bits=bits, group_size=group_size), with_base, split)
    for bits in (8, 4, 3, 2, 1)
    for group_size in (None, 8, 16)
    for with_base, split in ((True, None), (False, "in"), (True, "out"))
]
REST += [(LowRank(rank=3), False, "in"), (NF4(), False, None), (NF4(), False, "out")]


@pytest.mark.parametrize(("form", "with_base", "split"), FEW + (REST if EVERY else []))
def test_product_and_gradients(form, with_base, split):
    @settings(max_examples=2)
    @given(group_sizes, st.integers(0, 99))
    def check(sizes, seed):
        rng = np.random.default_rng(seed)
        arrays = leaves(form, rng) | ({BASE: random(rng, *SHAPE)} if with_base else {})
        if split is not None:
            arrays = local(form, arrays, split)
        trained = {name: a for name, a in arrays.items() if name == BASE or form.is_trained(name, a)}
        fixed = {name: array for name, array in arrays.items() if name not in trained}
        (fan_in, fan_out), _ = program(form, with_base, split, True)
        data = random(rng, ROWS, fan_in), trained, fixed, jnp.asarray(sizes, jnp.int32), random(rng, ROWS, fan_out)
        assert_close(*(program(form, with_base, split, reference)[1](*data) for reference in (False, True)))

    check()


@one_in(7)
@ORDERS
@pytest.mark.parametrize("form", [Quantized(bits=2, group_size=128), Quantized(bits=3, group_size=64), NF4()])
def test_product_and_gradients_in_every_order(form, order, monkeypatch):
    monkeypatch.setattr(grouped_product, "plan_blocks", order.plan)
    monkeypatch.setattr(f"{__name__}.SHAPE", (512, 512))
    rng, with_base = np.random.default_rng(0), not isinstance(form, NF4)
    arrays = leaves(form, rng) | ({BASE: random(rng, *SHAPE)} if with_base else {})
    trained = {name: a for name, a in arrays.items() if name == BASE or form.is_trained(name, a)}
    fixed = {name: array for name, array in arrays.items() if name not in trained}
    programs = [program.__wrapped__(form, with_base, None, reference)[1] for reference in (False, True)]
    for sizes in ([10, 0, 35], [0, 53, 0]):
        data = random(rng, 53, SHAPE[0]) / 16, trained, fixed, jnp.asarray(sizes, jnp.int32)
        target = random(rng, 53, SHAPE[1]) / 16
        assert_close(*(run(*data, target) for run in programs))


@functools.cache
def hidden_program(form, split, reference):
    """The hidden states of gated experts, and a function that has their gradients as well; `split` as in `program`."""
    shape = (SHAPE[0], SHAPE[1] // 2) if split else SHAPE
    origin = jnp.asarray([0, SHAPE[1] - shape[1]], jnp.int32)
    parts = {name: Part(shape, origin) for name in ("gate", "up")} if split else {}
    tiles = FormTiles(form, shape, SHAPE)

    def product(rows, arrays, sizes):
        base, here = arrays.pop(BASE, None), {"origin": origin} if split else {}
        kernels = jax.vmap(lambda own: tiles.tile(base, own | here, 0, shape[1]))(arrays)
        return references.product(rows, kernels, sizes)

    def states(rows, trained, fixed, sizes):
        arrays = {name: trained[name] | fixed[name] for name in trained}
        if reference:
            return hidden(product(rows, arrays["up"], sizes), product(rows, arrays["gate"], sizes), "silu")
        kernels = {name: Kernels(form, Matrix(name, SHAPE), own) for name, own in arrays.items()}
        return hidden_rows(rows, FFNs(kernels, {}, "silu", parts), sizes)

    def value(rows, trained, fixed, sizes, target):
        h = states(rows, trained, fixed, sizes)
        return jnp.sum(h * target), h

    return shape, jax.jit(states), jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize(
    ("form", "with_base", "split"),
    [
        (LowRank(rank=3), True, "out"),
        (Full(), False, None),
        (Quantized(bits=2, group_size=16), True, None),
        (NF4(), False, "out"),
    ],
)
def test_hidden_states_and_gradients(form, with_base, split):
    @settings(max_examples=2)
    @given(group_sizes, st.integers(0, 99))
    def check(sizes, seed):
        rng, trained, fixed = np.random.default_rng(seed), {}, {}
        for name in ("gate", "up"):
            arrays = leaves(form, rng) | ({BASE: random(rng, *SHAPE)} if with_base else {})
            arrays = local(form, arrays, split) if split else arrays
            trained[name] = {path: a for path, a in arrays.items() if path == BASE or form.is_trained(path, a)}
            fixed[name] = {path: array for path, array in arrays.items() if path not in trained[name]}
        programs = [hidden_program(form, split, reference) for reference in (False, True)]
        (shape, h, gradients), (_, expected_h, expected) = programs
        data = random(rng, ROWS, shape[0]), trained, fixed, jnp.asarray(sizes, jnp.int32)
        assert_close(h(*data), expected_h(*data))
        if EVERY or isinstance(form, LowRank):  # Gradients are those of two products, which are tested above.
            target = random(rng, ROWS, shape[1])
            assert_close(gradients(*data, target), expected(*data, target))

    check()


def test_codes_of_scales_are_computed_as_published():
    got = jax.jit(scale_levels)(jnp.arange(256, dtype=jnp.uint8))
    np.testing.assert_allclose(got, SCALE_LEVELS, rtol=1e-6)


@pytest.mark.parametrize("width", [512, 272])
@pytest.mark.parametrize("column", [None, 128])
def test_scales_of_scales_are_those_of_256_scales_row_by_row(width, column):
    rng, blocks, levels = np.random.default_rng(0), 4, tuple(range(16))
    whole = rng.standard_normal((2, blocks * width)).astype(np.float32)
    scales = whole[:, ::256]
    whole = np.repeat(scales, 256, axis=1)[:, : blocks * width].reshape(2, blocks, width)
    own = width if column is None else 128
    # The last code stands for 1.
    arrays = {"scale_codes": jnp.full((2, blocks, own), 255, jnp.uint8), "scales": jnp.asarray(scales)}
    arrays["offset"], arrays["codes"] = jnp.zeros(2), jnp.zeros((2, 128, own), jnp.uint8)
    if column is not None:
        arrays["origin"] = jnp.asarray([[0, column]] * 2, jnp.int32)
    tile = NF4Tile(levels, 64, 256, 256, width)
    got = jax.jit(lambda arrays: tile.operands(arrays, jnp.float32)[1].array)(arrays)
    first = column or 0
    np.testing.assert_array_equal(got[:, :, 0], whole[:, :, first : first + own])


@pytest.mark.parametrize(
    ("form", "shape", "reason"),
    [
        (Sparse(rate=0.5), SHAPE, "entries of rows in CSR"),
        (Sparse(rate=0.5, encoding="bitmap"), SHAPE, "bitmap"),
        (Quantized(bits=2), (12, 8), "codes of 2 bits of 12 rows"),
        (Quantized(bits=2, group_size=24), (1016, 8), None),
        (NF4(), (12, 8), "12 rows of NF4 codes"),
    ],
)
def test_forms_without_a_fused_tile_say_why(form, shape, reason):
    tile = form.fused_tile(shape, shape)
    assert isinstance(tile, str) == (reason is not None)
    assert reason is None or reason in tile
