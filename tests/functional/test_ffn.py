"""Activations against their definitions in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from moe_jax.kernels.plain import ACTIVATION_FUNCTIONS

X = np.linspace(-6, 6, 1001)
DEFINITIONS = {
    "silu": X * scipy.special.expit(X),
    "gelu": X * scipy.special.ndtr(X),
    "gelu_tanh": X / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (X + 0.044715 * X**3))),
    "quick_gelu": X * scipy.special.expit(1.702 * X),
    "relu": np.maximum(X, 0),
}


def test_every_activation_has_a_definition():
    assert ACTIVATION_FUNCTIONS.keys() == DEFINITIONS.keys()


@pytest.mark.parametrize("name", DEFINITIONS)
def test_activations(name):
    got = jax.jit(ACTIVATION_FUNCTIONS[name])(jnp.asarray(X, jnp.float32))
    np.testing.assert_allclose(got, DEFINITIONS[name], atol=2e-6)
