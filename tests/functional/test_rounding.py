"""Stochastic rounding: to a neighbour, unbiased, and nothing where there is nothing to round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_jax.functional.keys import round_stochastically


@given(st.lists(st.floats(width=32), min_size=20, max_size=20), st.integers(0, 2**31 - 1))
def test_the_result_is_one_of_the_two_neighbours(numbers, seed):
    x = np.array(numbers, np.float32)
    got = np.asarray(round_stochastically(jnp.asarray(x), jax.random.key(seed)))
    bits = x.view(np.uint32)
    below = (bits & 0xFFFF0000).view(np.float32)  # nearer to zero
    above = ((bits & 0xFFFF0000) + (0x10000 * (bits & 0xFFFF != 0)).astype(np.uint32)).view(np.float32)
    is_nan = np.isnan(x)
    assert (np.isnan(got.astype(np.float32)) == is_nan).all()
    got = got.astype(np.float32)[~is_nan]
    assert ((got == below[~is_nan]) | (got == above[~is_nan])).all()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_it_goes_up_as_often_as_its_share_of_a_step(share, sign):
    step, draws = 2.0**-7, 20_000
    x = jnp.full(draws, sign * (1 + share * step), jnp.float32)
    up = np.mean(np.abs(np.asarray(round_stochastically(x, jax.random.key(0)), np.float32)) > 1)
    assert abs(up - share) <= 4 * np.sqrt(share * (1 - share) / draws)
