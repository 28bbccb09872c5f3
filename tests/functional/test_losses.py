"""The loss is what float64 makes of the logits, whatever their dtype and size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from tests.support.losses import next_token_loss, token_losses

pytestmark = pytest.mark.usefixtures("strict_numerics")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_and_their_gradient(dtype):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((2, 5, 300)) * 30, dtype)
    targets, weights = rng.integers(0, 300, (2, 5)).astype(np.int32), rng.random((2, 5)).astype(np.float32)
    exact = scipy.special.log_softmax(np.asarray(logits, np.float64), axis=-1)
    expected = -np.take_along_axis(exact, targets[..., None], axis=-1)[..., 0]
    losses = jax.jit(token_losses)(logits, targets)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, expected, rtol=2e-6, atol=2e-5)
    (total, weight), gradient = jax.jit(jax.value_and_grad(next_token_loss, has_aux=True))(logits, targets, weights)
    np.testing.assert_allclose([total, weight], [(expected * weights).sum(), weights.sum()], rtol=2e-6)
    expected = (np.exp(exact) - (np.arange(300) == targets[..., None])) * weights[..., None]
    np.testing.assert_allclose(np.asarray(gradient, np.float64), expected, rtol=2.0**-8, atol=1e-6)
