"""Sampling: greedy, temperature, top-k, top-p."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.core.errors import InputError
from moe_jax.functional.sampling import sample
from tests.support.numerics import normal

pytestmark = pytest.mark.usefixtures("strict_numerics")
PROBABILITIES = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
LOGITS = jnp.broadcast_to(jnp.log(jnp.asarray(PROBABILITIES, jnp.float32))[None], (4000, 5))


def frequencies(**options):
    tokens = sample(LOGITS, jax.random.key(0), **options)
    return np.bincount(np.asarray(tokens), minlength=5) / len(tokens)


def test_greedy_takes_the_largest():
    assert frequencies(temperature=0.0)[0] == 1.0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature):
    expected = PROBABILITIES ** (1 / temperature)
    np.testing.assert_allclose(frequencies(temperature=temperature), expected / expected.sum(), atol=0.03)


@pytest.mark.parametrize("logits", [[10, 30, 20, -5], [-110, -130, -120, -95]])
def test_a_temperature_next_to_0_takes_the_largest(logits):
    heat = jnp.asarray([1.2e-38, 1e-37], jnp.float32)
    given = jnp.broadcast_to(jnp.asarray(logits, jnp.float32)[None], (2, 4))
    assert sample(given, jax.random.key(0), temperature=heat).tolist() == [np.argmax(logits)] * 2


def test_top_k_renormalises_what_is_left():
    np.testing.assert_allclose(frequencies(top_k=2), [2 / 3, 1 / 3, 0, 0, 0], atol=0.03)


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, 1), (0.49, 1), (0.51, 2), (0.8, 3), (1.0, 5)])
def test_top_p_keeps_the_smallest_sufficient_set(top_p, kept):
    expected = np.where(np.arange(5) < kept, PROBABILITIES, 0)
    np.testing.assert_allclose(frequencies(top_p=top_p), expected / expected.sum(), atol=0.03)


def test_a_row_with_a_key_of_its_own_is_given_what_it_would_be_given_alone():
    logits = normal(1, 6, 50) * 2
    keys = jax.random.split(jax.random.key(2), 6)
    temperature = jnp.asarray([0.0, 1.0, 0.5, 2.0, 1.0, 0.0], jnp.float32)
    top_k = jnp.asarray([50, 50, 3, 50, 9, 2], jnp.int32)
    top_p = jnp.asarray([1.0, 1.0, 1.0, 0.7, 0.6, 0.5], jnp.float32)
    together = jax.jit(sample)(logits, keys, temperature=temperature, top_k=top_k, top_p=top_p)
    alone = [
        int(sample(logits[row][None], keys[row], temperature=float(temperature[row]), top_k=int(top_k[row]),
                   top_p=float(top_p[row]))[0])
        for row in range(6)
    ]  # fmt: skip
    assert together.tolist() == alone
    best = jnp.argmax(logits, axis=-1).tolist()
    assert [alone[0], alone[5]] == [best[0], best[5]] and alone != best


def test_keys_may_be_of_the_old_kind():
    logits = normal(1, 3, 50)
    assert sample(logits, jax.random.PRNGKey(2)).tolist() == sample(logits, jax.random.key(2)).tolist()


@pytest.mark.parametrize(
    "options", [{"top_k": 0}, {"top_p": 1.5}, {"temperature": -1.0}, {"temperature": float("nan")}]
)
def test_numbers_out_of_range_are_refused(options):
    ((name, _),) = options.items()
    with pytest.raises(InputError, match=name):
        sample(normal(0, 1, 8), jax.random.key(0), **options)
