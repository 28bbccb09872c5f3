"""Products of which half is computed, against whole ones in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.compression.coding import half_products
from moe_jax.compression.coding.half_products import add_squares, mirrored, weighed_squares, whitened
from tests.support.tiers import examples


@settings(max_examples=examples(6))
@given(size=st.sampled_from((4, 12)), seed=st.integers(0, 100))  # few shapes, of which each is compiled
def test_products_are_those_of_whole_matrices(size: int, seed: int) -> None:
    """With blocks that do not divide the matrix, and one that is larger."""
    random = np.random.default_rng(seed)
    x, more = random.standard_normal((2, 4, size)).astype(np.float32)
    part = random.standard_normal((size, 2)).astype(np.float32)
    wide = x.astype(np.float64).T @ x + more.astype(np.float64).T @ more
    factor = np.triu(random.standard_normal((size, size))).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(half_products, "_ROWS", 5)
        moment = add_squares(add_squares(jnp.zeros((size, size)), jnp.asarray(x)), jnp.asarray(more))
        whole = mirrored.__wrapped__(moment)
        columns = weighed_squares.__wrapped__(whole, jnp.asarray(part))
        product = whitened.__wrapped__(jnp.asarray(factor), jnp.asarray(part))
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(whole, wide, **close)
    np.testing.assert_array_equal(whole, whole.T)
    np.testing.assert_allclose(columns, np.sum(part * (wide @ part), axis=0), **close)
    np.testing.assert_allclose(product, factor.astype(np.float64).T @ part, **close)
