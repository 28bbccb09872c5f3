"""How results are compared with a reference, and how those of a module are found."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def assert_close(got, expected, tolerance=1e-5):
    """Every leaf within the tolerance, relative to the largest entry of the expected one where that is above 1."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(np.max(np.abs(b))))
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=tolerance)


def gradients_and_output(graphdef, rest, apply):
    """A program `(params, x, target)` -> gradients of `sum(apply(module, x) * target)` to both, and the output."""

    def value(params, x, target):
        y = apply(nnx.merge(graphdef, params, rest), x)
        return jnp.sum(y * target), y

    return jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))
