"""The gated delta rule in chunks and token by token against its definition in float64, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional.recurrent import delta_rule as module
from moe_jax.functional.recurrent.delta_rule import DeltaInputs, delta_rule, inverse_of_unit_lower, plain_delta_rule
from tests.support.documents import close, documents_of, spoiled
from tests.support.tiers import examples, first

pytestmark = pytest.mark.usefixtures("strict_numerics")
ROWS, HEADS, KEY_HEADS, KEYS, VALUES = 2, 4, 2, 8, 6


def defined(inputs, state, documents):
    """The rule as the paper has it, of Float64 arrays, for every head alone and token by token."""
    q, k, v, beta, log_decay = (np.asarray(one, np.float64) for one in inputs)
    out, states = np.zeros(v.shape), np.array(state, np.float64)
    for row, head in np.ndindex(v.shape[0], v.shape[2]):
        held, before = states[row, head], 0
        for t in range(v.shape[1]):
            if documents[row, t] == 0:
                continue
            held = np.zeros_like(held) if before not in (0, documents[row, t]) else held
            before = documents[row, t]
            key, query = (one[row, t, head // (HEADS // KEY_HEADS)] for one in (k, q))
            key, query = (one / np.sqrt(one @ one + 1e-6) for one in (key, query))
            held = held * np.exp(log_decay[row, t, head])
            held = held + np.outer(key, beta[row, t, head] * (v[row, t, head] - held.T @ key))
            out[row, t, head] = held.T @ query / np.sqrt(KEYS)
        states[row, head] = held
    return out, states


def drawn(seed, length, decay=1.0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    keys = [normal(ROWS, length, KEY_HEADS, KEYS) for _ in "qk"]
    beta, rate = (rng.random((ROWS, length, HEADS)).astype(np.float32) for _ in range(2))
    inputs = DeltaInputs(*keys, normal(ROWS, length, HEADS, VALUES), beta, -np.float32(decay) * rate)
    return inputs, normal(ROWS, HEADS, KEYS, VALUES), rng


WITH_DOCUMENTS = [jax.jit(rule) for rule in (delta_rule, plain_delta_rule)]


@settings(max_examples=examples(24), deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.01, 1.0, 30.0]))
def test_it_is_the_rule(seed, decay):
    """97 tokens are a chunk and a part of one; decays are from hardly any to that of all in one token."""
    inputs, state, rng = drawn(seed, 97, decay)
    documents = documents_of(rng, ROWS, 97)
    expected, after = defined(inputs, state, documents)
    for rule in WITH_DOCUMENTS:
        read, last = rule(inputs, state, documents)
        assert close(np.where(documents[:, :, None, None] > 0, read, 0.0), expected) and close(last, after)


@pytest.mark.parametrize("length", first(2, 130, 1, 5, 64))
def test_a_row_without_padding(length):
    inputs, state, _ = drawn(length, length)
    expected, after = defined(inputs, state, np.ones((ROWS, length), np.int32))
    rule = jax.jit(delta_rule)
    read, last = rule(inputs, state)
    assert close(read, expected) and close(last, after)
    from_nothing = rule(inputs, 0 * state)
    for got, same in zip(rule(inputs), from_nothing, strict=True):
        np.testing.assert_allclose(got, same, atol=1e-6)


def test_what_was_forgotten_before_rounds_nothing():
    """Sums of decays are large, and differences of some of them small; a token may forget everything, too."""
    inputs, state, _ = drawn(5, 97)
    log_decay = np.where(np.arange(97) % 8 == 0, -190.7, -0.013).astype(np.float32)
    log_decay[50] = -np.inf
    inputs = inputs._replace(log_decay=np.broadcast_to(log_decay[None, :, None], inputs.log_decay.shape))
    documents = np.ones((ROWS, 97), np.int32)
    expected, after = defined(inputs, state, documents)
    read, last = WITH_DOCUMENTS[0](inputs, state, documents)
    assert close(read, expected, 2e-6) and close(last, after, 2e-6)


def test_gradients_are_those_of_the_recurrence(monkeypatch):
    monkeypatch.setattr(module, "GROUP", 1)
    inputs, state, rng = drawn(3, 97)
    documents = documents_of(rng, ROWS, 97)
    weights = rng.standard_normal((ROWS, 97, HEADS, VALUES)).astype(np.float32) * (documents > 0)[:, :, None, None]

    def gradients(rule, inputs):
        def total(inputs, state):
            read, last = rule(inputs, state, documents)
            return jnp.sum(read * weights) + jnp.sum(last * jnp.asarray(state))

        return jax.jit(jax.grad(total, argnums=(0, 1)))(inputs, state)

    found = gradients(delta_rule, spoiled(inputs, documents)), gradients(plain_delta_rule, inputs)
    for got, expected in zip(*map(jax.tree.leaves, found), strict=True):
        assert close(got, np.asarray(expected))


def test_what_stands_at_padding_is_never_looked_at():
    inputs, state, _ = drawn(4, 20)
    documents = np.array([[0] * 3 + [1] * 17, [1] * 12 + [0] * 8], np.int32)
    for rule in WITH_DOCUMENTS:
        for got, expected in zip(
            rule(spoiled(inputs, documents), state, documents), rule(inputs, state, documents), strict=True
        ):
            got, expected = (np.asarray(one) for one in (got, expected))
            if got.shape[1] == 20:
                got, expected = (one[documents > 0] for one in (got, expected))
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("size", first(1, 64, 32, 16))
def test_inverses_stay_exact_where_keys_are_alike(size):
    """Equal keys and shares of 1 make all entries 1: powers of the matrix would lose everything, blocks do not."""
    lower = np.tril(np.ones((size, size), np.float32), -1)
    inverse = np.asarray(jax.jit(inverse_of_unit_lower)(lower[None]))[0]
    np.testing.assert_array_equal(inverse, np.eye(size) - np.eye(size, k=-1))


def test_memory_grows_with_the_length_and_not_with_its_square():
    """Of what a gradient keeps, nothing has two axes of tokens, and twice the length is at most twice the bytes."""

    def kept(length):
        shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, drawn(0, length)[0]))
        traced = jax.make_jaxpr(lambda inputs: jax.vjp(lambda one: delta_rule(one)[0], inputs)[1])(shapes)
        return sum(int(np.prod(aval.shape)) for aval in traced.out_avals)

    assert kept(64 * module.CHUNK) <= 2.05 * kept(32 * module.CHUNK)
