"""Attention with sinks against a plain softmax in float64 with one more column, whose share is left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional import attention as module
from moe_jax.functional import attention_chunks as chunks
from moe_jax.functional.attention import Placement, Visibility, attention
from moe_jax.functional.attention_chunks import AttentionOptions, cached_attention
from tests.support.references import visible_keys
from tests.support.tiers import examples

pytestmark = pytest.mark.usefixtures("strict_numerics")
CPU = Placement("cpu")


def plain(q, k, v, sinks, seen, soft_cap=None):
    """The attention of Float64[B, T, H, D] queries: one column of scores per key, and one for the sink."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(a, group, axis=2) for a in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(seen[:, None], scores, -np.inf)
    column = np.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    every = np.concatenate([scores, column], axis=-1)
    shares = np.exp(every - every.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", shares[..., :-1], v)


def drawn(seed, length, heads, spread):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((2, length, count, 4)) for count in (heads[0], heads[1], heads[1]))
    return q, k, v, spread * rng.standard_normal(heads[0]), rng


# Few shapes, so that programs are compiled once; chunks of two make bands of several chunks.
@pytest.mark.parametrize(
    ("length", "heads", "mask", "window", "soft_cap"),
    [(13, (4, 2), "causal", None, None), (21, (3, 1), "causal", 5, None), (7, (2, 2), "bidirectional", None, 0.7)],
)
def test_a_sink_is_one_more_column(length, heads, mask, window, soft_cap, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 2)
    positions = jnp.broadcast_to(jnp.arange(length)[None], (2, length))

    @jax.jit
    def of_chunks(q, k, v, sinks, segments):
        visible = Visibility(positions, positions, segments, segments)
        options = dict(mask=mask, window=window, soft_cap=soft_cap, placement=CPU)
        return attention(q, k, v, visible, sinks=sinks, aligned=True, **options)

    @jax.jit
    def of_cache(q, k, v, sinks, segments):
        visible = Visibility(positions, positions, segments, segments)
        k, v = (a.transpose(0, 2, 1, 3) for a in (k, v))
        options = AttentionOptions(mask, window, q.shape[-1] ** -0.5, soft_cap)
        return cached_attention([(q, k)], v, visible, options, sinks=sinks)

    @settings(max_examples=examples(8), deadline=None)
    @given(boundary=st.floats(0, 1), spread=st.sampled_from([0.0, 1.0, 30.0]), seed=st.integers(0, 999))
    def check(boundary, spread, seed):
        *given, rng = drawn(seed, length, heads, spread)
        segments = jnp.asarray(np.cumsum(rng.random((2, length)) < boundary, axis=1), jnp.int32)
        expected = plain(*given, np.asarray(visible_keys(mask, segments, window)), soft_cap)
        for function in (of_chunks, of_cache):
            got = function(*(jnp.asarray(a, jnp.float32) for a in given), segments)
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)

    check()


def test_gradients_of_sinks(monkeypatch):
    """Against differences of the plain softmax: of sinks by themselves, and of all else along one direction."""
    monkeypatch.setattr(chunks, "CHUNK", 4)
    *given, rng = drawn(3, 11, (4, 2), 1.0)
    weight = rng.standard_normal(given[0].shape)
    positions = jnp.broadcast_to(jnp.arange(11)[None], (2, 11))
    seen = np.asarray(visible_keys("causal", jnp.zeros((2, 11), jnp.int32), 6))

    def ours(given):
        y = attention(
            *given[:3], Visibility(positions, positions), window=6, sinks=given[3], aligned=True, placement=CPU
        )
        return jnp.sum(y * weight)

    def theirs(given):
        return np.sum(plain(*given, seen) * weight)

    got = jax.jit(jax.grad(ours))([jnp.asarray(a, jnp.float32) for a in given])
    step = 1e-5
    for index, one in enumerate(given):
        for direction in np.eye(4) if index == 3 else [rng.standard_normal(one.shape)]:
            ahead, behind = ([*given[:index], one + sign * step * direction, *given[index + 1 :]] for sign in (1, -1))
            expected = (theirs(ahead) - theirs(behind)) / (2 * step)
            np.testing.assert_allclose(np.sum(np.asarray(got[index]) * direction), expected, rtol=1e-3, atol=1e-4)


def test_a_query_that_sees_nothing_gives_nothing():
    one = jnp.ones((1, 1, 2, 4))
    visible = Visibility(jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), 3, jnp.int32))
    y = attention(one, one, one, visible, sinks=jnp.zeros(2), aligned=False, placement=CPU)
    np.testing.assert_array_equal(y, jnp.zeros_like(y))


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_no_kernel_is_used_that_would_leave_sinks_out(platform, monkeypatch, caplog):
    def fails(*_, **__):
        raise AssertionError("a kernel was called")

    monkeypatch.setattr(module, "_by_kernel", fails)
    module._say_once.cache_clear()
    x = jnp.ones((1, 256, 2, 64), jnp.bfloat16)
    positions = jnp.arange(256)[None]
    options = dict(aligned=True, placement=Placement(platform))
    with pytest.raises(AssertionError, match="kernel was called"):
        attention(x, x, x, Visibility(positions, positions), **options)
    attention(x, x, x, Visibility(positions, positions), sinks=jnp.zeros(2), **options)
    assert "heads have sinks" in caplog.text
