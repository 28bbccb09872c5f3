"""Short convolutions against NumPy, with documents and padding, at once and in pieces."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional.recurrent.short_convolution import last_inputs, short_convolution
from tests.support.documents import documents_of

pytestmark = pytest.mark.usefixtures("strict_numerics")
CHANNELS, LENGTH = 3, 17


def defined(x, kernel, before, documents):
    """Of Float64 arrays: every token, the tokens of its document before it, and at the first those before the call."""
    width, out = len(kernel), np.zeros(x.shape)
    for row in range(len(x)):
        first = next((one for one in documents[row] if one), 0)
        names = np.concatenate([np.full(width - 1, first), documents[row]])
        padded = np.concatenate([before[row], x[row]])
        for t in range(x.shape[1]):
            same = (names[t : t + width] == documents[row, t]) & (documents[row, t] > 0)
            out[row, t] = (padded[t : t + width] * kernel * same[:, None]).sum(axis=0)
    return out


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([2, 4]))
def test_it_is_a_sum_over_the_last_tokens_of_the_document(seed, width):
    rng = np.random.default_rng(seed)
    x, before = (rng.standard_normal((2, length, CHANNELS)) for length in (LENGTH, width - 1))
    kernel, documents = rng.standard_normal((width, CHANNELS)), documents_of(rng, 2, LENGTH)
    given_ = [jnp.asarray(one, jnp.float32) for one in (x, kernel, before)]
    got = np.asarray(short_convolution(*given_, jnp.asarray(documents)))
    counted = documents > 0
    np.testing.assert_allclose(got[counted], defined(x, kernel, before, documents)[counted], atol=1e-5)
    whole = np.asarray(short_convolution(*given_))
    np.testing.assert_allclose(whole, defined(x, kernel, before, np.ones_like(documents)), atol=1e-5)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lengths", [(0, 17), (1, 9), (17, 3)], ids=str)
def test_rows_go_on_behind_their_last_tokens(width, lengths):
    """What is kept of rows that end at different places makes the next tokens what they are in the whole row."""
    rng = np.random.default_rng(0)
    x, kernel = (
        rng.standard_normal((2, LENGTH + 1, CHANNELS)).astype(np.float32),
        rng.standard_normal((width, CHANNELS)),
    )
    kernel, before = jnp.asarray(kernel, jnp.float32), jnp.zeros((2, width - 1, CHANNELS), jnp.float32)
    whole = np.asarray(short_convolution(jnp.asarray(x), kernel, before))
    documents = jnp.asarray(np.arange(LENGTH)[None] < np.array(lengths)[:, None], jnp.int32)
    kept = last_inputs(jnp.asarray(x[:, :LENGTH]), before, documents)
    following = np.stack([row[[length]] for row, length in zip(x, lengths, strict=True)])
    got = np.asarray(short_convolution(jnp.asarray(following), kernel, kept))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(got[row, 0], whole[row, length], atol=1e-6)
    if lengths[1] == LENGTH:
        assert np.array_equal(kept[1], last_inputs(jnp.asarray(x[:, :LENGTH]), before)[1])


def test_of_one_token_nothing_is_kept():
    x = jnp.ones((2, 5, CHANNELS), jnp.float32)
    nothing = jnp.zeros((2, 0, CHANNELS), jnp.float32)
    np.testing.assert_array_equal(short_convolution(x, jnp.full((1, CHANNELS), 3.0, jnp.float32), nothing), 3 * x)
    assert last_inputs(x, nothing).shape == nothing.shape
