"""Packed codes: nothing is lost, and what they stand for, written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional.codes import codes_shape, dequantize, pack, scales_shape, unpack

packed = jax.jit(pack, static_argnums=1)
unpacked = jax.jit(unpack, static_argnums=(1, 2, 3))
dequantized = jax.jit(dequantize, static_argnums=(2, 3, 4, 5))

pytestmark = pytest.mark.usefixtures("strict_numerics")

BITS = (8, 4, 3, 2, 1)


@settings(max_examples=20)
@given(st.sampled_from(BITS), st.sampled_from(((1, 1), (8, 2), (13, 3))), st.integers(0, 99))
def test_packing_loses_nothing(bits, shape, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, shape)
    in_bytes = packed(jnp.asarray(codes, jnp.int32), bits)
    assert in_bytes.dtype == jnp.uint8 and in_bytes.shape == codes_shape(shape, bits)
    np.testing.assert_array_equal(unpacked(in_bytes, shape[0], bits, jnp.float32), codes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("bits", "scale", "levels"),
    [
        (1, 0.5, [-1, 1]),
        (2, 0.5, [-3, -1, 1, 3]),
        (2, -0.5, [-4, -2, 0, 2]),
        (3, 2.0, [-7, -5, -3, -1, 1, 3, 5, 7]),
        (3, -2.0, [-8, -6, -4, -2, 0, 2, 4, 6]),
        (4, 1.0, range(-15, 16, 2)),
        (8, 1.0, range(-255, 256, 2)),
        (8, -1.0, range(-256, 255, 2)),
    ],
)
def test_every_code_stands_for_another_level(bits, scale, levels, dtype):
    """Odd numbers for a positive scale, even ones with a zero among them for a negative one; exact in bfloat16."""
    codes = packed(jnp.asarray(np.arange(2**bits)[:, None], jnp.int32), bits)
    got = dequantized(codes, jnp.asarray([[scale]], jnp.bfloat16), 2**bits, bits, None, dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got[:, 0], np.float32), scale * np.array(levels, np.float32))


@pytest.mark.parametrize("group_size", [8, None])
def test_scales_belong_to_their_group(group_size):
    rows, columns = 19, 3  # the last group is cut off
    shape = scales_shape((rows, columns), group_size)
    scales = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    scales[0, 0] = 0
    scales[-1, -1] *= -1
    codes = packed(jnp.full((rows, columns), 3, jnp.int32), 2)
    got = dequantized(codes, jnp.asarray(scales, jnp.bfloat16), rows, 2, group_size, jnp.float32)
    of_row = scales[np.arange(rows) // (group_size or rows)] * np.ones((rows, columns))
    np.testing.assert_array_equal(got, np.where(of_row < 0, 2, 3) * of_row)


@pytest.mark.parametrize("scale", [0.0, 0.25, -0.25])
def test_the_gradient_of_a_scale_is_the_sum_of_its_levels(scale):
    """Also at zero, where the delta of a fresh bank is."""
    codes = jnp.asarray([[0], [1], [3], [3]], jnp.int32)
    gradient = jax.jit(jax.grad(lambda s: jnp.sum(dequantize(pack(codes, 2), s, 4, 2, None, jnp.float32))))
    levels = [-4, -2, 2, 2] if scale < 0 else [-3, -1, 3, 3]
    assert float(gradient(jnp.full((1, 1), scale, jnp.float32))[0, 0]) == sum(levels)
