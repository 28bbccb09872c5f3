"""Kernels in codes of a few bits: what they stand for, and how near that comes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.compression.coding.quantizer import _better_sign, quantize
from moe_jax.experts.forms import Quantized
from moe_jax.functional.codes import codes_shape, pack, scales_shape
from tests.experts.code_reference import decoded
from tests.support.tiers import EVERY, examples, first, one_in

BITS = (8, 4, 3, 2, 1)
BFLOAT16_ROUNDING = 2.0**-8


def groups_of(kernel: np.ndarray, group_size: int | None) -> list[np.ndarray]:
    if group_size is None:
        return [kernel]
    return [kernel[start : start + group_size] for start in range(0, len(kernel), group_size)]


def squared_errors(kernel: np.ndarray, approximation: np.ndarray, group_size: int | None) -> np.ndarray:
    """Of every group; [groups, out] or [1, 1]."""
    squares = (np.asarray(approximation, np.float64) - kernel) ** 2
    if group_size is None:
        return squares.sum(keepdims=True)
    return np.array([group.sum(axis=0) for group in groups_of(squares, group_size)])


def symmetric_errors(kernel: np.ndarray, bits: int, group_size: int | None) -> np.ndarray:
    """The least that the levels -n ... n, one fewer than there are codes, leave of every group: 23 scales tried."""
    level, tried = 2 ** (bits - 1) - 1, []
    for share in (*(n / 20 for n in range(20, 1, -1)), 0.07, 0.05, 0.035, 0.025):
        parts = []
        for group in groups_of(kernel, group_size):
            largest = np.abs(group).max(axis=None if group_size is None else 0, keepdims=True)
            scale = 2 * (largest * np.float32(share / (2 * level))).astype(jnp.bfloat16).astype(np.float64)
            parts.append(np.clip(np.round(group / np.where(scale > 0, scale, 1)), -level, level) * scale)
        tried.append(squared_errors(kernel, np.concatenate(parts), group_size))
    return np.min(tried, axis=0)


@settings(max_examples=examples(15))
@given(
    seed=st.integers(0, 1000),
    shape=st.sampled_from(((1, 1), (13, 3), (40, 3))),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from((None, 16)),
    fit=st.booleans(),
    size=st.sampled_from((1e-6, 1.0, 1e4)),
    zeros=st.sampled_from((0.0, 0.7)),
)
def test_codes_and_scales_stand_for_the_approximation(seed, shape, bits, group_size, fit, size, zeros):
    rng = np.random.default_rng(seed)
    kernel = (size * rng.standard_normal(shape) * (rng.random(shape) >= zeros)).astype(np.float32)
    form = Quantized(bits=bits, group_size=group_size)
    made = quantize(kernel, bits=bits, group_size=group_size, fit=fit)
    codes, scales = np.asarray(made.codes), np.asarray(made.scales)
    assert codes.dtype == np.uint8 and codes.shape == codes_shape(kernel.shape, bits)
    assert scales.dtype == "bfloat16" and scales.shape == scales_shape(kernel.shape, group_size)
    np.testing.assert_allclose(made.approximation, decoded(made.leaves, form, len(kernel)), rtol=1e-6)


@pytest.mark.parametrize(("bits", "most"), [(8, 0.00005), (4, 0.0101), (3, 0.036), (2, 0.12), (1, 0.37)])
def test_the_error_of_gaussians(bits, most):
    """In parts of the variance, 128 entries a scale. Levels -1, 0, 1 would leave 0.188 at 2 bits, seven 0.045 at 3."""
    kernel = np.random.default_rng(0).standard_normal((16 * 128, 64)).astype(np.float32)
    made = quantize(kernel, bits=bits, group_size=128)
    assert squared_errors(kernel, made.approximation, 128).sum() <= most * np.sum(kernel**2)
    codes = np.asarray(made.codes)
    if bits in (8, 4, 2, 1):  # every code is used
        fields = (codes[:, None] >> (np.arange(8 // bits) * bits)[None, :, None]) & (2**bits - 1)
        assert set(np.unique(fields)) == set(range(2**bits))


@settings(max_examples=examples(20))
@given(
    seed=st.integers(0, 1000),
    rows=st.sampled_from((1, 13, 40)),
    bits=st.sampled_from((8, 4, 3, 2)),
    group_size=st.sampled_from((None, 16)),
    draw=st.sampled_from(("normal", "laplace", "t", "few values")),
    zeros=st.sampled_from((0.0, 0.5, 0.9)),
)
def test_no_group_is_worse_off_than_on_one_level_fewer(seed, rows, bits, group_size, draw, zeros):
    """Than on the levels -n ... n, whose zero a group of many zeros needs: the even grid contains them."""
    rng = np.random.default_rng(seed)
    shape = (rows, 3)
    kernel = {
        "normal": lambda: rng.standard_normal(shape),
        "laplace": lambda: rng.laplace(size=shape),
        "t": lambda: rng.standard_t(2, size=shape),
        "few values": lambda: rng.choice((-1.0, 0.0, 0.5, 1.0), shape),
    }[draw]()
    kernel = (kernel * (rng.random(shape) >= zeros)).astype(np.float32)
    errors = squared_errors(kernel, quantize(kernel, bits=bits, group_size=group_size).approximation, group_size)
    least = symmetric_errors(kernel, bits, group_size)
    norms = squared_errors(kernel, np.zeros_like(kernel), group_size)
    assert (errors <= least + 1e-6 * norms).all()


@settings(max_examples=examples(12))
@given(
    seed=st.integers(0, 1000),
    rows=st.sampled_from((1, 13, 40)),
    bits=st.sampled_from((8, 4, 3, 2)),
    group_size=st.sampled_from((None, 16)),
)
def test_without_fitting_every_entry_is_within_half_a_step(seed, rows, bits, group_size):
    kernel = np.random.default_rng(seed).standard_normal((rows, 3)).astype(np.float32)
    approximation = np.asarray(quantize(kernel, bits=bits, group_size=group_size, fit=False).approximation)
    for group, near in zip(groups_of(kernel, group_size), groups_of(approximation, group_size), strict=True):
        largest = np.abs(group).max(axis=None if group_size is None else 0)
        # Where rounding made the scale smaller, the largest level lacks something more.
        bound = largest / (2**bits - 1) * (1 + BFLOAT16_ROUNDING) + largest * BFLOAT16_ROUNDING
        assert (np.abs(near - group) <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("group_size", [None, 8])
def test_one_bit_is_the_sign_times_the_mean_absolute_value(group_size):
    kernel = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    kernel[3, 1] = 0.0
    made = quantize(kernel, bits=1, group_size=group_size)
    scales = np.asarray(made.scales, np.float32)
    for index, group in enumerate(groups_of(kernel, group_size)):
        # The last of the groups of 8 has 4 rows: its mean is over these.
        expected = np.abs(group).mean(axis=None if group_size is None else 0)
        np.testing.assert_allclose(scales[index], np.broadcast_to(expected, scales[index].shape), rtol=2**-8)
    assert (np.sign(made.approximation) == np.where(kernel >= 0, 1, -1)).all()  # a tie goes up


def test_scales_of_a_group_do_not_look_at_others():
    kernel = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    large = kernel.copy()
    large[16:] *= 1000
    for bits in BITS:
        near, far = (np.asarray(quantize(k, bits=bits, group_size=8).approximation) for k in (kernel, large))
        assert np.array_equal(near[:16], far[:16]) and not np.array_equal(near[16:], far[16:])


@one_in(6)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [None, 8])
def test_rows_that_do_not_count_change_nothing(bits, group_size):
    """Neither what fills up the last group nor rows after `count`."""
    kernel = np.random.default_rng(0).standard_normal((13, 3)).astype(np.float32)
    followed = np.concatenate([kernel, np.full((9, 3), 100, np.float32)])
    alone = quantize(kernel, bits=bits, group_size=group_size).approximation
    np.testing.assert_array_equal(
        quantize(followed, bits=bits, group_size=group_size, count=13).approximation[:13], alone
    )
    if group_size is not None:
        np.testing.assert_array_equal(quantize(kernel[8:], bits=bits, group_size=group_size).approximation, alone[8:])


@pytest.mark.parametrize("draw", ["normal", "laplace"])
@pytest.mark.parametrize("group_size", [None, 32])
def test_fitting_the_scale_is_never_worse_than_the_largest_value(draw, group_size):
    """And much better at 2 bits, where one outlier would move all levels: why it is the default."""
    kernel = getattr(np.random.default_rng(0), draw)(size=(128, 16)).astype(np.float32)

    def error(bits, fit):
        made = quantize(kernel, bits=bits, group_size=group_size, fit=fit)
        return np.linalg.norm(made.approximation - kernel) / np.linalg.norm(kernel)

    for bits in (2, *first(0 if group_size is None else 3, 8, 4, 3)):
        assert error(bits, True) <= error(bits, False)
    assert error(2, True) < 0.75 * error(2, False)
    if group_size is not None or EVERY:
        assert error(8, True) < 0.02 < error(4, True) < error(3, True) < error(2, True) < error(1, True)


@one_in(3)
@pytest.mark.parametrize("fit", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_groups_of_zeros_are_exactly_zero(bits, fit):
    kernel = np.zeros((20, 2), np.float32)
    made = quantize(kernel, bits=bits, group_size=8, fit=fit)
    assert not np.asarray(made.approximation).any() and not np.asarray(made.scales, np.float32).any()
    kernel[:8] = np.random.default_rng(0).standard_normal((8, 2))
    made = quantize(kernel, bits=bits, group_size=8, fit=fit)
    assert not np.asarray(made.approximation)[8:].any() and np.asarray(made.approximation)[:8].any()


def test_no_bit_is_lost_in_large_kernels():
    # 2^23 times 0.1: a plain float32 sum over them would stand still at some point.
    ones = np.full((4096, 2049), 0.1, np.float32)
    assert float(quantize(ones, bits=1, group_size=None).scales[0, 0]) == pytest.approx(0.1, rel=2**-8)


# ---- levels that are fitted to a kernel ----------------------------------------------------------------------------


@settings(max_examples=examples(24), deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.sampled_from(first(1, 40, 13, 1)),
    bits=st.sampled_from(first(1, 3, 4, 2)),
    group_size=st.sampled_from((16, None)),
    draw=st.sampled_from(("normal", "few values", "zeros", "weighed")),
)
def test_every_entry_has_the_nearest_level_of_a_table_and_every_level_is_needed(seed, rows, bits, group_size, draw):
    rng = np.random.default_rng(seed)
    kernel = rng.standard_normal((rows, 3)).astype(np.float32)
    if draw == "few values":
        kernel = rng.choice((-1.0, 0.0, 0.5, 1.0), (rows, 3)).astype(np.float32)
    kernel = np.zeros_like(kernel) if draw == "zeros" else kernel
    weights = rng.random(rows).astype(np.float32) if draw == "weighed" else None
    made = quantize(kernel, bits=bits, group_size=group_size, table=True, weights=weights)
    form = Quantized(bits=bits, group_size=group_size, table=True)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in made.leaves.items()} == {
        "codes": (codes_shape(kernel.shape, bits), np.uint8),
        "scales": (scales_shape(kernel.shape, group_size), "bfloat16"),
        "table": ((2**bits,), "bfloat16"),
    }
    table = np.asarray(made.leaves["table"], np.float64)
    assert (np.diff(table) >= 0).all() and np.abs(table).max() == 1
    approximation = decoded(made.leaves, form, rows)
    np.testing.assert_allclose(made.approximation, approximation, rtol=1e-6)
    scales = np.asarray(made.leaves["scales"], np.float64)
    of_row = np.broadcast_to(scales[np.arange(rows) // (group_size or rows)], kernel.shape)
    nearest = np.abs(kernel - table[:, None, None] * of_row).min(axis=0)
    np.testing.assert_allclose(np.abs(kernel - approximation), nearest, atol=1e-6)


@one_in(3, first=2)
@pytest.mark.parametrize(("bits", "most"), [(4, 0.0078), (3, 0.031), (2, 0.113)])
def test_fitted_levels_of_gaussians(bits, most):
    """In parts of the variance, 128 entries a scale: Lloyd and Max have 0.0095, 0.0345 and 0.1175 without scales."""
    kernel = np.random.default_rng(0).standard_normal((4 * 128, 64)).astype(np.float32)
    errors = [
        np.sum((np.asarray(quantize(kernel, bits=bits, group_size=128, table=table).approximation) - kernel) ** 2)
        for table in (False, True)
    ]
    assert errors[1] < most * np.sum(kernel**2) and errors[1] < errors[0]


@one_in(2, first=1)
@pytest.mark.parametrize(("bits", "share"), [(4, 0.25), (3, 0.01), (2, 0.01)])
def test_levels_that_are_there_are_found(bits, share):
    """On no grid, not symmetric, and turned around in some columns."""
    random = np.random.default_rng(0)
    even = np.linspace(-1, 0.9, 2**bits)
    table = np.sign(even) * np.abs(even) ** 1.7
    kernel = random.choice(table, (64, 6)) * random.choice((-1, 1), (1, 6)) * 2.0 ** random.integers(-3, 3, (1, 6))
    plain, fitted = (
        np.asarray(quantize(kernel.astype(np.float32), bits=bits, group_size=64, table=table).approximation) - kernel
        for table in (False, True)
    )
    assert np.sum(fitted**2) < share * np.sum(plain**2)


def test_rows_that_do_not_count_do_not_choose_the_levels():
    random = np.random.default_rng(0)
    kernel = random.standard_normal((64, 16)).astype(np.float32)
    kernel[32:] = random.choice((-3.0, 3.0), (32, 16))
    weights = (np.arange(64) < 32).astype(np.float32)

    def error(rows, weights=None):
        made = quantize(kernel[:rows], bits=3, group_size=None, table=True, weights=weights)
        return np.sum((np.asarray(made.approximation)[:32] - kernel[:32]) ** 2)

    assert error(64, weights) == pytest.approx(error(32), rel=1e-3)
    assert error(64) > 1.1 * error(32)


# ---- scales of eight bits ------------------------------------------------------------------------------------------


@settings(max_examples=examples(12), deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.sampled_from(first(1, 40, 13, 1)),
    bits=st.sampled_from(first(2, 3, 8, 4, 2, 1)),
    spread=st.sampled_from((0.0, 1.0, 2.0)),
)
def test_scales_of_eight_bits_cost_next_to_nothing(seed, rows, bits, spread):
    """However much columns differ in size: by the square root, none is rounded to zero."""
    rng = np.random.default_rng(seed)
    kernel = (rng.standard_normal((rows, 24)) * np.exp(spread * rng.standard_normal(24))).astype(np.float32)
    made, plain = (quantize(kernel, bits=bits, group_size=16, scale_bits=scale_bits) for scale_bits in (8, 16))
    form, groups = Quantized(bits=bits, group_size=16, scale_bits=8), -(-rows // 16)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in made.leaves.items()} == {
        "codes": (codes_shape(kernel.shape, bits), np.uint8),
        "scale_codes": ((groups, 24), np.int8),
        "scale_steps": ((groups, 1), "bfloat16"),
    }
    np.testing.assert_allclose(made.approximation, decoded(made.leaves, form, rows), rtol=1e-5)
    errors, others = (squared_errors(kernel, one.approximation, None)[0, 0] for one in (made, plain))
    # An eighth of a step of the codes or less: only codes of 8 bits notice, of groups that they fit exactly.
    assert errors <= 1.06 * others + 2e-4 * np.sum(kernel**2)


@one_in(2)
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_groups_half_as_long_with_scales_of_half_as_many_bits_are_better(bits):
    """At equal bytes."""
    kernel = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
    errors = [
        np.sum((np.asarray(quantize(kernel, bits=bits, group_size=size, scale_bits=each).approximation) - kernel) ** 2)
        for size, each in ((32, 8), (64, 16))
    ]
    assert errors[0] < 0.95 * errors[1]


# ---- zero points ---------------------------------------------------------------------------------------------------


@settings(max_examples=examples(12), deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.sampled_from(first(1, 40, 13, 1)),
    bits=st.sampled_from(first(2, 3, 2, 8, 4, 1)),
    scale_bits=st.sampled_from((16, 8)),
    fit=st.booleans(),
    mean=st.sampled_from((0.0, 0.7, -3.0)),
)
def test_zero_points_are_what_the_format_says_and_codes_the_nearest(seed, rows, bits, scale_bits, fit, mean):
    kernel = (np.random.default_rng(seed).standard_normal((rows, 3)) + mean).astype(np.float32)
    options = {"bits": bits, "group_size": 16, "zero_points": True, "scale_bits": scale_bits}
    made, form = quantize(kernel, **options, fit=fit), Quantized(**options)
    zeros = np.asarray(made.leaves["zeros"])
    assert zeros.dtype == np.uint8 and zeros.shape == scales_shape(kernel.shape, 16)
    approximation = decoded(made.leaves, form, rows)
    np.testing.assert_allclose(made.approximation, approximation, rtol=1e-5, atol=1e-6)
    packed = jax.jit(pack, static_argnums=1)
    every = np.stack([
        decoded({**made.leaves, "codes": packed(jnp.asarray(np.full((rows, 3), code, np.int32)), bits)}, form, rows)
        for code in range(2**bits)
    ])  # fmt: skip
    nearest = np.abs(every - kernel).min(axis=0)
    np.testing.assert_allclose(np.abs(kernel - approximation), nearest, atol=1e-5)


@one_in(2)
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_zero_points_are_for_what_does_not_lie_around_zero(bits):
    """And fitting is never worse than the span of the entries."""
    kernel = (np.random.default_rng(0).gamma(2, size=(128, 32)) - 1).astype(np.float32)

    def errors(**options):
        made = quantize(kernel, bits=bits, group_size=64, **options)
        return squared_errors(kernel, made.approximation, 64)

    fitted, spanned = errors(zero_points=True), errors(zero_points=True, fit=False)
    assert (fitted <= spanned).all() and fitted.sum() < 0.7 * errors().sum()


def test_groups_of_zeros_have_zero_points_that_do_not_matter():
    kernel = np.zeros((20, 2), np.float32)
    kernel[8:16] = 1.5
    made = quantize(kernel, bits=2, group_size=8, zero_points=True)
    np.testing.assert_allclose(made.approximation, kernel, rtol=2**-8)


@pytest.mark.parametrize("more", [{}, {"zero_points": True}, {"fit": False}, {"fit": False, "zero_points": True}])
def test_rows_without_weight_do_not_choose_scales(more):
    kernel = np.random.default_rng(0).standard_normal((32, 6)).astype(np.float32)
    weights = (np.arange(32) % 4 > 0).astype(np.float32)
    other = np.where(weights[:, None] > 0, kernel, 100 * kernel)
    one, two = (quantize(values, bits=3, group_size=16, weights=weights, **more) for values in (kernel, other))
    for name in set(one.leaves) - {"codes"}:
        np.testing.assert_array_equal(one.leaves[name], two.leaves[name])


def test_scales_of_a_table_take_the_sign_that_leaves_less():
    table = jnp.asarray([-1.0, -0.2, 0.1, 0.6], jnp.float32)
    signs = np.array([1, -1, -1], np.float32)
    groups = jnp.asarray(np.asarray(table)[np.array([0, 1, 2, 3, 0, 2])][None, :, None] * signs)
    found = _better_sign(groups, jnp.ones((1, 6, 1), jnp.float32), jnp.ones((1, 1, 3), jnp.float32), table, 2, False)
    np.testing.assert_allclose(found[0, 0], signs, rtol=1e-6)
