"""The scan of Mamba-2 in chunks and token by token against its definition in float64, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional.recurrent import state_space as module
from moe_jax.functional.recurrent.state_space import ScanInputs, plain_state_scan, state_scan
from tests.support.documents import close, documents_of, spoiled
from tests.support.tiers import examples, first

pytestmark = pytest.mark.usefixtures("strict_numerics")
ROWS, HEADS, GROUPS, KEYS, VALUES = 2, 4, 2, 8, 6
LENGTH = module.CHUNK + 33


def defined(inputs, state, documents):
    """The recurrence as the paper has it, of Float64 arrays, for every head alone and token by token."""
    q, k, v, log_decay = (np.asarray(one, np.float64) for one in inputs)
    out, states = np.zeros(v.shape), np.array(state, np.float64)
    for row, head in np.ndindex(v.shape[0], v.shape[2]):
        held, before, group = states[row, head], 0, head // (v.shape[2] // k.shape[2])
        for t in range(v.shape[1]):
            if documents[row, t] == 0:
                continue
            held = np.zeros_like(held) if before not in (0, documents[row, t]) else held
            before = documents[row, t]
            held = held * np.exp(log_decay[row, t, head]) + np.outer(k[row, t, group], v[row, t, head])
            out[row, t, head] = held.T @ q[row, t, group]
        states[row, head] = held
    return out, states


def drawn(seed, length=LENGTH, rate=1.0, groups=GROUPS):
    """Inputs whose steps are between 0 and 1, a state, and the generator they are from."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    q, k = (normal(ROWS, length, groups, KEYS) for _ in "qk")
    step = rng.random((ROWS, length, HEADS)).astype(np.float32)
    values = normal(ROWS, length, HEADS, VALUES) * step[..., None]
    return ScanInputs(q, k, values, -np.float32(rate) * step), normal(ROWS, HEADS, KEYS, VALUES), rng


COMPILED = [jax.jit(one) for one in (state_scan, plain_state_scan)]


@settings(max_examples=examples(24), deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.01, 1.0, 30.0, 1000.0]))
def test_it_is_the_recurrence(seed, rate):
    """Decays are from hardly any to that of all in one token, beside tokens that forget nothing."""
    inputs, state, rng = drawn(seed, rate=rate)
    documents = documents_of(rng, ROWS, LENGTH)
    expected, after = defined(inputs, state, documents)
    for scan in COMPILED:
        read, last = scan(inputs, state, documents)
        assert close(np.where(documents[:, :, None, None] > 0, read, 0.0), expected) and close(last, after)


@pytest.mark.parametrize(("length", "groups"), first(2, (module.CHUNK + 2, 1), (1, 2), (5, 4), (module.CHUNK, 2)))
def test_a_row_without_padding(length, groups):
    inputs, state, _ = drawn(length, length, groups=groups)
    expected, after = defined(inputs, state, np.ones((ROWS, length), np.int32))
    read, last = jax.jit(state_scan)(inputs, state)
    assert close(read, expected) and close(last, after)


def test_what_was_forgotten_before_rounds_nothing():
    """Sums of a chunk's decays are large, and differences of some of them are small: plain ones are wrong by 1e-4."""
    inputs, state, _ = drawn(5, module.CHUNK)
    log_decay = np.where(np.arange(module.CHUNK) < module.CHUNK // 2, -190.7, -0.013).astype(np.float32)
    inputs = inputs._replace(log_decay=np.broadcast_to(log_decay[None, :, None], inputs.log_decay.shape))
    expected, after = defined(inputs, state, np.ones((ROWS, module.CHUNK), np.int32))
    read, last = COMPILED[0](inputs, state, np.ones((ROWS, module.CHUNK), np.int32))
    assert close(read, expected, 2e-6) and close(last, after, 2e-6)


def test_gradients_are_those_of_the_plain_recurrence():
    inputs, state, rng = drawn(3)
    documents = documents_of(rng, ROWS, LENGTH)
    weights = rng.standard_normal(inputs.v.shape).astype(np.float32) * (documents > 0)[:, :, None, None]

    def gradients(scan, inputs):
        def total(inputs, state):
            read, last = scan(inputs, state, documents)
            return jnp.sum(read * weights) + jnp.sum(last * jnp.asarray(state))

        return jax.jit(jax.grad(total, argnums=(0, 1)))(inputs, state)

    found = gradients(state_scan, spoiled(inputs, documents)), gradients(plain_state_scan, inputs)
    for got, expected in zip(*map(jax.tree.leaves, found), strict=True):
        assert close(got, np.asarray(expected), 2e-5)


def test_what_stands_at_padding_is_never_looked_at():
    inputs, state, _ = drawn(4, 20)
    documents = np.array([[0] * 3 + [1] * 17, [1] * 12 + [0] * 8], np.int32)
    for scan in COMPILED:
        (read, last), (expected, after) = (
            scan(spoiled(inputs, documents), state, documents),
            scan(inputs, state, documents),
        )
        np.testing.assert_array_equal(np.asarray(read)[documents > 0], np.asarray(expected)[documents > 0])
        np.testing.assert_array_equal(last, after)


def test_memory_grows_with_the_length_and_not_with_its_square():
    """Of what a gradient keeps, twice the length is at most twice the numbers."""

    def kept(length):
        shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, drawn(0, length)[:2]))
        traced = jax.make_jaxpr(lambda one, state: jax.vjp(lambda one: state_scan(one, state)[0], one)[1])(*shapes)
        return sum(int(np.prod(aval.shape)) for aval in traced.out_avals)

    assert kept(16 * module.CHUNK) <= 2.05 * kept(8 * module.CHUNK)
