"""Splash attention, in interpret mode, is the reference: every mask, documents, grouped heads, forward and gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional.attention import Visibility, attention
from moe_jax.kernels.tpu.splash_attention import _Band, _IsInside, splash_attention
from tests.support.jaxprs import equations
from tests.support.tiers import one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")


def band(mask, window):
    after = {"causal": 0, "bidirectional": None}[mask]
    if window is None:
        return {"nearest": after, "farthest": None}
    return {"nearest": 0 if mask == "causal" else 1 - window, "farthest": window - 1}


@partial(jax.jit, static_argnames=("form", "mask", "window", "scale", "soft_cap"))
def output_and_gradients(q, k, v, weight, segments, *, form, mask, window, scale, soft_cap):
    def value(q, k, v):
        if form == "splash":
            options = dict(scale=scale, soft_cap=soft_cap, interpret=True, **band(mask, window))
            y = splash_attention(q, k, v, segments, segments, **options)
        else:
            positions = jnp.broadcast_to(jnp.arange(q.shape[1])[None], q.shape[:2])
            visible = Visibility(positions, positions, segments, segments)
            y = attention(q, k, v, visible, mask=mask, window=window, scale=scale, soft_cap=soft_cap, aligned=True)
        return jnp.sum(y * weight), y

    (_, y), gradients = jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return y, *gradients


def assert_close(got, expected):
    """Relative to the largest value: sums of terms that cancel have the error of the terms."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# Lengths that blocks of 128 divide, and do not; widths of keys, and other ones of values.
@one_in(6, first=3)
@pytest.mark.parametrize(
    ("length", "heads", "widths", "mask", "window", "soft_cap", "packed"),
    [
        (256, (4, 2), (16, 16), "causal", None, None, True),
        (200, (2, 1), (24, 16), "causal", None, 1.5, True),
        (200, (2, 2), (16, 16), "causal", None, None, False),
        (256, (3, 1), (16, 8), "causal", 100, None, True),
        (140, (2, 1), (16, 16), "bidirectional", None, None, False),
        (256, (2, 2), (16, 16), "bidirectional", 30, 2.0, True),
    ],
)
def test_values_and_gradients(length, heads, widths, mask, window, soft_cap, packed):
    @settings(max_examples=2)
    @given(boundary=st.floats(0, 0.1), seed=st.integers(0, 999))
    def check(boundary, seed):
        rng = np.random.default_rng(seed)
        shapes = [(heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]), (heads[0], widths[1])]
        q, k, v, weight = (jnp.asarray(rng.standard_normal((2, length, *shape)), jnp.float32) for shape in shapes)
        segments = jnp.asarray(np.cumsum(rng.random((2, length)) < boundary, axis=1), jnp.int32) if packed else None
        options = dict(mask=mask, window=window, scale=0.3, soft_cap=soft_cap)
        got, expected = (
            output_and_gradients(q, k, v, weight, segments, form=form, **options) for form in ("splash", "chunks")
        )
        jax.tree.map(assert_close, got, expected)

    check()


def test_the_program_and_its_masks_do_not_grow_with_the_length():
    def sizes(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 128), jnp.bfloat16)
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
        options = dict(nearest=0, farthest=None, scale=0.1)

        def value(q, k, v, segments):
            return jnp.sum(splash_attention(q, k, v, segments, segments, **options).astype(jnp.float32))

        program = jax.make_jaxpr(jax.grad(value, argnums=(0, 1, 2)))(x, x, x, segments)
        return len(list(equations(program))), max(constant.size for constant in program.consts if constant.ndim > 1)

    (few, small), (many, large) = sizes(2048), sizes(131_072)  # the largest constants that are made of blocks
    assert few == many and small < large <= 128 * 128


def test_other_keys_than_those_of_the_row():
    """Cross-attention: other lengths, padding among the keys."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, 2, 16)), jnp.float32) for n in (150, 270, 270))
    valid = jnp.asarray(rng.random((2, 270)) < 0.7, jnp.int32)
    ones = jnp.ones((2, 150), jnp.int32)
    options = dict(nearest=None, farthest=None, scale=0.25, interpret=True)
    got = jax.jit(partial(splash_attention, **options))(q, k, v, ones, valid)
    positions = [jnp.broadcast_to(jnp.arange(n)[None], (2, n)) for n in (150, 270)]
    expected = attention(q, k, v, Visibility(*positions, ones, valid), mask="bidirectional", scale=0.25, aligned=False)
    assert_close(got, expected)


@settings(max_examples=30)
@given(
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(0, 9),
)
def test_blocks_of_a_mask_are_known_by_their_distances(counts, sizes, nearest, farthest):
    shape = counts[0] * sizes[0], counts[1] * sizes[1]
    mask = _Band(shape, nearest, None if farthest is None else (nearest or 0) + farthest)
    seen = np.ones(shape, bool)
    if mask.range != (None, None):
        seen = np.asarray(_IsInside(*mask.range)(np.arange(shape[0])[:, None], np.arange(shape[1])[None]))
    for i in range(counts[0]):
        for j in range(counts[1]):
            block = slice(i * sizes[0], (i + 1) * sizes[0]), slice(j * sizes[1], (j + 1) * sizes[1])
            assert (mask[block].any(), mask[block].all()) == (seen[block].any(), seen[block].all())
