"""Activations against their definitions in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from moe_jax.core.errors import InputError
from moe_jax.experts.shapes import AdapterConfig, FFNConfig
from moe_jax.functional import register_activation
from moe_jax.functional.dense import hidden
from moe_jax.kernels.plain import ACTIVATION_FUNCTIONS, GATED_ACTIVATIONS

X = np.linspace(-6, 6, 1001)
DEFINITIONS = {
    "silu": X * scipy.special.expit(X),
    "gelu": X * scipy.special.ndtr(X),
    "gelu_tanh": X / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (X + 0.044715 * X**3))),
    "quick_gelu": X * scipy.special.expit(1.702 * X),
    "relu": np.maximum(X, 0),
    "relu2": np.maximum(X, 0) ** 2,
}


def test_every_activation_has_a_definition():
    assert ACTIVATION_FUNCTIONS.keys() == DEFINITIONS.keys()


@pytest.mark.parametrize("name", DEFINITIONS)
def test_activations(name):
    got = jax.jit(ACTIVATION_FUNCTIONS[name])(jnp.asarray(X, jnp.float32))
    np.testing.assert_allclose(got, DEFINITIONS[name], atol=2e-6)


def test_the_clamped_swiglu():
    """gpt-oss: the gate is bounded above, the other factor on both sides, and one is added to that."""
    gate, up = (12 * np.random.default_rng(seed).standard_normal(1001) for seed in range(2))
    assert GATED_ACTIVATIONS.keys() == {"swiglu_clamped"}
    bounded, other = np.minimum(gate, 7), np.clip(up, -7, 7)
    expected = (other + 1) * bounded * scipy.special.expit(1.702 * bounded)
    given = (jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32))
    got, gradients_of = jax.vjp(lambda gate, up: hidden(up, gate, "swiglu_clamped"), *given)
    gradients = gradients_of(jnp.ones_like(got))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert (np.asarray(gradients[0])[gate > 7] == 0).all() and (np.asarray(gradients[1])[np.abs(up) > 7] == 0).all()


def test_the_clamped_swiglu_is_for_gated_ffns():
    with pytest.raises(InputError, match="has no gate"):
        FFNConfig(dim=8, gated=False, activation="swiglu_clamped")
    with pytest.raises(InputError, match="unknown activation 'swiglu_clamped'"):
        AdapterConfig(rank=2, activation="swiglu_clamped")
    with pytest.raises(InputError, match="mean 'swiglu_clamped'"):
        FFNConfig(dim=8, activation="swiglu_clampd")
    with pytest.raises(InputError, match="of the library's"):
        register_activation("swiglu_clamped", jnp.tanh)
