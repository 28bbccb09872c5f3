"""NF4 against the published code book, bitsandbytes, and products with the kernels that the codes stand for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.experts.forms.kernel_of_codes import NF4
from moe_jax.experts.forms.optional import FormTiles
from moe_jax.functional import group_loops
from moe_jax.functional.codes import (
    BLOCK,
    LEVELS,
    SCALE_BLOCK,
    SCALE_LEVELS,
    dequantize_nf4,
    nf4_matmul,
    nf4_tile,
    quantize_nf4,
    unpack,
)
from moe_jax.functional.synthesis import synthesised_matmul

pytestmark = pytest.mark.usefixtures("strict_numerics")


def nf4_shapes(shape):
    *stack, rows, columns = shape
    blocks = math.ceil(rows / BLOCK)
    return {
        "codes": jax.ShapeDtypeStruct((*stack, math.ceil(rows / 2), columns), jnp.uint8),
        "scale_codes": jax.ShapeDtypeStruct((*stack, blocks, columns), jnp.uint8),
        "scales": jax.ShapeDtypeStruct((*stack, math.ceil(blocks * columns / SCALE_BLOCK)), jnp.float32),
        "offset": jax.ShapeDtypeStruct(tuple(stack), jnp.float32),
    }


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def reference(leaves, rows):
    """What the arrays stand for, entry by entry, from the definition of the format."""
    leaves = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    blocks, columns = leaves["scale_codes"].shape
    kernel = np.zeros((rows, columns), np.float32)
    for i in range(rows):
        for o in range(columns):
            scale = leaves["scales"][(i // 64 * columns + o) // 256]
            scale = SCALE_LEVELS[leaves["scale_codes"][i // 64, o]] * scale + leaves["offset"]
            kernel[i, o] = LEVELS[leaves["codes"][i // 2, o] >> 4 * (i % 2) & 15] * scale
    return kernel


def test_levels_are_quantiles_of_the_normal_distribution():
    # Section 3: eight steps of the same probability above zero and seven below, of quantiles that end at 0.9677.
    end = 0.9677083
    above, below = (scipy.stats.norm.ppf(np.linspace(end, 0.5, n)[:-1]) for n in (9, 8))
    levels = np.sort(np.concatenate([above, [0.0], -below])) / above[0]
    np.testing.assert_allclose(LEVELS, levels, atol=2e-7)
    assert LEVELS.dtype == np.float32 and LEVELS[0] == -1 and LEVELS[7] == 0 and LEVELS[15] == 1


def test_levels_of_scales_are_the_published_ones():
    assert SCALE_LEVELS.shape == (256,) and np.all(np.diff(SCALE_LEVELS) > 0)
    np.testing.assert_allclose(SCALE_LEVELS[127:131], [0, 5.5e-7, 3.25e-6, 7.75e-6], rtol=1e-6)
    np.testing.assert_allclose(SCALE_LEVELS[[0, 1, 254, 255]], [-0.99296875, -0.97890625, 0.99296875, 1.0], rtol=1e-6)
    np.testing.assert_array_equal(SCALE_LEVELS[:127], -SCALE_LEVELS[128:255][::-1])


def test_equals_bitsandbytes():
    import torch

    theirs = pytest.importorskip("bitsandbytes").functional
    np.testing.assert_array_equal(LEVELS, theirs.get_4bit_type("nf4", device="cpu").numpy())
    np.testing.assert_allclose(SCALE_LEVELS, theirs.create_dynamic_map().numpy(), rtol=2e-7)

    # A kernel [in, out] is a matrix [out, in] there, of which 64 consecutive entries make a block.
    kernel = random(256, 192)
    leaves = quantize_nf4(kernel)
    codes, state = theirs.quantize_4bit(torch.from_numpy(kernel.T.copy()), blocksize=64, quant_type="nf4")
    codes = codes.numpy().reshape(192, 128)
    codes = np.stack([codes >> 4, codes & 15], -1).reshape(192, 256).T  # the first one in the high bits
    ours = np.asarray(unpack(leaves["codes"], 256, 4, jnp.float32))
    np.testing.assert_array_equal(ours, codes)

    # The scales of blocks come row by row here and column by column there: the same ones in the same order.
    largest = state.absmax.reshape(192, 4).T.contiguous()
    offset = largest.mean()
    scale_codes, scale_state = theirs.quantize_blockwise(largest - offset, blocksize=256)
    np.testing.assert_allclose(leaves["offset"], offset, rtol=1e-6)
    np.testing.assert_allclose(leaves["scales"], scale_state.absmax, rtol=1e-5)
    differ = np.abs(np.asarray(leaves["scale_codes"], np.int32) - scale_codes.numpy().astype(np.int32))
    assert differ.max() <= 1 and (differ > 0).mean() < 0.01  # in the middle between two levels, rounding decides
    scales = theirs.dequantize_blockwise(scale_codes, scale_state) + offset
    theirs = LEVELS[codes] * np.repeat(scales.numpy(), 64, axis=0)
    np.testing.assert_allclose(dequantize_nf4(leaves, 256, jnp.float32), theirs, atol=0.01)
    assert np.mean(np.abs(np.asarray(dequantize_nf4(leaves, 256, jnp.float32)) - theirs)) < 1e-5


def test_round_trip_error_is_the_published_one():
    # bitsandbytes measures 0.0728 and 0.2033 for normal weights in blocks of 64.
    kernel = random(1024, 1024)
    error = np.abs(np.asarray(dequantize_nf4(quantize_nf4(kernel), 1024, jnp.float32)) - kernel)
    assert error.mean() == pytest.approx(0.0729, abs=3e-4)
    assert (error / (np.abs(kernel) + 1e-8)).mean() == pytest.approx(0.2033, abs=2e-3)


@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 11008), (11008, 4096), (8, 4096, 14336)])
def test_bits_per_weight(shape):
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in nf4_shapes(shape).values())
    assert 4.12 < 8 * stored / np.prod(shape, dtype=np.int64) <= 4.2


# Every shape is compiled for: a few, with block and byte cut off, many groups of scales, and the least there is.
SHAPES = [(1, 1), (63, 40), (129, 300)]


@settings(max_examples=6)
@given(st.sampled_from(SHAPES), st.sampled_from([np.float32, jnp.bfloat16]), st.integers(0, 99))
def test_arrays_mean_what_the_format_says(shape, dtype, seed):
    rows, kernel = shape[0], random(*shape, seed=seed).astype(dtype)
    leaves = quantize_nf4(kernel)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in nf4_shapes(kernel.shape).items()
    }
    got = np.asarray(dequantize_nf4(leaves, rows, jnp.float32))
    np.testing.assert_allclose(got, reference(leaves, rows), atol=1e-6)
    # Half of the widest gap between levels, 0.152, and what the scales lose: 0.7% of the largest of them.
    kernel = kernel.astype(np.float32)
    assert np.abs(got - kernel).max() < 0.17 * np.abs(kernel).max()


def test_zeros_and_equal_entries_survive():
    kernel = np.zeros((129, 300), np.float32)
    kernel[:64] = 0.5
    np.testing.assert_allclose(dequantize_nf4(quantize_nf4(kernel), 129, jnp.float32), kernel, atol=5e-3)
    np.testing.assert_array_equal(dequantize_nf4(quantize_nf4(0 * kernel), 129, jnp.float32), 0 * kernel)
    np.testing.assert_allclose(
        dequantize_nf4(quantize_nf4(0 * kernel + 2), 129, jnp.float32), 0 * kernel + 2, rtol=1e-6
    )


def test_stacked_kernels_are_quantised_one_by_one():
    kernels = random(3, 70, 9)
    stacked = quantize_nf4(kernels)
    for e, kernel in enumerate(kernels):
        for name, leaf in quantize_nf4(kernel).items():
            np.testing.assert_array_equal(stacked[name][e], leaf)
    assert dequantize_nf4(stacked, 70, jnp.bfloat16).shape == kernels.shape


@jax.jit
def product(x, leaves, target):
    def value(x):
        y = nf4_matmul(x, leaves, x.shape[-1])
        return jnp.sum(y * target), y

    return jax.grad(value, has_aux=True)(x)


@settings(max_examples=6)
@given(st.sampled_from(SHAPES), st.sampled_from([(3,), (2, 5)]), st.integers(0, 99))
def test_product_and_gradient(shape, batch, seed):
    rows, columns = shape
    leaves = quantize_nf4(random(rows, columns, seed=seed))
    x, target = random(*batch, rows, seed=seed + 1), random(*batch, columns, seed=seed + 2)
    kernel = np.asarray(dequantize_nf4(leaves, rows, jnp.float32))
    dx, y = product(x, leaves, target)
    np.testing.assert_allclose(y, x @ kernel, atol=1e-5 * max(1.0, np.abs(x @ kernel).max()))
    np.testing.assert_allclose(dx, target @ kernel.T, atol=1e-5 * max(1.0, np.abs(target @ kernel.T).max()))


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_product_and_gradient_tile_by_tile(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(group_loops, "TILE_ENTRIES_FOR_FEW", 100 * 64)
    assert group_loops.tile_width((100, 320), 7) == 64
    leaves = quantize_nf4(random(100, 320))
    x, target = (jnp.asarray(random(7, n)).astype(dtype) for n in (100, 320))
    kernel = np.asarray(dequantize_nf4(leaves, 100, dtype).astype(jnp.float32))
    dx, y = jax.jit(product.__wrapped__)(x, leaves, target)
    assert y.dtype == dx.dtype == dtype
    x, target, dx, y = (np.asarray(a.astype(jnp.float32)) for a in (x, target, dx, y))
    for got, expected in ((y, x @ kernel), (dx, target @ kernel.T)):
        np.testing.assert_allclose(got, expected, atol=tolerance * np.abs(expected).max())


def test_no_kernel_exists_at_once():
    rows, columns, tokens = 2048, 16384, 32
    assert (tile := group_loops.tile_width((rows, columns), tokens)) <= columns // 8
    x = jax.ShapeDtypeStruct((tokens, rows), jnp.float32)

    def forward_of_two(x, leaves):
        return nf4_matmul(jnp.sin(nf4_matmul(x, leaves, rows)[:, :rows]), leaves, rows)

    # A second product makes the gradient of the first one needed; its residuals are the arguments themselves.
    step = jax.jit(jax.grad(lambda x, leaves: jnp.sum(jnp.square(forward_of_two(x, leaves)))))
    for program in (jax.jit(forward_of_two), step):
        temporary = program.lower(x, nf4_shapes((rows, columns))).compile().memory_analysis().temp_size_in_bytes
        # A tile in float32 and its scales, row by row; activations are small.
        assert temporary < 4 * rows * tile * 4 + 16 * tokens * columns * 4 < rows * columns * 4 / 2


def test_stacked_experts_in_a_grouped_product():
    shape, groups, rows = (130, 96), 3, 20
    kernels = random(groups, *shape)
    leaves, sizes = quantize_nf4(kernels), jnp.asarray([4, 0, 13], jnp.int32)
    lhs, target = random(rows, shape[0]), random(rows, shape[1], seed=1)

    def value(lhs):
        named = {f"nf4/{name}": leaf for name, leaf in leaves.items()}
        y = synthesised_matmul(lhs, None, {}, named, sizes, FormTiles(NF4(), shape, shape))
        return jnp.sum(y * target), y

    dlhs, y = jax.jit(jax.grad(value, has_aux=True))(jnp.asarray(lhs))
    kernels = np.asarray(dequantize_nf4(leaves, shape[0], jnp.float32))
    for part, e in ((slice(0, 4), 0), (slice(4, 17), 2)):
        np.testing.assert_allclose(y[part], lhs[part] @ kernels[e], atol=1e-4)
        np.testing.assert_allclose(dlhs[part], target[part] @ kernels[e].T, atol=1e-4)
    assert not np.any(y[17:]) and not np.any(dlhs[17:])


# Shards begin inside blocks, and inside a group of scales; there is one of these groups, or there are four.
@pytest.mark.parametrize(("rows", "columns"), [(108, 60), (108, 480)])
@pytest.mark.parametrize("split_rows", [False, True])
def test_parts_of_a_kernel(split_rows, rows, columns):
    shards, tile = 3, jax.jit(nf4_tile, static_argnums=(1, 2, 3, 4))
    leaves = jax.tree.map(np.asarray, quantize_nf4(random(rows, columns)))
    whole = np.asarray(dequantize_nf4(leaves, rows, jnp.float32))
    for index in range(shards):
        if split_rows:
            shape, origin = (36, columns), (36 * index, 0)
            part = leaves | {"codes": leaves["codes"][18 * index : 18 * (index + 1)]}
        else:
            width = columns // shards
            shape, origin, mine = (rows, width), (0, width * index), slice(width * index, width * (index + 1))
            part = leaves | {name: leaves[name][:, mine] for name in ("codes", "scale_codes")}
        part["origin"] = jnp.asarray(origin, jnp.int32)
        expected = whole[origin[0] : origin[0] + shape[0], origin[1] + 4 : origin[1] + 16]
        np.testing.assert_array_equal(tile(part, shape[0], columns, 4, 12), expected)
    np.testing.assert_array_equal(tile(leaves, rows, columns, 3, 10), whole[:, 3:13])
    assert BLOCK == 64 and SCALE_BLOCK == 256
