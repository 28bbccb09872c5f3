"""Attention against a plain softmax in float64, with every mask, forward and gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional import attention as module
from moe_jax.functional.attention import Visibility, attention

pytestmark = pytest.mark.usefixtures("strict_numerics")


def reference(q, k, v, mask):
    repeats = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, repeats, axis=2) for a in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.float32(np.sqrt(q.shape[-1]))
    scores = jnp.where(mask[:, None], scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)


@partial(jax.jit, static_argnames=("form", "window"))
def values_and_gradients(q, k, v, weight, segments, *, form, window):
    length = q.shape[1]
    places = jnp.broadcast_to(jnp.arange(length)[None], q.shape[:2])
    distance = places[:, :, None] - places[:, None, :]
    mask = (distance >= 0) & (distance < (window or length)) & (segments[:, :, None] == segments[:, None, :])

    def value(q, k, v):
        if form == "reference":
            return jnp.sum(reference(q, k, v, mask) * weight)
        visible = Visibility(places, places, segments, segments)
        return jnp.sum(attention(q, k, v, visible, window=window, aligned=form == "aligned") * weight)

    return jax.value_and_grad(value, argnums=(0, 1, 2))(q, k, v)


# The shapes are few, so that programs are compiled once; documents, which are data, are drawn freely.
@pytest.mark.parametrize(
    ("length", "heads", "window"), [(1, (1, 1), None), (21, (4, 2), None), (21, (3, 1), 5), (16, (2, 2), 9)]
)
def test_masks_values_and_gradients(length, heads, window, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 8)

    @settings(max_examples=10, deadline=None)
    @given(boundary=st.floats(0, 1), seed=st.integers(0, 999))
    def check(boundary, seed):
        rng = np.random.default_rng(seed)
        draw = lambda heads: jnp.asarray(rng.standard_normal((2, length, heads, 4)), jnp.float32)  # noqa: E731
        q, k, v, weight = draw(heads[0]), draw(heads[1]), draw(heads[1]), draw(heads[0])
        segments = jnp.asarray(np.cumsum(rng.random((2, length)) < boundary, axis=1), jnp.int32)
        expected = values_and_gradients(q, k, v, weight, segments, form="reference", window=window)
        for form in ("aligned", "unaligned"):
            got = values_and_gradients(q, k, v, weight, segments, form=form, window=window)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)

    check()


def test_backward_keeps_no_square_of_the_length():
    """Scores are recomputed: what is saved for the backward pass grows with the length only."""
    length = 1024
    x = jnp.ones((1, length, 2, 8))
    places = jnp.arange(length)[None]

    def loss(x):
        return jnp.sum(attention(x, x, x, Visibility(places, places), aligned=True))

    temporaries = jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < length * length * 4 * 2  # what the float32 scores of both heads alone would take


def test_accelerator_form_equals_cpu_form():
    q = jax.random.normal(jax.random.key(0), (2, 3, 2, 40, 8))
    k, v = (jax.random.normal(jax.random.key(i), (2, 3, 40, 8)) for i in (1, 2))
    places = jnp.broadcast_to(jnp.arange(40)[None], (2, 40))
    one_head = lambda *a: module._one_key_head(*a, window=None, aligned=True)  # noqa: E731
    visible = Visibility(places, places)
    a, b = (
        jax.jit(lambda q, k, v, form=form: form(one_head, q, k, v, visible))(q, k, v)
        for form in (module._loop_over_heads, module._all_heads_at_once)
    )
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
