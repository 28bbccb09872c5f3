"""Rows that are taken from tables, and gradients that do not stop growing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.functional.dense import take_rows
from moe_jax.functional.token_dispatch import row_biases

pytestmark = pytest.mark.usefixtures("strict_numerics")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_and_gradients_are_those_of_a_sum_in_float64(dtype):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((5, 3)), dtype)
    rows = rng.integers(0, 4, (300, 10))
    rows[:, 0], rows[:, 1] = 5, -1  # there is no such row, and the last
    taken, back = jax.vjp(lambda table: take_rows(table, jnp.asarray(rows, jnp.int32), fill_value=0.0), table)
    expected = np.asarray(table, np.float64)[np.minimum(rows, 4)] * (rows < 5)[..., None]
    np.testing.assert_array_equal(np.asarray(taken, np.float64), expected)
    dy = jnp.asarray(1 + 0.1 * rng.standard_normal(taken.shape), dtype)
    sums = np.zeros((6, 3))
    np.add.at(sums, np.where(rows < 0, 4, rows), np.asarray(dy, np.float64))
    (found,) = back(dy)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), sums[:5], rtol=1e-2)


def test_biases_of_many_rows_have_whole_gradients():
    sizes = jnp.array([3000, 1000, 0], jnp.int32)
    biases = jnp.zeros((3, 2), jnp.bfloat16)
    summed = jax.grad(lambda biases: jnp.sum(row_biases(biases, sizes, 4500).astype(jnp.float32)))
    np.testing.assert_allclose(summed(biases).astype(jnp.float32)[:, 0], [3000, 1000, 0], rtol=0.01)
