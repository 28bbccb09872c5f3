"""What the tests here share: they need a GPU, and errors are relative to the whole array."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.environment import PLATFORM

needs_gpu = pytest.mark.skipif(PLATFORM == "cpu", reason="needs a GPU: make test-gpu")

# One rounding of every entry of a result, and as much again for what is rounded on the way to it.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-21}


def error(got, expected):
    """The norm of the difference, relative to that of what is expected."""
    got, expected = (np.asarray(a, np.float64) for a in (got, expected))
    assert np.isfinite(got).all() and got.shape == expected.shape
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30))


def normal(seed, shape, dtype, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape, np.float32), jnp.dtype(dtype))
