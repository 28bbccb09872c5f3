"""Quantised deltas: error bounds, group boundaries, and the two ways of choosing a scale."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.compress.coding.quantizer import quantize
from moe_jax.compress.methods.ders_quantize import Quantize
from moe_jax.errors import InputError
from moe_jax.functional.packing import codes_shape, scales_shape

BITS = (8, 4, 2, 1)
BFLOAT16_ROUNDING = 2.0**-8


def decoded(codes: np.ndarray, scales: np.ndarray, rows: int, bits: int, group_size: int | None) -> np.ndarray:
    """What codes and scales stand for, entry by entry from the words of the format."""
    out = np.empty((rows, codes.shape[1]))
    for row in range(rows):
        code = (codes[row * bits // 8].astype(int) >> (row * bits % 8)) & (2**bits - 1)
        level = 2 * code - 1 if bits == 1 else code - (2 ** (bits - 1) - 1)
        out[row] = level * scales[0 if group_size is None else row // group_size].astype(np.float64)
    return out


def groups_of(delta: np.ndarray, group_size: int | None) -> list[np.ndarray]:
    if group_size is None:
        return [delta]
    return [delta[start : start + group_size] for start in range(0, len(delta), group_size)]


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 40),
    columns=st.integers(1, 6),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from((None, 8, 16, 128)),
    clip=st.booleans(),
    size=st.sampled_from((1e-6, 1.0, 1e4)),
)
def test_codes_and_scales_stand_for_the_approximation(seed, rows, columns, bits, group_size, clip, size):
    delta = (size * np.random.default_rng(seed).standard_normal((rows, columns))).astype(np.float32)
    made = quantize(delta, bits=bits, group_size=group_size, clip=clip)
    codes, scales = np.asarray(made.codes), np.asarray(made.scales)
    assert codes.dtype == np.uint8 and codes.shape == codes_shape(delta.shape, bits)
    assert scales.dtype == "bfloat16" and scales.shape == scales_shape(delta.shape, group_size)
    np.testing.assert_allclose(made.approximation, decoded(codes, scales, rows, bits, group_size), rtol=1e-6)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 40),
    bits=st.sampled_from((8, 4, 2)),
    group_size=st.sampled_from((None, 8, 16)),
)
def test_absmax_is_within_half_a_level_of_every_entry(seed, rows, bits, group_size):
    delta = np.random.default_rng(seed).standard_normal((rows, 3)).astype(np.float32)
    approximation = np.asarray(quantize(delta, bits=bits, group_size=group_size, clip=False).approximation)
    levels = 2 ** (bits - 1) - 1
    for group, near in zip(groups_of(delta, group_size), groups_of(approximation, group_size), strict=True):
        largest = np.abs(group).max(axis=None if group_size is None else 0)
        # Half a level; or, where rounding made the scale smaller, what the largest level lacks.
        bound = np.maximum(largest / levels / 2 * (1 + BFLOAT16_ROUNDING), largest * BFLOAT16_ROUNDING)
        assert (np.abs(near - group) <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("group_size", [None, 8])
def test_one_bit_is_the_sign_times_the_mean_absolute_value(group_size):
    delta = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    delta[3, 1] = 0.0
    made = quantize(delta, bits=1, group_size=group_size, clip=True)
    scales = np.asarray(made.scales, np.float32)
    for index, group in enumerate(groups_of(delta, group_size)):
        # The last of the groups of 8 has 4 rows: its mean is over these.
        expected = np.abs(group).mean(axis=None if group_size is None else 0)
        np.testing.assert_allclose(scales[index], np.broadcast_to(expected, scales[index].shape), rtol=2**-8)
    assert (np.sign(made.approximation) == np.where(delta >= 0, 1, -1)).all()  # a tie goes up


def test_scales_of_a_group_do_not_look_at_others():
    delta = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    large = delta.copy()
    large[16:] *= 1000
    for bits in BITS:
        near, far = (np.asarray(quantize(d, bits=bits, group_size=8, clip=True).approximation) for d in (delta, large))
        assert np.array_equal(near[:16], far[:16]) and not np.array_equal(near[16:], far[16:])


@pytest.mark.parametrize("draw", ["normal", "laplace"])
@pytest.mark.parametrize("group_size", [None, 32])
def test_searching_the_scale_is_never_worse_than_the_largest_value(draw, group_size):
    """And much better at 2 bits, where one outlier would leave nearly all entries at zero: why it is the default."""
    delta = getattr(np.random.default_rng(0), draw)(size=(128, 16)).astype(np.float32)

    def error(bits, clip):
        made = quantize(delta, bits=bits, group_size=group_size, clip=clip)
        return np.linalg.norm(made.approximation - delta) / np.linalg.norm(delta)

    for bits in (8, 4, 2):
        assert error(bits, True) <= error(bits, False)
    assert error(2, True) < 0.75 * error(2, False)
    assert error(8, True) < 0.02 < error(4, True) < error(2, True) < error(1, True)


def test_zeros_stay_zeros_and_no_bit_is_lost_in_large_kernels():
    for bits in BITS:
        made = quantize(np.zeros((9, 2), np.float32), bits=bits, group_size=8, clip=True)
        assert not np.asarray(made.approximation).any()
    # 2^23 times 0.1: a plain float32 sum over them would stand still at some point.
    ones = np.full((4096, 2049), 0.1, np.float32)
    assert float(quantize(ones, bits=1, group_size=None, clip=True).scales[0, 0]) == pytest.approx(0.1, rel=2**-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "bits=5 must be one of 8, 4, 3, 2, 1"),
        ({"bits": 4, "group_size": 12}, "group_size=12 must be a multiple of 8"),
        ({"bits": 4, "scale": "absmex"}, "unknown scale 'absmex' (did you mean 'absmax'?)"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError) as caught:
        Quantize(**options)
    assert message in str(caught.value)
