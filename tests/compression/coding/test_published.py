"""Published ways of choosing codes, each against a plain reference of its own: HQQ and NF4."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.compression.coding.coder import LeastError
from moe_jax.compression.methods.without_base import HalfQuadratic, NormalFloat, zero_points
from moe_jax.experts.forms import Quantized
from moe_jax.functional.codes import dequantize_nf4, quantize_nf4
from tests.experts.code_reference import decoded, unpacked
from tests.support.tiers import examples, one_in


def hqq(group: np.ndarray, bits: int, rounds: int) -> tuple[float, float, list[float]]:
    """One group, float64, as published: distance of levels, zero point, and the mean error before every round."""
    top, p, beta, found = 2**bits - 1, 0.7, 10.0, []
    step = (group.max() - group.min()) / top
    zero = -group.min() / step
    for _ in range(rounds):
        codes = np.clip(np.round(group / step + zero), 0, top)
        error = group - step * (codes - zero)
        found.append(np.abs(error).mean())
        with np.errstate(divide="ignore"):
            shrunk = np.sign(error) * np.maximum(np.abs(error) - np.abs(error) ** (p - 1) / beta, 0)
        zero = np.mean(codes - (group - shrunk) / step)
        beta *= 1.01
    return step, zero, found


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), bits=st.sampled_from((4, 3, 2)), size=st.sampled_from((0.02, 1.0, 30.0)))
def test_zero_points_are_those_of_the_published_rounds(seed, bits, size):
    group = (size * np.random.default_rng(seed).standard_t(4, 64)).astype(np.float32)
    *_, errors = hqq(group.astype(np.float64), bits, 20)
    falls = np.diff(errors) < 0
    rounds = 20 if falls.all() else int(np.argmin(falls)) + 2
    step, zero, _ = hqq(group.astype(np.float64), bits, rounds)
    counted = jnp.ones((1, 64, 1), bool)
    steps, zeros = jax.jit(zero_points, static_argnames="bits")(group[None, :, None], counted, bits=bits)
    assert float(steps[0, 0, 0]) == pytest.approx(step, rel=1e-5)
    # An entry between two levels may be rounded otherwise in float32; it moves the mean by 1/64.
    assert float(zeros[0, 0, 0]) == pytest.approx(zero, abs=0.03)


@one_in(3)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_hqq_is_stored_as_any_codes_with_zero_points(bits):
    kernel = np.random.default_rng(0).standard_t(4, (150, 6)).astype(np.float32)
    kernel[64:128, 2] = 0
    options = {"bits": bits, "group_size": 64, "zero_points": True}
    made = HalfQuadratic().quantize(kernel, **options)
    expected = decoded(made.leaves, Quantized(**options), 150)
    np.testing.assert_allclose(made.approximation, expected, rtol=1e-5, atol=1e-6)
    assert not made.approximation[64:128, 2].any()
    spanned = LeastError(fit=False).quantize(kernel, **options).approximation
    least = LeastError().quantize(kernel, **options).approximation
    ours, others, best = (np.sum((kernel - one) ** 2) for one in (made.approximation, spanned, least))
    assert best <= ours * 1.01 and (ours < others or bits == 8)


@settings(max_examples=examples(8), deadline=None)
@given(seed=st.integers(0, 100), rows=st.sampled_from((1, 64, 100)), columns=st.integers(1, 9))
def test_nf4_has_the_codes_of_nf4(seed, rows, columns):
    """But for entries between two levels, which the rounding of scales and levels moves."""
    kernel = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    theirs = quantize_nf4(jnp.asarray(kernel))
    expected = np.asarray(dequantize_nf4(theirs, rows, jnp.dtype(jnp.float32)))
    made = NormalFloat().quantize(kernel, bits=4, group_size=64, table=True, scale_bits=8)
    form = Quantized(bits=4, group_size=64, table=True, scale_bits=8)
    np.testing.assert_allclose(made.approximation, decoded(made.leaves, form, rows), rtol=1e-5)
    differ = unpacked(made.codes, rows, 4) != unpacked(theirs["codes"], rows, 4)
    assert differ.mean() < 0.05 + 1 / kernel.size
    errors = [np.sum((kernel - one) ** 2) for one in (made.approximation, expected)]
    assert errors[0] < 1.05 * errors[1] + 1e-4 * np.sum(kernel**2)
